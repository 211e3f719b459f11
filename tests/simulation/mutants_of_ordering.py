"""Mutants of all code for queues with ordering: in the core, in receivers, and in the positions of groups."""

from __future__ import annotations

from tests.simulation.mutant import ORDERING, Mutant, mutant

_CONSUMER, _CORE = "marq.consumer.", "marq.core."
_ORDERING, _WRITER = _CONSUMER + "ordering", _CONSUMER + "writer"
_LEASES, _TRANSITIONS = _CORE + "lease_book", _CORE + "transitions"
_POSITIONS = "marq.kafka.queue_positions"

ORDERING_MUTANTS: tuple[Mutant, ...] = (
    # --- the next message of a line -----------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "the next message is delivered before the outcome of the previous one is durable",
        _WRITER,
        "order concurrent",
        ("            self._listener.settled(outcomes.ended)\n", "            pass\n"),
        (
            "        sent_s, pause_s = self.now_s(), FIRST_RETRY_S\n",
            ("        self._listener.settled(outcomes.ended)\n        sent_s, pause_s = self.now_s(), FIRST_RETRY_S\n"),
        ),
        marker_slow=0.5,
    ),
    mutant(
        ORDERING,
        "all messages with the same key are delivered at once",
        _CONSUMER + "turns",
        "order exclusion concurrent limit",
        (
            "            if is_next and (others := running.get(key, 0)) < most:\n",
            "            if (others := running.get(key, 0)) < (most and inf):\n",
        ),
        ("        return offset in self.begun\n\n    def is_early", "        return True\n\n    def is_early"),
    ),
    mutant(
        ORDERING,
        "a release ends a message",
        _ORDERING,
        "order lost not-drained stuck",
        (
            "                self._is_lost(batch, release.offset, now_s)\n",
            "                self._end([release.offset], now_s)\n",
        ),
    ),
    mutant(
        ORDERING,
        "the lines of a former assignment go on",
        _CONSUMER + "receiver",
        "order exclusion attempts unexplained concurrent stuck",
        ("        self.ordering.give_up()\n", "        pass\n"),
    ),
    # --- a new reader -------------------------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "open messages in an answer are mistaken for new ones",
        _ORDERING,
        "order exclusion attempts unexplained",
        ("holder, parts[0].acquired, opened, now_s", "holder, (), {}, now_s"),
    ),
    mutant(
        ORDERING,
        "finished messages that are read again are taken for new ones",
        _ORDERING,
        "order attempts unexplained",
        ("holder, parts[0].acquired, opened, now_s", "holder, (), opened, now_s"),
    ),
    mutant(
        ORDERING,
        "open messages in an answer are taken for finished ones",
        _ORDERING,
        "lost not-drained stuck order",
        ("holder, parts[0].acquired, opened, now_s", "holder, parts[0].acquired, {}, now_s"),
    ),
    mutant(
        ORDERING,
        "a reader does not wait for the lease of another holder",
        _ORDERING,
        "exclusion attempts",
        (
            "(retry.offset, None)) is not None:\n                self._ask_later(retry, message, now_s)\n",
            "(retry.offset, None)) is not None:\n                retry.asks = False\n",
        ),
    ),
    mutant(
        ORDERING,
        "a reader asks about another holder's lease, and does not wait for its end",
        _ORDERING,
        "exclusion",
        ("        waits = message.until_s > now_s\n", "        waits = False\n"),
    ),
    mutant(
        ORDERING,
        "the holder of ordered messages is random",
        _ORDERING,
        "order exclusion stuck lost not-drained attempts unexplained",
        ("ordered_holder(parts[0].asked_at, random)", "random"),
    ),
    mutant(
        ORDERING,
        "a late ACQUIRE of a former reader takes messages from its successor",
        _LEASES,
        "book-differs exclusion attempts",
        ("        if batch.in_order and state in IN_ORDER:\n", "        if False:\n"),
        acquire_slow=0.5,
        rebalance_every_ms=300.0,
        late_news=0.5,
    ),
    # --- positions ----------------------------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "the end of what was read is committed instead of the lowest open message",
        _ORDERING,
        "lost not-drained stuck no-copy order",
        ("        return next(iter(self._values), inf)\n", "        return inf\n"),
    ),
    # --- attempts -----------------------------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "a lease that has ended does not count as an attempt",
        _ORDERING,
        "attempts unexplained",
        (
            "            self._attempt(retry, used + 1, before or LEASE_ENDED, cause=Cause.EXPIRED)\n",
            "            self._attempt(retry, max(1, used), before or LEASE_ENDED, cause=Cause.EXPIRED)\n",
        ),
    ),
    # --- the tracker --------------------------------------------------------------------------------------------------
    Mutant(
        ORDERING,
        "the tracker redelivers messages that keep their place",
        {
            _LEASES: (("        if lease.state in IN_ORDER:\n            return\n", ""),),
            _TRANSITIONS: (
                (
                    "    EXHAUSTED: Due(",
                    (
                        "    LEASED_IN_ORDER: Due(Cause.EXPIRED, Kind.REDELIVERED, exhausted=Kind.DEAD_LETTERED),\n"
                        "    WAITING_IN_ORDER: Due(Cause.RELEASED, Kind.REDELIVERED, exhausted=Kind.DEAD_LETTERED),\n"
                        "    EXHAUSTED: Due("
                    ),
                ),
            ),
        },
        frozenset({"no-copy"}),
    ),
    mutant(
        ORDERING,
        "the tracker redelivers a message after its last release",
        _TRANSITIONS,
        "dead-letter no-copy",
        ("EXHAUSTED: Due(Cause.RELEASED, Kind.DEAD_LETTERED,", "EXHAUSTED: Due(Cause.RELEASED, Kind.REDELIVERED,"),
        settings_every_ms=200.0,
        late_settings=0.8,
        forgotten=0.3,
    ),
    mutant(
        ORDERING,
        "messages whose records are gone stay open",
        _LEASES,
        "book-differs table-differs lost not-drained stuck",
        (
            "        if batch.onwards:\n            self._release_before",
            "        if False:\n            self._release_before",
        ),
    ),
)
