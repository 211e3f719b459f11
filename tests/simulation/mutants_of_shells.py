"""Mutants of the simulated consumers and trackers: the orders of operations that real ones must keep, the other way."""

from __future__ import annotations

from tests.simulation.mutant import (
    CHANGELOG_FIRST,
    FENCE_FIRST,
    LEASE_LOST,
    MARKER_FIRST,
    OLD_STATE,
    ONE_START,
    ONE_TRANSACTION,
    READERS,
    REOPENING,
    RETENTION,
    SETTINGS,
    SIZES,
    TICK_FIRST,
    TIME,
    UNKNOWN_VERSION,
    Mutant,
    mutant,
)

_SIMULATION = "tests.simulation."
_CONSUMER, _OUTCOMES, _OWNER = _SIMULATION + "consumer", _SIMULATION + "outcomes", _SIMULATION + "tracker"
_STARTING, _GROUP = _SIMULATION + "starting", _SIMULATION + "group"
_WRITING, _TABLE = _SIMULATION + "writing", _SIMULATION + "table"

SHELL_MUTANTS = (
    # --- marker before offset -----------------------------------------------------------------------------------------
    mutant(
        MARKER_FIRST,
        "the offset is committed before the marker is written",
        _CONSUMER,
        "lost not-drained",
        (
            "            self._acquire(reading, own, end)\n",
            (
                "            after = self.progress.after(self.serving, {reading.source: end})\n"
                "            if reading.source in after:\n"
                "                early = Committed(end, after[reading.source].encode(end))\n"
                "                self.group.commit(reading.source, early, reading.generation, self)\n"
                "            self._acquire(reading, own, end)\n"
            ),
        ),
    ),
    mutant(
        MARKER_FIRST,
        "an uncertain ACQUIRE is handed out",
        _CONSUMER,
        "lost not-drained not-open",
        ("if any(each is not Sent.OK for each in results):", "if False:"),
    ),
    mutant(
        MARKER_FIRST,
        "after an uncertain commit the messages are handed out",
        _CONSUMER,
        "delivered-twice lost",
        (
            'commit_failed):\n            self.again(reading, "commit")\n',
            "commit_failed):\n            self.hand_out(reading, own, end, began_ms, leases_ms)\n",
        ),
    ),
    mutant(
        REOPENING,
        "from_offset is always 0",
        _CONSUMER,
        "lost not-drained",
        ("after.get(queue, reading.start),", "0,"),
    ),
    # --- changelog before acknowledgement -----------------------------------------------------------------------------
    Mutant(
        CHANGELOG_FIRST,
        "markers are acknowledged before the changelog has them, and a new owner begins behind them",
        {
            _WRITING: (
                (
                    "        rng.shuffle(write.stages)\n",
                    "        rng.shuffle(write.stages)\n        if flush:\n            owner.acknowledge(write)\n",
                ),
            ),
            _OWNER: (
                (
                    "        self.position = applied + 1\n",
                    "        self.position = max(applied + 1, self.world.tracker_offsets[self.partition])\n",
                ),
            ),
        },
        frozenset({"book-differs", "table-differs", "raised", "stuck", "lost"}),
    ),
    mutant(
        CHANGELOG_FIRST,
        "the local table is written before the changelog",
        _WRITING,
        "table-differs quarantine",
        (
            "            write.changes = dict(self.pending)\n",
            (
                "            write.changes = dict(self.pending)\n"
                "            owner.table.write(self.pending, owner.table.position, self._world.now_ms)\n"
            ),
        ),
    ),
    mutant(
        CHANGELOG_FIRST,
        "the rows of a failed transaction are forgotten",
        _WRITING,
        "no-row table-differs",
        (
            "self.pending.update(owner.tracker.book.take_changes())",
            "self.pending = owner.tracker.book.take_changes()",
        ),
    ),
    # --- copy, fact and row in one transaction ------------------------------------------------------------------------
    mutant(
        ONE_TRANSACTION,
        "copies are written outside of the transaction",
        _WRITING,
        "transaction rejected",
        ("headers=made.headers, transaction=write.transaction, timestamp", "headers=made.headers, timestamp"),
    ),
    mutant(
        ONE_TRANSACTION,
        "facts are written outside of the transaction",
        _WRITING,
        "transaction lost fired-twice",
        (
            "owner.markers.append(encode(batch), about=batch, transaction=write.transaction)",
            "owner.markers.append(encode(batch), about=batch)",
        ),
    ),
    mutant(
        ONE_TRANSACTION,
        "rows are written outside of the transaction",
        _WRITING,
        "table-differs rows-left no-row quarantine",
        (
            "owner.changelog.append(row, key=key, transaction=write.transaction)",
            "owner.changelog.append(row, key=key)",
        ),
    ),
    # --- fencing before recovery --------------------------------------------------------------------------------------
    mutant(
        FENCE_FIRST,
        "the changelog is read before the former owner is fenced",
        _OWNER,
        "table-differs rows-left",
        ("        # 1. Fence.\n        self._fence()\n", ""),
        ("        self._begin()\n", "        self.later(20, self._fence)\n        self.later(21, self._begin)\n"),
        tracker_rebalance_every_ms=200.0,
        forgotten=0.3,
        late_read=0.5,
    ),
    mutant(
        FENCE_FIRST,
        "an owner that was overtaken writes on",
        _OWNER,
        "table-differs rows-left",
        ("if self._overtaken(former_epoch):", "if False:"),
        tracker_rebalance_every_ms=300.0,
        flush_unknown=0.3,
        forgotten=0.3,
        late_read=0.5,
    ),
    mutant(
        FENCE_FIRST,
        "the changelog is not read to its end",
        _OWNER,
        "table-differs rows-left",
        ("        if chunk < end:\n", "        if False:\n"),
    ),
    # --- TICK read back before firing ---------------------------------------------------------------------------------
    mutant(
        TICK_FIRST,
        "after an unknown outcome the owner goes on without a new TICK",
        _OWNER,
        "before-own-tick stuck",
        ("        self.tracker.take_over_again()\n", ""),
    ),
    # --- LeaseLost ----------------------------------------------------------------------------------------------------
    mutant(
        LEASE_LOST,
        "a lease is counted from when its messages are handed out",
        _CONSUMER,
        "lease-not-noticed",
        ("lost_at_ms = began_ms + leases_ms[queue]", "lost_at_ms = self.monotonic_ms() + leases_ms[queue]"),
        marker_slow=0.4,
        forgotten=0.5,
    ),
    mutant(
        LEASE_LOST,
        "a lease is counted by the settings at the moment of handing out",
        _CONSUMER,
        "lease-not-noticed",
        ("lost_at_ms = began_ms + leases_ms[queue]", "lost_at_ms = began_ms + self.lease_ms(queue)"),
        settings_every_ms=100.0,
        marker_slow=0.5,
        forgotten=0.5,
    ),
    mutant(
        LEASE_LOST,
        "a RENEW that failed keeps the lease",
        _OUTCOMES,
        "lease-not-noticed",
        ("if held is not None and result is Sent.OK and now_ms", "if held is not None and now_ms"),
        marker_failed=0.5,
        marker_slow=0.2,
    ),
    mutant(
        LEASE_LOST,
        "a RENEW that came too late revives the lease",
        _OUTCOMES,
        "lease-not-noticed",
        ("and result is Sent.OK and now_ms < held.lost_at_ms:", "and result is Sent.OK:"),
        marker_slow=0.9,
    ),
    # --- what a client is told ----------------------------------------------------------------------------------------
    mutant(
        TIME,
        "leases are not renewed",
        _OUTCOMES,
        "unexplained",
        (
            "            self.write(batch, written, faults.marker_failed, faults.marker_unknown)\n        consumer",
            "        consumer",
        ),
    ),
    mutant(
        MARKER_FIRST,
        "an outcome that was not written is confirmed",
        _OUTCOMES,
        "not-durable",
        ("over, Sent.FAILED)", "over, Sent.OK)"),
    ),
    # --- sizes --------------------------------------------------------------------------------------------------------
    mutant(
        SIZES,
        "a copy that the broker refuses for its size is sent again and again",
        _WRITING,
        "stuck",
        ("            self._refused.add((fire.source, fire.offset))\n", ""),
        large=0.6,
        forgotten=0.2,
    ),
    # --- unknown version ----------------------------------------------------------------------------------------------
    mutant(
        UNKNOWN_VERSION,
        "a shell goes on behind a marker of a newer version",
        _OWNER,
        "book-differs table-differs raised not-drained",
        (
            "            tracker.read(self._known(record.value), record.timestamp, record.offset)\n",
            (
                "            try:\n"
                "                tracker.read(self._known(record.value), record.timestamp, record.offset)\n"
                "            except UnknownVersion:\n"
                "                tracker.book.skip(record.timestamp, record.offset)\n"
            ),
        ),
        newer_marker=0.05,
    ),
    # --- retention ----------------------------------------------------------------------------------------------------
    mutant(
        RETENTION,
        "a lost position is passed over in silence",
        _OWNER,
        "position-lost book-differs table-differs stuck",
        ("        if self.markers.start > self.position:\n            raise", "        if False:\n            raise"),
    ),
    mutant(
        RETENTION,
        "a gap in what is delivered is passed over",
        _OWNER,
        "book-differs table-differs raised",
        ("            if start > self.position:\n", "            if False:\n"),
    ),
    mutant(
        RETENTION,
        "unread messages that are gone are passed over in silence",
        _CONSUMER,
        "silent",
        ('        self.world.history.add(self.name, "ok", "skipped", source=source, start', "        dict(start"),
        unread_gone_every_ms=300.0,
        consumer_pause=0.03,
    ),
    # --- old local state ----------------------------------------------------------------------------------------------
    mutant(
        OLD_STATE,
        "an old table is brought up to date all the same",
        _TABLE,
        "table-differs rows-left raised",
        ("if self.rows and world.now_ms - self.written_ms > MAX_LOCAL_AGE_MS:", "if False:"),
        changelog_compacted_every_ms=200.0,
        tracker_rebalance_every_ms=900.0,
        forgotten=0.3,
    ),
    mutant(
        OLD_STATE,
        "a table is believed although its changelog was made anew",
        _TABLE,
        "table-differs rows-left raised",
        (
            "            self.discard()\n            self.changelog = changelog\n",
            "            self.changelog = changelog\n",
        ),
        changelog_lost_every_ms=600.0,
        tracker_rebalance_every_ms=500.0,
        forgotten=0.3,
    ),
    mutant(
        OLD_STATE,
        "only a table that is ahead of its changelog is thrown away",
        _TABLE,
        "table-differs rows-left raised",
        (
            "        if self.changelog is not changelog:\n",
            "        if self.position > changelog.end(committed=True):\n",
        ),
        changelog_lost_every_ms=600.0,
        tracker_rebalance_every_ms=500.0,
    ),
    # --- settings -----------------------------------------------------------------------------------------------------
    mutant(
        SETTINGS,
        "trackers begin before they have read the settings",
        _OWNER,
        "dead-letter attempts book-differs",
        ("        self.known = world.definitions.newest\n", "        self.known = 0\n"),
    ),
    mutant(
        SETTINGS,
        "a change of the settings is noted, and does not count",
        _OWNER,
        "dead-letter attempts",
        ("self.world.definitions.of(self).settings(queue)", "self.world.definitions.versions[1].settings(queue)"),
        settings_every_ms=200.0,
        forgotten=0.3,
    ),
    # --- ACQUIRE and offset in one transaction ------------------------------------------------------------------------
    mutant(
        ONE_START,
        "messages are handed out before the transaction has committed",
        _STARTING,
        "delivered-twice not-open lost from-nowhere not-drained",
        (
            "        consumer.later(world.rng.randint(0, 3), self._decide, cycle, transaction)\n",
            (
                "        reading, own, leases_ms = cycle.reading, cycle.own, cycle.leases_ms\n"
                "        consumer.hand_out(reading, own, cycle.end, cycle.began_ms, leases_ms)\n"
                "        cycle.own = {}\n"
                "        consumer.later(world.rng.randint(0, 3), self._decide, cycle, transaction)\n"
            ),
        ),
    ),
    mutant(
        ONE_START,
        "the offset is committed outside of the transaction",
        _STARTING,
        "lost not-drained",
        (
            "consumer.group.commit_in(transaction, source, committed, cycle.generation, consumer)",
            "consumer.group.commit(source, committed, cycle.generation, consumer)",
        ),
    ),
    mutant(
        ONE_START,
        "the offset is committed although the markers are not known to be written",
        _STARTING,
        "lost not-drained not-durable",
        ("if any(each is not Sent.OK for each in cycle.results) or", "if"),
    ),
    mutant(
        ONE_START,
        "a group takes the commit of a former member in a transaction",
        _GROUP,
        "delivered-twice lost not-drained",
        (
            (
                "        if generation != self.generation or self.assignment.get(source) is not member:\n"
                "            return Commit.REFUSED\n"
                "        self._commits += 1\n"
                "        self.pending.add"
            ),
            "        self._commits += 1\n        self.pending.add",
        ),
    ),
    mutant(
        ONE_START,
        "a new owner does not wait for the transactions of the former one",
        _CONSUMER,
        "delivered-twice",
        ("        if self.group.pending.of(sources):\n", "        if False:\n"),
        rebalance_every_ms=200.0,
        slow_commit=0.6,
        commit_unknown=0.2,
    ),
    # --- readers ------------------------------------------------------------------------------------------------------
    mutant(
        READERS,
        "trackers read markers of transactions that are not committed",
        _OWNER,
        "table-differs book-differs raised stuck",
        ("        end = self.markers.end(committed=True)\n", "        end = self.markers.end(committed=False)\n"),
    ),
    mutant(
        READERS,
        "trackers read markers of aborted transactions",
        _OWNER,
        "table-differs book-differs raised stuck lost",
        ("self.markers.read(start, end, committed=True)", "self.markers.read(start, end, committed=False)"),
    ),
    mutant(
        READERS,
        "a table is recovered from rows that are not committed",
        _TABLE,
        "table-differs rows-left raised quarantine",
        ("changelog.read(self.position, end, committed=True)", "changelog.read(self.position, end, committed=False)"),
    ),
)
