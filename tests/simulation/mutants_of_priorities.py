"""Mutants of the turns of queues with priorities."""

from __future__ import annotations

from tests.simulation.mutant import PRIORITIES, Mutant, mutant

#: Both queues of a group, with many messages; no other faults than late reads, or few messages would wait.
_PLAN = {"priorities": (9, 1), "messages": 100}


def _mutant(name: str, old: str, new: str) -> Mutant:
    made = mutant(PRIORITIES, name, "marq.consumer.priorities", "priority", (old, new), late_read=0.1)
    return made._replace(plan=_PLAN)


PRIORITY_MUTANTS: tuple[Mutant, ...] = (
    _mutant("all queues have as many turns", "FACTOR ** ranks[priority]", "1"),
    _mutant("the lowest priority is first", "priorities.values()), reverse=True)", "priorities.values()))"),
    _mutant("a lower queue has no share", "FACTOR ** ranks[priority]", "FACTOR ** (9 * ranks[priority])"),
    _mutant(
        "a queue that has waited for a second waits on",
        "if now_s - queue.since_s >= MAX_HELD_BACK_S]",
        "if False]",
    ),
    _mutant("a wait begins again with each turn", "if queue.since_s == inf:", "if True:"),
    _mutant(
        "a queue saves up the turns that it left to others",
        "min(max(queue.position, self._position), self._position + queue.stride)",
        "queue.position",
    ),
    _mutant("the turn of an overdue queue is not extra", "if not overdue:", "if True:"),
    _mutant(
        "messages have turns that no handler wants", "while waiting and len(taken) < self.wanted:", "while waiting:"
    ),
)
