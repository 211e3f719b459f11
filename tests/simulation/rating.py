"""The rates of a simulated consumer: each turn is judged by the times of earlier ones, without the paces of the engine.

In any time that ends with a turn, a queue or key has at most as many turns as its rate allows in that time, and those
that may begin at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from marq.consumer.ordering import KeyQueues
from marq.consumer.turns import Turns
from marq.settings.limits import Rate
from tests.simulation.oracle import Violation, violate

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Not imported from the engine, which may be wrong.
_AT_ONCE_S = 0.1
_ROUNDING = 1e-3


class JudgedRates:
    """Judges the turns of one queue in one consumer, until its settings or its share of the partitions change."""

    def __init__(self, world: World, queue: str, turns: Turns[KeyQueues]) -> None:
        self._world, self._queue, self.turns = world, queue, turns
        self._limits = turns.limits, turns._share
        self._times_s: defaultdict[object, deque[float]] = defaultdict(lambda: deque(maxlen=500))
        self._take_next = turns.take_next
        turns.take_next = self._take  # type: ignore[method-assign]

    def _take(self) -> tuple[KeyQueues, int]:
        turns = self.turns
        source, offset = self._take_next()
        if self._limits != (turns.limits, turns._share):
            self._limits = turns.limits, turns._share
            self._times_s.clear()
        self._judge(turns.limits.rate, turns._share, None)
        key = turns.lines[source]._keys[offset]
        if isinstance(key, bytes):
            self._judge(turns.limits.per_key.rate, 1.0, (source, key))
        return source, offset

    def _judge(self, rate: Rate | None, share: float, whose: tuple[KeyQueues, bytes] | None) -> None:
        if rate is None:
            return
        now_s, times_s = self.turns._now_s, self._times_s[whose]
        times_s.append(now_s)
        per_s = share / rate.interval_s
        at_once = max(1.0, _AT_ONCE_S * per_s)
        for number, began_s in enumerate(reversed(times_s), 1):
            if number > at_once + (now_s - began_s) * per_s + _ROUNDING:
                text = f"{self._queue} {whose}: {number} turns from {began_s} to {now_s}, but its share is {per_s}/s"
                self._world.schedule(0, violate, Violation("rate", text))
                return
        self._world.stats["rated_turns"] += 1
        self._world.stats["late_turns"] += len(times_s) > 1 and now_s - times_s[-2] > _ROUNDING
