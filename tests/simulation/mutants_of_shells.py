"""Mutants of receivers, of the engine of owners, and of simulated files and transactions.

Each reverses an order of operations that the shipped code must keep.
"""

from __future__ import annotations

from tests.simulation.mutant import (
    AT_MOST_ONCE,
    CHANGELOG_FIRST,
    FENCE_FIRST,
    FIDELITY,
    FIRING,
    KILLERS,
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
_READING, _OWNER = _SIMULATION + "reading", _SIMULATION + "tracker"
_ENGINE = "marq.owner.engine"
_STARTING, _GROUP = _SIMULATION + "starting", _SIMULATION + "group"
_RECEIVER, _HELD = "marq.consumer.receiver", "marq.leases.held"
_WRITER_LOOP, _STARTS = "marq.consumer.writer", "marq.consumer.starts"
_HANDLER_POOL = "marq.consumer.handler_pool"
_ACQUISITION = "marq.consumer.acquire"
_WRITING, _TABLE = _SIMULATION + "writing", _SIMULATION + "table"

SHELL_MUTANTS = (
    # --- marker before offset -----------------------------------------------------------------------------------------
    mutant(
        MARKER_FIRST,
        "the offset is committed before the marker is written",
        _RECEIVER,
        "lost not-drained",
        (
            "                await self._acquire(cycle)\n",
            (
                "                if cycle.ends:\n"
                "                    await self._reader.commit(cycle.ends)\n"
                "                await self._acquire(cycle)\n"
            ),
        ),
    ),
    mutant(
        MARKER_FIRST,
        "messages of an uncertain ACQUIRE are delivered",
        _RECEIVER,
        "lost not-drained not-open",
        (
            "            await self._acquirer.write(cycle.markers, cycle.limit_s)\n",
            (
                "            try:\n"
                "                await self._acquirer.write(cycle.markers, cycle.limit_s)\n"
                "            except Exception:\n"
                "                pass\n"
            ),
        ),
    ),
    mutant(
        MARKER_FIRST,
        "messages are delivered after an uncertain commit",
        _RECEIVER,
        "delivered-twice lost stuck",
        (
            "                await self._reader.commit(offsets, lows)\n",
            (
                "                try:\n"
                "                    await self._reader.commit(offsets, lows)\n"
                "                except Exception:\n"
                "                    pass\n"
            ),
        ),
    ),
    mutant(
        REOPENING,
        "from_offset is always 0",
        _ACQUISITION,
        "lost not-drained silent purged order",
        ("holder, offsets, from_offset, piece,", "holder, offsets, 0, piece,"),
    ),
    mutant(
        REOPENING,
        "from_offset of messages in mixed ACQUIREs is always 0",
        _ACQUISITION,
        "lost not-drained silent purged order not-durable",
        ("    known = taken.from_offset\n", "    known = 0\n"),
        acquire_failed=0.4,
    ),
    mutant(
        MARKER_FIRST,
        "the last message of a mixed ACQUIRE is left out",
        _ACQUISITION,
        "lost not-drained silent not-open",
        ("zip(*rows[part], strict=True)", "zip(*rows[part][:-1], strict=True)"),
    ),
    # --- changelog before acknowledgement -----------------------------------------------------------------------------
    Mutant(
        CHANGELOG_FIRST,
        "markers are acknowledged before the changelog has them, and a new owner begins behind them",
        {
            _ENGINE: (
                (
                    "        self.notes += tracker.notes()\n",
                    "        self.notes += tracker.notes()\n        self._acknowledge(tracker.book.applied)\n",
                ),
            ),
            _OWNER: (
                (
                    "        self.delivered = self.world.rng.choice(",
                    (
                        "        committed = self.world.tracker_offsets[self.partition]\n"
                        "        self.engine.position = position = max(position, committed)\n"
                        "        self.delivered = self.world.rng.choice("
                    ),
                ),
            ),
        },
        # A skipped marker may also be one that belongs in quarantine.
        frozenset({"book-differs", "table-differs", "raised", "stuck", "lost", "quarantine"}),
    ),
    mutant(
        CHANGELOG_FIRST,
        "the local table is written before the changelog",
        _ENGINE,
        "table-differs quarantine",
        (
            "        self.notes += tracker.notes()\n",
            "        self.notes += tracker.notes()\n        self._table.write(self.pending, 0)\n",
        ),
    ),
    mutant(
        CHANGELOG_FIRST,
        "the rows of a failed transaction are forgotten",
        _ENGINE,
        "no-row table-differs",
        ("self.pending.update(tracker.book.take_changes())", "self.pending = tracker.book.take_changes()"),
    ),
    # --- copy, fact and row in one transaction ------------------------------------------------------------------------
    mutant(
        ONE_TRANSACTION,
        "copies are written outside of the transaction",
        _WRITING,
        "transaction rejected",
        ("headers=made.headers, transaction=attempt.transaction, timestamp", "headers=made.headers, timestamp"),
    ),
    mutant(
        ONE_TRANSACTION,
        "facts are written outside of the transaction",
        _WRITING,
        "transaction lost fired-twice rejected",
        (
            "owner.markers.append(encode(batch), about=batch, transaction=attempt.transaction)",
            "owner.markers.append(encode(batch), about=batch)",
        ),
    ),
    mutant(
        ONE_TRANSACTION,
        "rows are written outside of the transaction",
        _WRITING,
        "table-differs rows-left no-row quarantine",
        (
            "owner.changelog.append(row, key=key, transaction=attempt.transaction)",
            "owner.changelog.append(row, key=key)",
        ),
    ),
    # --- fencing before recovery --------------------------------------------------------------------------------------
    mutant(
        FENCE_FIRST,
        "the changelog is read before the former owner is fenced",
        _ENGINE,
        "table-differs rows-left",
        ("        yield Step.FENCE\n", ""),
        ("            yield Step.RECOVER\n", "            yield Step.RECOVER\n        yield Step.FENCE\n"),
        tracker_rebalance_every_ms=200.0,
        forgotten=0.3,
        late_read=0.5,
    ),
    mutant(
        FENCE_FIRST,
        "an owner that was overtaken writes on",
        _ENGINE,
        "table-differs rows-left answered",
        ("if former is not None and epoch != (former[0], former[1] + 1):", "if False:"),
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
        _ENGINE,
        "before-own-tick stuck",
        ("        self.tracker.take_over_again()\n", ""),
    ),
    # --- LeaseLost ----------------------------------------------------------------------------------------------------
    mutant(
        LEASE_LOST,
        "a lease is counted from the delivery of its messages",
        _RECEIVER,
        "lease-not-noticed purged",
        ("records, sent_s, taken.lease_ms / 1000", "records, self._now_s(), taken.lease_ms / 1000"),
        acquire_slow=0.5,
        renew_slow=0.4,
        forgotten=0.5,
    ),
    mutant(
        LEASE_LOST,
        "a lease is counted by the settings at the moment of handing out",
        _RECEIVER,
        "lease-not-noticed unexplained",
        ("sent_s, taken.lease_ms / 1000, codec", "sent_s, settings.lease_of(taken.queue) / 1000, codec"),
        settings_every_ms=100.0,
        acquire_slow=0.5,
        renew_slow=0.5,
        forgotten=0.5,
    ),
    mutant(
        LEASE_LOST,
        "a RENEW that failed keeps the lease",
        _WRITER_LOOP,
        "lease-not-noticed",
        ("len(shares), error)\n            return False\n", "len(shares), error)\n"),
        renew_failed=0.5,
        renew_slow=0.2,
    ),
    mutant(
        LEASE_LOST,
        "a RENEW that came too late revives the lease",
        _HELD,
        "lease-not-noticed attempts",
        ("            if done_s < batch.expires_s:\n", "            if True:\n"),
        renew_failed=0.6,
        renew_paused=0.5,
    ),
    # --- at most once -------------------------------------------------------------------------------------------------
    mutant(
        AT_MOST_ONCE,
        "a handler is called before the DISPATCH is durable",
        _HANDLER_POOL,
        "dispatched",
        (
            ("                    if not await self._started([message]):\n                        continue\n"),
            "                    asyncio.ensure_future(self._started([message]))\n",
        ),
    ),
    mutant(
        AT_MOST_ONCE,
        "a message is delivered although its DISPATCH came too late",
        _STARTS,
        "dispatched attempts",
        (
            "        leased = [message for message in messages if is_leased(message, now_s)]\n",
            "        leased = list(messages)\n",
        ),
        renew_failed=0.9,
        marker_slow=0.9,
    ),
    mutant(
        AT_MOST_ONCE,
        "a message that was not dispatched is delivered",
        _STARTS,
        "dispatched",
        ("                await self._writer.settled()\n", "                pass\n"),
    ),
    mutant(
        AT_MOST_ONCE,
        "messages that are delivered at most once are acquired with the marker first",
        _RECEIVER,
        "dispatched",
        ("if at_most_once or self._acquirer is None else None", "if self._acquirer is None else None"),
    ),
    # --- handlers that end their process ------------------------------------------------------------------------------
    mutant(
        KILLERS,
        "the attempts of prefetched messages count",
        _ACQUISITION,
        "blamed",
        ("            counted or not (settings.prefetch or keys is not None),\n", "            True,\n"),
        killer=1.0,
    ),
    mutant(
        KILLERS,
        "suspects use up their last attempts together",
        "marq.consumer.prefetch",
        "blamed",
        ("        if attempt >= self._settings.queue(message.queue).max_attempts:\n", "        if False:\n"),
        killer=1.0,
    )._replace(plan={"messages": 30, "purges": 0.0, "expires": 0}),
    mutant(
        KILLERS,
        "a suspect is handled before its start is durable",
        _STARTS,
        "unblamed",
        ("return batch.at_most_once or (batch.starts_first and is_suspect(message))", "return batch.at_most_once"),
        killer=1.0,
    ),
    mutant(
        KILLERS,
        "a tracker overlooks that user code has a message",
        "marq.core.lease_book",
        "book-differs",
        ("counted = lease.counted or started", "counted = lease.counted"),
    ),
    mutant(
        KILLERS,
        "a RENEW that comes late shortens a lease",
        "marq.core.lease_book",
        "book-differs",
        ("until_ms = due_ms if exactly else max(due_ms, lease.due_ms)", "until_ms = due_ms"),
    ),
    # --- cycles -------------------------------------------------------------------------------------------------------
    mutant(
        MARKER_FIRST,
        "a cycle commits although the one before it has failed",
        _RECEIVER,
        "lost not-drained delivered-twice silent",
        ("                await ended(cycle.before)\n                # A rebalance", "                # A rebalance"),
    ),
    mutant(
        MARKER_FIRST,
        "a cycle that fails does not go back for those after it",
        _RECEIVER,
        "lost not-drained delivered-twice stuck",
        ("        starts = self._fetched.clear() | ", "        starts = {} and "),
    ),
    # --- what a client is told ----------------------------------------------------------------------------------------
    mutant(
        TIME,
        "leases are not renewed",
        _HELD,
        "unexplained",
        ("            if not early and now_s", "            if False and now_s"),
    ),
    mutant(
        MARKER_FIRST,
        "an outcome that was not written is confirmed",
        _WRITER_LOOP,
        "not-durable",
        ("            await asyncio.sleep(pause_s)\n", "            break\n"),
    ),
    # --- sizes --------------------------------------------------------------------------------------------------------
    mutant(
        SIZES,
        "a copy that the broker refuses for its size is sent again and again",
        _ENGINE,
        "stuck",
        (
            "self._apart.append((dead_letter(fire, Cause.TOO_LARGE), payload))",
            "self._apart.append((fire, payload))",
        ),
        large=0.6,
        forgotten=0.2,
    ),
    # --- payloads in records ------------------------------------------------------------------------------------------
    mutant(
        FIDELITY,
        "a message is sent again without the payload that is only in its record",
        _ENGINE,
        "fidelity",
        ("            if payload.left and fire.destination is not Destination.NOWHERE:\n", "            if False:\n"),
    ),
    mutant(
        FIDELITY,
        "a message whose record is gone is sent again without a value",
        _ENGINE,
        "fidelity",
        (
            "                payload = gone(name, left.timestamp_ms)\n",
            "                payload = Payload(left.timestamp_ms, 1, None, (), None)\n",
        ),
    ),
    mutant(
        FIRING,
        "a message whose payload was copied is not due again",
        _ENGINE,
        "stuck not-drained lost",
        ("            self.tracker.book.remind(place)\n", ""),
    ),
    mutant(
        FIRING,
        "a message whose payload is missing counts as sent",
        "marq.core.lease_book",
        "stuck not-drained lost",
        ("self._known_of(fire.lease.queue, fire.source).firing.discard(fire.offset)", "pass"),
    ),
    mutant(
        OLD_STATE,
        "a new owner does not know which payloads are only in records",
        "marq.core.storage.table_image",
        "stuck not-drained lost",
        ("                left.append(offset)\n", "                pass\n"),
    ),
    mutant(
        OLD_STATE,
        "an older lease outlives the row that got a payload",
        "marq.core.storage.table_image",
        "table-differs",
        ('            changes.update(dict.fromkeys(row_keys(queue, source, sorted(replaced), b"s")))\n', ""),
        tracker_crash=0.02,
        renew_slow=0.5,
    ),
    # --- unknown version ----------------------------------------------------------------------------------------------
    mutant(
        UNKNOWN_VERSION,
        "a shell goes on behind a marker of a newer version",
        _ENGINE,
        "book-differs table-differs raised not-drained",
        (
            (
                '                self.stopped_before = offset, value or b""\n'
                "                self.let_go()\n"
                "                raise\n"
            ),
            "                book.skip(record.timestamp, offset)\n",
        ),
        newer_marker=0.05,
    ),
    # --- retention ----------------------------------------------------------------------------------------------------
    mutant(
        RETENTION,
        "a lost position is passed over in silence",
        _ENGINE,
        "position-lost book-differs table-differs stuck",
        ("        if start > position:\n            raise", "        if False:\n            raise"),
    ),
    mutant(
        RETENTION,
        "a gap in what is delivered is passed over",
        _ENGINE,
        "book-differs table-differs raised",
        ("        if start > position:\n            return False", "        if False:\n            return False"),
    ),
    mutant(
        RETENTION,
        "unread messages that are gone are passed over in silence",
        _READING,
        "silent",
        (
            '            world.history.add(self._consumer.name, "ok", "skipped", source=log_name',
            "            dict(source=log_name",
        ),
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
        "a local table is used although its changelog was recreated",
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
        "messages are delivered before the transaction has committed",
        _RECEIVER,
        "delivered-twice not-open lost from-nowhere not-drained",
        (
            "                await self._commit(cycle)\n",
            (
                "                if cycle.transactions is not None:\n"
                "                    self._deliver_acquired(cycle, sent_s)\n"
                "                    cycle.acquisitions = []\n"
                "                await self._commit(cycle)\n"
            ),
        ),
    ),
    mutant(
        ONE_START,
        "the offset is committed outside of the transaction",
        _RECEIVER,
        "lost not-drained fidelity",
        (
            "                await cycle.transactions.write(cycle.markers, commit, cycle.limit_s)\n",
            (
                "                await self._reader.commit(offsets)\n"
                "                await cycle.transactions.write(cycle.markers, commit, cycle.limit_s)\n"
            ),
        ),
    ),
    mutant(
        ONE_START,
        "the offset is committed although the markers are not known to be written",
        _STARTING,
        "lost not-drained not-durable stuck",
        ("failed = any(each is not Sent.OK for each in results)", "failed = False"),
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
        _READING,
        "delivered-twice",
        ("        if self._group.pending.of(sources):\n", "        if False:\n"),
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
