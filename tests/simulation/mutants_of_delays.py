"""Mutants of all code for delayed messages: in the core, and in the simulated senders, askers and consumers."""

from __future__ import annotations

from tests.simulation.mutant import ANSWERING, CANCELLING, DELAYING, MOVING, Mutant, mutant

_CORE, _SIMULATION = "marq.core.", "tests.simulation."
_LEASES, _TRANSITIONS, _TABLE_IMAGE = _CORE + "lease_book", _CORE + "transitions", _CORE + "storage.table_image"
_TRACKER, _FIRES = _CORE + "tracker", _CORE + "redeliver_or_dead_letter"
_ACQUISITION, _DELAYING = "marq.consumer.acquire", _SIMULATION + "delaying"

DELAY_MUTANTS: tuple[Mutant, ...] = (
    # --- delay --------------------------------------------------------------------------------------------------------
    mutant(
        DELAYING,
        "a waiting message becomes due at the start of its index span",
        _LEASES,
        "early moved order",
        (
            "            lease.due_ms, lease.since_ms, place,",
            (
                "            lease.due_ms // 1000 * 1000 if lease.state in (2, 4) else lease.due_ms,"
                " lease.since_ms, place,"
            ),
        ),
    ),
    mutant(
        DELAYING,
        "a relative time counts from when the message was sent",
        _LEASES,
        "book-differs early moved",
        ("base_ms = now_ms if batch.relative else 0", "base_ms = now_ms - 50 if batch.relative else 0"),
    ),
    mutant(
        DELAYING,
        "the first delivery of a delayed message consumes an attempt",
        _FIRES,
        "attempts",
        ("fact is Kind.REDELIVERED and lease.counted", "fact in TO_QUEUE and lease.counted"),
    ),
    mutant(
        DELAYING,
        "a DELAY that is written again opens what was delivered",
        _LEASES,
        "book-differs table-differs fired-twice",
        ("            acquired.add(batch.from_offset, offsets[-1] + 1)\n", ""),
        send_unknown=0.5,
        marker_slow=0.3,
    ),
    mutant(
        DELAYING,
        "delayed messages are forgotten after a restart",
        _TABLE_IMAGE,
        "table-differs lost not-drained",
        (
            "            leases[offset] = lease\n",
            "            if lease.state < 4:\n                leases[offset] = lease\n",
        ),
    ),
    mutant(
        DELAYING,
        "messages due in the same millisecond are sent in any order",
        _LEASES,
        "order",
        ("            lease.due_ms, lease.since_ms, place,", "            lease.due_ms, -lease.since_ms, place,"),
    ),
    mutant(
        DELAYING,
        "a consumer delivers a delayed message before its time",
        _ACQUISITION,
        "early",
        ("        if self.dues_ms is None:\n            return self.taken\n", "        return self.taken\n"),
    ),
    mutant(
        DELAYING,
        "a sender that repeats itself speaks for messages that are not written yet",
        _DELAYING,
        "lost not-drained",
        (
            "return first if self._unconfirmed[partition] else self.world.rng.randint(0, first)",
            "return 0",
        ),
        send_unknown=0.5,
        marker_slow=0.5,
    ),
    # --- cancel -------------------------------------------------------------------------------------------------------
    mutant(
        CANCELLING,
        "a CANCEL of what is on its way is forgotten",
        _LEASES,
        "book-differs cancelled",
        (
            "                self._replace(opened, offsets, final)\n",
            (
                "                offsets = [offset for offset in offsets if offset not in opened.firing]\n"
                "                if offsets:\n"
                "                    self._replace(opened, offsets, final)\n"
            ),
        ),
        slow_commit=0.3,
        flush_aborted=0.2,
        flush_unknown=0.2,
    ),
    mutant(
        CANCELLING,
        "a copy is sent of what was cancelled",
        _FIRES,
        "transaction",
        (
            "    if fact in TO_QUEUE:\n",
            "    if fact in (*TO_QUEUE, Kind.CANCELLED):\n",
        ),
    ),
    mutant(
        CANCELLING,
        "a message in flight is cancelled",
        _TRANSITIONS,
        "book-differs cancelled after-ack answered early",
        ("Marker.CANCEL: _CANCELLABLE,", "Marker.CANCEL: {**_CANCELLABLE, LEASED: CANCELLED, REJECTED: CANCELLED},"),
    ),
    # --- reschedule ---------------------------------------------------------------------------------------------------
    mutant(
        MOVING,
        "what was moved is not looked for at its new time",
        _LEASES,
        "stuck",
        (
            "                self._replace(opened, group, later)\n",
            "                opened.replace(group, later)\n",
        ),
    ),
    mutant(
        MOVING,
        "what was moved is sent at its old time",
        _TABLE_IMAGE,
        "moved order",
        (
            "if leases.get(offset) is lease and offset not in firing]",
            (
                "if (leases.get(offset) is lease or (offset in leases and leases[offset].state == 4))"
                " and offset not in firing]"
            ),
        ),
    ),
    # --- answer -------------------------------------------------------------------------------------------------------
    mutant(
        ANSWERING,
        "the reply for a message that is being sent is DONE",
        _LEASES,
        "answered",
        (
            "            if lease is not None and book.is_firing(lease.queue, source, offset):\n",
            "            if False:\n",
        ),
        slow_commit=0.8,
        late_read=0.5,
    ),
    mutant(
        ANSWERING,
        "an owner answers before it has read the former owner's markers",
        _TRACKER,
        "answered",
        (
            "return [] if self._tick_clock_ms is None else self.book.take_answers()",
            "return self.book.take_answers()",
        ),
        tracker_crash=0.03,
        tracker_rebalance_every_ms=200.0,
        late_read=0.5,
        slow_commit=0.5,
    ),
    mutant(
        ANSWERING,
        "a request that comes too late is answered with success",
        _LEASES,
        "answered",
        (
            "            left = lease is None or offset not in book.open_in(lease.queue, source)\n",
            "            left = False\n",
        ),
    ),
    mutant(
        ANSWERING,
        "a repeated request reads only later markers",
        _DELAYING,
        "answered cancelled",
        (
            "            self._put(asking)\n        self.later",
            (
                "            self._put(asking)\n"
                "            asking.position = asking.log.end(committed=False)\n"
                "        self.later"
            ),
        ),
        tracker_pause=0.03,
        starved=0.02,
        marker_unknown=0.3,
    ),
)
