"""Mutants of marq itself: of its core, and of how positions are kept in a group."""

from __future__ import annotations

from tests.simulation.mutant import (
    ATTEMPTS,
    COALESCING,
    FIDELITY,
    FIRING,
    GROUPS,
    HOLDER,
    IDENTITY,
    ONE_TRANSACTION,
    REOPENING,
    SIZES,
    TICK_FIRST,
    TIME,
    UNKNOWN_VERSION,
    mutant,
)

_CORE, _STORAGE, _KAFKA = "marq.core.", "marq.core.storage.", "marq.kafka."
_LEASES, _TRACKER, _CLOCK, _MARKS = (
    _CORE + "lease_book",
    _CORE + "tracker",
    _STORAGE + "log_clock",
    _STORAGE + "acquired_ranges",
)
_TRANSITIONS, _FIRES = _CORE + "transitions", _CORE + "redeliver_or_dead_letter"
_TABLE_IMAGE = _STORAGE + "table_image"
_REDELIVERIES, _ROWS = _CORE + "deliveries.redelivery_records", _STORAGE + "rows"
_POSITIONS = _KAFKA + "queue_positions"

CORE_MUTANTS = (
    # --- identity: topic, partition and offset of a record ------------------------------------------------------------
    mutant(
        IDENTITY,
        "a copy's id is its parent's place",
        _REDELIVERIES,
        "fidelity from-nowhere transaction",
        ("(ID_HEADER, past.id.encode())", "(ID_HEADER, record_id(fire.source, fire.offset).encode())"),
    ),
    mutant(
        IDENTITY,
        "offsets of all partitions are one",
        _LEASES,
        "book-differs lost not-drained table-differs",
        ("self._acquired_of(batch.queue, source)", "self._acquired_of(batch.queue, source._replace(partition=0))"),
    ),
    mutant(
        IDENTITY,
        "rows of all partitions have one key",
        _ROWS,
        "table-differs raised no-row rows-left fidelity",
        ("len(topic), topic, source.partition)", "len(topic), topic, 0)"),
    ),
    # --- reopening: a finished record stays finished, one whose marker was lost is opened -----------------------------
    mutant(
        REOPENING,
        "an ACQUIRE of a finished record opens it again",
        _TRANSITIONS,
        "book-differs",
        ("ACQUIRE: {NEW: LEASED, LEASED: LEASED,", "ACQUIRE: {NEW: LEASED, LEASED: LEASED, ENDED: LEASED,"),
    ),
    mutant(
        REOPENING,
        "a first acquisition counts as a repeated one",
        _LEASES,
        "book-differs",
        (
            "        else:\n            counts.reacquired",
            "        if state is not NEW or offsets is not batch.offsets:\n            counts.reacquired",
        ),
    ),
    mutant(
        REOPENING,
        "a high-water mark in place of intervals",
        _MARKS,
        "lost not-drained book-differs",
        ("return index >= 0 and offset < self._ends[index]", "return offset < self.end"),
    ),
    mutant(
        REOPENING,
        "a gap between marks is closed",
        _MARKS,
        "lost not-drained book-differs table-differs",
        ("        high = bisect_right(starts, end)\n", "        high = len(starts)\n"),
    ),
    mutant(
        REOPENING,
        "marks are not saved",
        _TABLE_IMAGE,
        "table-differs",
        (
            "        self._touched_acquired.clear()\n",
            (
                "        self._touched_acquired.clear()\n"
                '        changes = {key: row for key, row in changes.items() if key[:1] != b"m"}\n'
            ),
        ),
    ),
    # --- coalescing: exactly what the plain fold gives ----------------------------------------------------------------
    mutant(
        COALESCING,
        "coalescing forgets that a row exists from before",
        _TABLE_IMAGE,
        "table-differs rows-left",
        ("if pop_fresh(offset, None) is None:", "if pop_fresh(offset, None) is not None:"),
    ),
    mutant(
        COALESCING,
        "deletions are not written",
        _TABLE_IMAGE,
        "table-differs rows-left",
        ('        changes.update(dict.fromkeys(row_keys(queue, source, self.ended, b"r")))\n', ""),
    ),
    mutant(
        COALESCING,
        "the second row of a message outlives it",
        _TABLE_IMAGE,
        "table-differs rows-left",
        ("        gone = [offset for offset in self.ended if offset in self.overridden]\n", "        gone = []\n"),
    ),
    mutant(
        COALESCING,
        "a lease that changed after its row was written is not written",
        _TABLE_IMAGE,
        "table-differs",
        ("            changes[key] = encode_lease(self.leases[offset])\n", "            pass\n"),
    ),
    mutant(
        COALESCING,
        "a restored lease is the one of its ACQUIRE",
        _TABLE_IMAGE,
        "table-differs",
        ("            leases.update({offset: changed[offset] for offset in still_open})\n", ""),
    ),
    # --- holder -------------------------------------------------------------------------------------------------------
    mutant(
        HOLDER,
        "an ACQUIRE does not take a leased record over",
        _TRANSITIONS,
        "book-differs early",
        ("ACQUIRE: {NEW: LEASED, LEASED: LEASED,", "ACQUIRE: {NEW: LEASED,"),
    ),
    mutant(
        HOLDER,
        "an ACQUIRE takes over what was released or rejected",
        _TRANSITIONS,
        "book-differs wrong-cause",
        ("ACQUIRE: {NEW: LEASED, LEASED: LEASED,", "ACQUIRE: {NEW: LEASED, **dict.fromkeys(State, LEASED),"),
    ),
    mutant(
        HOLDER,
        "a RENEW, RELEASE or REJECT counts from anyone",
        _LEASES,
        "book-differs early wrong-cause",
        ("        return marker not in HOLDER_ONLY or lease.holder == holder\n", "        return True\n"),
    ),
    mutant(
        HOLDER,
        "an ACK counts only from the holder",
        _LEASES,
        "book-differs after-ack",
        (
            "closed = self._close(self._known_of(batch.queue, batch.source), batch.offsets, _ACK)",
            (
                "opened = self._known_of(batch.queue, batch.source)\n"
                "        closed = self._close(opened, [o for o in batch.offsets"
                " if o in opened.leases and opened.leases[o].holder == batch.holder], _ACK)"
            ),
        ),
    ),
    mutant(
        HOLDER,
        "a REJECT is forgotten",
        _TRANSITIONS,
        "book-differs",
        ("REJECT: {LEASED: REJECTED, DISPATCHED: REJECTED, LEASED_IN_ORDER: REJECTED}", "REJECT: {}"),
    ),
    # --- firing -------------------------------------------------------------------------------------------------------
    mutant(
        FIRING,
        "what is on its way is not remembered",
        _LEASES,
        "fired-twice stuck raised answered",
        ("            opened.firing.update(waiting)\n            self._firing_count += len(waiting)\n", ""),
    ),
    mutant(
        FIRING,
        "what is on its way is never forgotten",
        _LEASES,
        "stuck",
        ("            opened.firing.clear()\n", "            pass\n"),
    ),
    mutant(
        FIRING,
        "a fact does not close its message",
        _TRANSITIONS,
        "book-differs fired-twice",
        ("Marker.FACT: END", "Marker.FACT: {}"),
    ),
    mutant(
        ONE_TRANSACTION,
        "an aborted copy is not sent again",
        _LEASES,
        "stuck",
        ("                    self._hint_at(opened, offset)\n", "                    pass\n"),
    ),
    mutant(
        ONE_TRANSACTION,
        "the applied offset is not saved",
        _TABLE_IMAGE,
        "table-differs raised",
        ("rows.encode_applied(self.applied, self.clock)", "rows.encode_applied(min(0, self.applied), self.clock)"),
    ),
    mutant(
        FIRING,
        "a stale entry of the heap is trusted",
        _TABLE_IMAGE,
        "early renewed wrong-cause raised attempts cancelled",
        (
            "if leases.get(offset) is lease and offset not in firing]",
            "if offset in leases and offset not in firing]",
        ),
    ),
    # --- sizes --------------------------------------------------------------------------------------------------------
    mutant(
        SIZES,
        "what is too large to be sent again is dropped",
        _FIRES,
        "transaction",
        (
            "return DueAction(fire.source, fire.offset, fire.lease, Destination.DEAD_LETTERS, attempts_used",
            "return DueAction(fire.source, fire.offset, fire.lease, Destination.NOWHERE, attempts_used",
        ),
    ),
    mutant(
        SIZES,
        "what is too large becomes a dead letter of the next attempt",
        _FIRES,
        "attempts fidelity",
        (
            "Destination.DEAD_LETTERS, attempts_used(fire), cause)",
            "Destination.DEAD_LETTERS, fire.attempt, cause)",
        ),
    ),
    mutant(
        SIZES,
        "small messages are too large",
        _FIRES,
        "dead-letter",
        ("limit_bytes - HEADER_ROOM_BYTES // 2", "limit_bytes - HEADER_ROOM_BYTES * 29 // 10"),
    ),
    mutant(
        SIZES,
        "what was too large to be acquired is delivered without its value",
        _FIRES,
        "fidelity",
        (" and not left_out(payload)", ""),
        large=0.6,
    ),
    # --- unknown version ----------------------------------------------------------------------------------------------
    mutant(
        UNKNOWN_VERSION,
        "a marker of a newer version is garbage",
        _TRACKER,
        "quarantine book-differs",
        ("            if order is None:\n                raise\n", ""),
    ),
    mutant(
        UNKNOWN_VERSION,
        "garbage is not kept",
        _TRACKER,
        "quarantine",
        ("        self.unreadable.append((offset, value, why))\n", ""),
    ),
    # --- time ---------------------------------------------------------------------------------------------------------
    mutant(
        TIME,
        "a row is due a little early",
        _LEASES,
        "early renewed",
        ("self._heap[0].due_ms <= now_ms else", "self._heap[0].due_ms <= now_ms + 20 else"),
    ),
    mutant(
        TIME,
        "the clock is the last append time, not the largest",
        _CLOCK,
        "book-differs early",
        ("        if corrected > self.now_ms:\n", "        if corrected:\n"),
    ),
    mutant(
        TIME,
        "a broker's clock that jumps is believed",
        _CLOCK,
        "book-differs early",
        ("if ahead > MAX_DRIFT_MS or behind < -MAX_DRIFT_MS:", "if False:"),
    ),
    mutant(
        TICK_FIRST,
        "due by the last record read, not by an own TICK",
        _TRACKER,
        "early renewed",
        ("return self.book.due(self._tick_clock_ms)", "return self.book.due(self.book.clock.now_ms)"),
    ),
    mutant(
        TICK_FIRST,
        "the own TICK is not awaited",
        _TRACKER,
        "before-own-tick stuck",
        (
            "if self._tick_clock_ms is None or self._awaiting_tick:\n            return []\n",
            "if self._tick_clock_ms is None:\n            self._tick_clock_ms = self.book.clock.now_ms\n",
        ),
    ),
    mutant(
        TICK_FIRST,
        "a TICK from before the new fencing counts",
        _TRACKER,
        "before-own-tick fired-twice",
        ("if batch.monotonic_ms != self._tick_sent_at_ms:", "if False:"),
    ),
    # --- attempts, fidelity -------------------------------------------------------------------------------------------
    mutant(
        ATTEMPTS,
        "one attempt more than the limit",
        _FIRES,
        "dead-letter",
        ("is_exhausted(lease.attempt, lease.counted", "is_exhausted(lease.attempt - 1, lease.counted"),
    ),
    mutant(
        ATTEMPTS,
        "a message that failed its last attempt waits for its backoff",
        _FIRES,
        "book-differs table-differs",
        ("if is_exhausted(attempt, counted, settings) and", "if False and"),
    ),
    mutant(
        ATTEMPTS,
        "a message whose attempt before the last one failed comes back without a backoff",
        _FIRES,
        "book-differs table-differs early",
        ("if is_exhausted(attempt, counted, settings) and", "if is_exhausted(attempt + 1, counted, settings) and"),
    ),
    mutant(
        ATTEMPTS,
        "a release that does not count raises the attempt",
        _FIRES,
        "attempts",
        ("fact is Kind.REDELIVERED and lease.counted", "fact is Kind.REDELIVERED"),
    ),
    mutant(
        ATTEMPTS,
        "attempts are not written",
        "marq.wire.marker_codec",
        "book-differs attempts",
        ("    if columns.attempts is not None:\n", "    if False:\n"),
    ),
    mutant(
        FIDELITY,
        "a copy loses the headers of its sender",
        _REDELIVERIES,
        "fidelity",
        ("[*kept, *own]", "[*own]"),
    ),
    mutant(
        FIDELITY,
        "the key of a sender is lost outside the queue's own topic",
        _REDELIVERIES,
        "fidelity",
        ("        own.append((KEY_HEADER, payload.key))\n", "        pass\n"),
    ),
    mutant(
        FIDELITY,
        "a copy was first sent when its parent was",
        "marq.wire.record_headers",
        "fidelity",
        ("_number(values.get(FIRST_SENT_HEADER), max(0, timestamp_ms))\n    return", "timestamp_ms\n    return"),
    ),
    # --- groups -------------------------------------------------------------------------------------------------------
    mutant(
        GROUPS,
        "a queue that joins a group begins where the group is",
        _POSITIONS,
        "lost not-drained stuck order",
        (
            "return max(min((by_queue.get(queue, 0) for queue in queues), default=0), log_start)",
            "return max(max((by_queue.get(queue, 0) for queue in queues), default=0), log_start)",
        ),
    ),
    mutant(
        GROUPS,
        "a member commits for queues that it does not serve, too",
        _POSITIONS,
        "lost not-drained",
        (
            "                serving.queues_in(source.topic),\n                offset,\n",
            "                [*serving.queues_in(source.topic), *positions.by_queue],\n                offset,\n",
        ),
        move_every_ms=500.0,
        late_settings=0.5,
    ),
    mutant(
        GROUPS,
        "records that a queue has already received are delivered again",
        _POSITIONS,
        "delivered-twice",
        (
            "return offset < self._own.get(queue, 0) or (offset < self._reached and queue in self._members)",
            "return False",
        ),
        move_every_ms=400.0,
        late_settings=0.5,
        commit_failed=0.3,
        consumer_pause=0.03,
    ),
    mutant(
        GROUPS,
        "the queues of a snapshot stay where they were when it was written",
        _POSITIONS,
        "delivered-twice",
        ("**{queue: max(position, offset) for queue, position in self.served.items()},", "**self.served,"),
    ),
    mutant(
        GROUPS,
        "a new snapshot forgets which queues are ahead",
        _POSITIONS,
        "delivered-twice attempts",
        ("position if (position := positions.get(queue, 0)) > start else 0 for", "0 for"),
        move_every_ms=300.0,
        late_settings=0.5,
        consumer_crash=0.02,
        commit_failed=0.3,
        consumer_pause=0.03,
    ),
    mutant(
        GROUPS,
        "a snapshot will do for queues of which it knows nothing, or less",
        _POSITIONS,
        "delivered-twice",
        (" < 0 or queue in current.past or max(", " >= 0 and max("),
        move_every_ms=150.0,
        late_settings=0.8,
        commit_failed=0.5,
        consumer_crash=0.05,
        rebalance_every_ms=500.0,
    ),
    mutant(
        GROUPS,
        "a queue that has left moves on with the snapshot that it is in",
        _POSITIONS,
        "lost not-drained",
        (
            "if queue in current.served or current.past.get(queue) != position:",
            "if current.past.get(queue, position) != position:",
        ),
        move_every_ms=300.0,
        late_settings=0.5,
        consumer_crash=0.02,
        commit_failed=0.3,
        consumer_pause=0.03,
    ),
)
