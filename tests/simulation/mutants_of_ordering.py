"""Mutants of all code for queues with ordering: in the core, in receivers, and in the positions of groups."""

from __future__ import annotations

from tests.simulation.mutant import ORDERING, Mutant, mutant

_CONSUMER, _CORE = "marq.consumer.", "marq.core."
_LINES, _LINE_ORDER = _CONSUMER + "one_per_key", _CONSUMER + "line_links"
_ORDERING, _ACK_BATCHER = _CONSUMER + "ordered_receiving", _CONSUMER + "ack_batcher"
_LEASES, _DUE_INDEX, _TRANSITIONS = _CORE + "lease_book", _CORE + "due_index", _CORE + "transitions"
_POSITIONS = "marq.kafka.queue_positions"

ORDERING_MUTANTS: tuple[Mutant, ...] = (
    # --- the next message of a line -----------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "the next message is delivered before the outcome of the previous one is durable",
        _ACK_BATCHER,
        "order concurrent",
        (
            "        self._extend(renewals, now_s)\n        _settle(settled)\n",
            "        self._extend(renewals, now_s)\n",
        ),
        ("        pause_s = FIRST", "        _settle(settled)\n        pause_s = FIRST"),
        marker_slow=0.5,
    ),
    mutant(
        ORDERING,
        "all messages with the same key are delivered at once",
        _LINE_ORDER,
        "order exclusion concurrent",
        (
            "            if previous is None:\n                firsts.append(offset)\n",
            "            firsts.append(offset)\n            if previous is None:\n                pass\n",
        ),
        ("        return offset not in self._before\n", "        return True\n"),
    ),
    mutant(
        ORDERING,
        "a release ends a message",
        _LINES,
        "order lost not-drained stuck",
        ("                self._released(each)\n", "                self._end([each.offset])\n"),
    ),
    mutant(
        ORDERING,
        "the lines of a former assignment go on",
        _ORDERING,
        "order exclusion attempts unexplained concurrent",
        ("            lines.active = False\n", "            pass\n"),
    ),
    # --- a new reader -------------------------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "open messages in an answer are mistaken for new ones",
        _ORDERING,
        "order exclusion attempts unexplained",
        ("parts[0].acquired, opened, own_topic", "(), {}, own_topic"),
    ),
    mutant(
        ORDERING,
        "finished messages that are read again are taken for new ones",
        _ORDERING,
        "order attempts unexplained",
        ("parts[0].acquired, opened, own_topic", "(), opened, own_topic"),
    ),
    mutant(
        ORDERING,
        "open messages in an answer are taken for finished ones",
        _ORDERING,
        "lost not-drained stuck order",
        ("parts[0].acquired, opened, own_topic", "parts[0].acquired, {}, own_topic"),
    ),
    mutant(
        ORDERING,
        "a reader does not wait for the lease of another holder",
        _LINES,
        "exclusion",
        ("opened.until_s, True, opened.leased\n", "0.0, False, False\n"),
    ),
    mutant(
        ORDERING,
        "a reader asks about another holder's lease, and does not wait for its end",
        _LINES,
        "exclusion",
        ("        elif left_s > 0:\n", "        elif False:\n"),
    ),
    mutant(
        ORDERING,
        "the holder of ordered messages is random",
        _ORDERING,
        "order exclusion stuck lost not-drained attempts",
        ("ordered_holder(parts[0].asked_at, self._new_holder())", "self._new_holder()"),
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
        _LINES,
        "lost not-drained stuck no-copy order",
        ("        return min(next(iter(self._values), end), end)\n", "        return end\n"),
    ),
    # --- attempts -----------------------------------------------------------------------------------------------------
    mutant(
        ORDERING,
        "a lease that has ended does not count as an attempt",
        _LINES,
        "attempts",
        (
            "            self._attempt(place, used + 1, error, expired=True)\n",
            "            self._attempt(place, max(1, used), error, expired=True)\n",
        ),
    ),
    # --- the tracker --------------------------------------------------------------------------------------------------
    Mutant(
        ORDERING,
        "the tracker redelivers messages that keep their place",
        {
            _DUE_INDEX: (("        if lease.state in IN_ORDER:\n            return\n", ""),),
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
