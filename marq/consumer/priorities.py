"""Which queue of a consumer is next: the priorities of its queues, as a pure engine.

Each queue gets ten times as many turns as one of the next lower priority while messages of both wait (stride
scheduling), and queues of the same priority get the same number. A queue whose message waits for a handler holds back
those of lower priorities, even if they have handlers of their own. A queue that was held back for a second has the next
turn, so a handler that hangs does not stop the others. A queue at one of its limits, or without messages, holds back no
other, and saves up neither turns nor debts.

Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Generic

from marq.consumer.turns import L, Turns

#: How many times as many turns a queue gets as one of the next lower priority.
FACTOR = 10
#: How long a queue is held back at most.
MAX_HELD_BACK_S = 1.0


@dataclass(slots=True, eq=False)
class _Queue(Generic[L]):
    """``position`` is the sum of the strides of its turns; of the waiting queues, the one with the lowest is next.

    ``since_s`` is when it had its last turn, or began to wait.
    """

    turns: Turns[L]
    priority: int
    stride: int = 1
    position: int = 0
    since_s: float = inf


class Priorities(Generic[L]):
    """The queues with priorities of one receiver."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue[L]] = {}
        #: The position of the last turn.
        self._position = 0
        #: When to call :meth:`take` at the latest, if nothing else happens.
        self.next_s = inf
        #: How many messages of all queues may have their turns now, if the queues share their handlers.
        self.wanted: float = inf

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    def serve(self, turns: Mapping[str, Turns[L]], priorities: Mapping[str, int]) -> None:
        """Serve queues with these priorities, highest number first."""
        ranks = {priority: rank for rank, priority in enumerate(sorted(set(priorities.values()), reverse=True))}
        before, self._queues = self._queues, {}
        for queue, priority in sorted(priorities.items(), key=lambda pair: -pair[1]):
            known, stride = before.get(queue) or _Queue(turns[queue], priority), FACTOR ** ranks[priority]
            if known.stride != stride:
                known.position = self._position
            known.turns, known.priority, known.stride = turns[queue], priority, stride
            self._queues[queue] = known

    def take(self, now_s: float) -> list[tuple[L, int]]:
        """Return the messages that have their turns now, with their sources."""
        waiting: list[_Queue[L]] = []
        for queue in self._queues.values():
            if not queue.turns.paused:
                queue.turns.pass_time(now_s)
                if queue.turns.has_next():
                    waiting.append(queue)
                    if queue.since_s == inf:
                        # Neither turns that it left to others nor an earlier lead count.
                        queue.position = min(max(queue.position, self._position), self._position + queue.stride)
                        queue.since_s = now_s
                    continue
            queue.since_s = inf
        taken: list[tuple[L, int]] = []
        held_back: list[_Queue[L]] = []
        blocking = -inf
        while waiting and len(taken) < self.wanted:
            overdue = [queue for queue in waiting if now_s - queue.since_s >= MAX_HELD_BACK_S]
            # min() returns the first of equal ones, and the queues are sorted by priority.
            queue = min(overdue or waiting, key=lambda queue: queue.since_s if overdue else queue.position)
            turns = queue.turns
            if turns.running >= turns.wanted:
                blocking = max(blocking, queue.priority)
                waiting.remove(queue)
            elif queue.priority < blocking and not overdue:
                held_back.append(queue)
                waiting.remove(queue)
            else:
                taken.append(turns.take_next())
                queue.since_s = now_s
                if not overdue:
                    # An overdue turn is extra: its stride would move the others' starts far ahead.
                    self._position = max(self._position, queue.position)
                    queue.position += queue.stride
                if not turns.has_next():
                    queue.since_s = inf
                    waiting.remove(queue)
        self.wanted -= len(taken)
        self.next_s = min([queue.since_s + MAX_HELD_BACK_S for queue in held_back], default=inf)
        return taken
