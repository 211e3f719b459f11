"""Mutants of the turns in queues with limits or fairness."""

from __future__ import annotations

from tests.simulation.mutant import LIMITS, Mutant, mutant

_TURNS, _ORDERING = "marq.consumer.turns", "marq.consumer.ordering"
#: Not in queues with ordering, where the next message of a key is no question of limits.
_NO_LIMIT_AT_ONCE = (
    "(others := running.get(key, 0)) < most:",
    "(others := running.get(key, 0)) < (most and (most if self.turns.strict else inf)):",
)

LIMIT_MUTANTS: tuple[Mutant, ...] = (
    mutant(
        LIMITS,
        "a key has no limit",
        _TURNS,
        "limit",
        ("self._running.get(key, 0) >= self.turns.most_of_key or key in", "key in"),
        _NO_LIMIT_AT_ONCE,
    ),
    mutant(
        LIMITS,
        "the limit of a key does not count for messages that have just been read",
        _TURNS,
        "limit",
        _NO_LIMIT_AT_ONCE,
    ),
    mutant(
        LIMITS,
        "messages that other consumers have do not count",
        _TURNS,
        "limit",
        ("if offset not in self.begun and (offset in self._parked or self.may_run(offset)):", "if False:"),
    ),
    mutant(
        LIMITS,
        "a message that is to be delivered again needs no other turn",
        _ORDERING,
        "limit",
        ("        if retry.offset not in self.coming:\n", "        if False:\n"),
    ),
    mutant(
        LIMITS,
        "messages of a former assignment do not count",
        _TURNS,
        "limit",
        (
            "        awaited = sum([len(offsets) for place, offsets in ",
            "        awaited = 0 * sum([len(offsets) for place, offsets in ",
        ),
        rebalance_every_ms=400.0,
        late_read=0.9,
    ),
    mutant(
        LIMITS,
        "a message keeps its turn when it has ended",
        _TURNS,
        "stuck",
        (
            "                self._unpark(offset, key)\n            self._end(offset, key)\n",
            "                self._unpark(offset, key)\n",
        ),
    ),
    mutant(
        LIMITS,
        "a message that waits for its delay never comes back",
        _ORDERING,
        "stuck not-drained",
        ("            if not self._order.rejoin(offset):\n", "            if True:\n"),
    ),
    mutant(
        LIMITS,
        "a message without a tracker's answer is delivered with its turn",
        _ORDERING,
        "exclusion duplicate unexplained attempts concurrent limit",
        ("(asked if retry.asks else again)", "(asked if False else again)"),
    ),
    mutant(
        LIMITS,
        "a queue has no rate",
        _TURNS,
        "rate",
        ("        if self.limits.rate is not None and self._now_s < self._may_begin_s:\n", "        if False:\n"),
    ),
    mutant(
        LIMITS,
        "a key has no rate",
        _TURNS,
        "rate",
        ("            elif rated and (begins_s", "            elif False and (begins_s"),
    ),
    mutant(
        LIMITS,
        "each consumer uses the whole rate of a queue",
        _TURNS,
        "rate",
        ("+ self.limits.rate.interval_s / self._share\n", "+ self.limits.rate.interval_s\n"),
    ),
    mutant(
        LIMITS,
        "a pause saves up turns for later",
        _TURNS,
        "rate",
        (
            "            self._pace_s = max(self._pace_s, self._now_s) +",
            "            self._pace_s = max(self._pace_s, self._now_s - 1) +",
        ),
    ),
)
