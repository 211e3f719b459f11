"""The priorities of a simulated consumer: each turn is judged by what waited, without the positions of the engine.

While messages of two queues wait, a turn of the lower one needs a share of turns of the higher one, and the other way
round: ten times as many for each priority between them. Turns of queues that have waited for a second are extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import TYPE_CHECKING

from marq.consumer.ordering import KeyQueues
from marq.consumer.priorities import Priorities
from marq.consumer.turns import Turns
from tests.simulation.oracle import Violation, violate
from tests.simulation.rating import JudgedRates

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Not imported from the engine, which may be wrong.
_FACTOR, _MAX_HELD_BACK_S = 10, 1.0


class JudgedPriorities(Priorities[KeyQueues]):
    """Judges the turns of one consumer."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._priority_of: dict[str, int] = {}
        self._rates: dict[str, JudgedRates] = {}
        #: Since when each queue has waited for a turn.
        self._since_s: dict[str, float] = {}
        #: Turns of the first queue, extra ones apart, while messages of the second one waited, too.
        self._had: Counter[tuple[str, str]] = Counter()

    def serve(self, turns: Mapping[str, Turns[KeyQueues]], priorities: Mapping[str, int]) -> None:
        super().serve(turns, priorities)
        for queue, its in turns.items():
            if queue not in self._rates or self._rates[queue].turns is not its:
                self._rates[queue] = JudgedRates(self._world, queue, its)
        self._priority_of = dict(priorities)
        self._had.clear()
        self._keep(priorities)

    def take(self, now_s: float) -> list[tuple[KeyQueues, int]]:
        for name in self._waiting(now_s):
            self._since_s.setdefault(name, now_s)
        former_s, wanted = dict(self._since_s), self.wanted
        taken = super().take(now_s)
        if len(taken) > max(wanted, 0):
            self._find(f"{len(taken)} turns, although handlers want {wanted} messages")
        waiting = [name for name in self._waiting(now_s) if name in former_s]
        # Queues that wait now have waited all the time: a turn makes no other message wait.
        able = [name for name in waiting if self._queues[name].turns.running < self._queues[name].turns.wanted]
        for keys, _ in taken:
            self._judge(keys.queue, waiting, able, now_s)
        if self.wanted > 0 and any(now_s >= self._since_s[name] + _MAX_HELD_BACK_S for name in able):
            self._find(f"{able} wait since {self._since_s} although handlers are free at {now_s}")
        self._keep(waiting)
        return taken

    def _judge(self, queue: str, waiting: Collection[str], able: Collection[str], now_s: float) -> None:
        """Judge a turn of a queue; ``able`` are those of the waiting ones that have idle handlers."""
        since_s = self._since_s[queue]
        self._since_s[queue] = now_s
        overdue_s = [self._since_s[name] for name in able if now_s - self._since_s[name] >= _MAX_HELD_BACK_S]
        if any(other_s < since_s for other_s in overdue_s):
            self._find(f"{queue} has a turn, although others have waited since {overdue_s}, at {now_s}")
        if now_s - since_s >= _MAX_HELD_BACK_S:
            self._world.stats["overdue_turns"] += 1
            return
        ranks = sorted(set(self._priority_of.values()))
        for other in waiting:
            if other == queue:
                continue
            self._had[queue, other] += 1
            steps = ranks.index(self._priority_of[queue]) - ranks.index(self._priority_of[other])
            self._world.stats["turns_of_higher" if steps > 0 else "turns_of_lower" if steps else "turns_of_equal"] += 1
            # The first turn of each may come at once. A queue whose handlers are busy holds back only lower ones.
            most = 1 + _FACTOR**steps * (self._had[other, queue] + 1)
            if self._had[queue, other] > most and (other in able or steps < 0):
                self._find(f"{self._had[queue, other]} turns of {queue} and {self._had[other, queue]} of {other}")

    def _waiting(self, now_s: float) -> list[str]:
        names = []
        for name, queue in self._queues.items():
            queue.turns.pass_time(now_s)
            if not queue.turns.paused and queue.turns.has_next():
                names.append(name)
        return names

    def _keep(self, waiting: Collection[str]) -> None:
        """Forget the queues that do not wait."""
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in waiting}
        for one, other in combinations(self._priority_of, 2):
            if one not in waiting or other not in waiting:
                self._had.pop((one, other), None)
                self._had.pop((other, one), None)

    def _find(self, text: str) -> None:
        self._world.schedule(0, violate, Violation("priority", text))
