"""The state of a run while it is under way: what the consumers' journals and the dead-letters topic say so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from demo.account import DeadLetter
from demo.journal import Entry, What
from demo.plan import Plan

#: A lease that has no more than this left is not counted as held: it may be over when the consumer is killed.
_MARGIN_MS = 1_000


class Tally:
    """Counts by id: a message that ended twice has ended."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.sent = 0
        self.ready: set[str] = set()
        self.journals: dict[str, list[Entry]] = defaultdict(list)
        self.acked: set[int] = set()
        self.dead: set[int] = set()
        #: Numbers that a consumer handled; with those in ``acked`` taken away, the ones in doubt if it is killed.
        self._handled: dict[str, set[int]] = defaultdict(set)

    def enter(self, consumer: str, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.journals[consumer].append(entry)
            if entry.what is What.ACKED:
                self.acked.add(entry.number)
            elif entry.what is What.HANDLED:
                self._handled[consumer].add(entry.number)
            elif entry.what is What.READY:
                self.ready.add(consumer)

    def enter_dead(self, letters: Iterable[DeadLetter]) -> None:
        self.dead.update(letter.number for letter in letters if letter.number is not None)

    @property
    def open(self) -> int:
        """How many messages have not ended."""
        return self._plan.messages - len(self.acked | self.dead)

    @property
    def share(self) -> float:
        return 1 - self.open / self._plan.messages

    def held(self, consumer: str, now_ms: int) -> int:
        """Return how many leases a consumer holds at least: those that it forgot a moment ago."""
        since_ms = now_ms - int(self._plan.lease_seconds * 1000) + _MARGIN_MS
        return sum(entry.what is What.FORGOT for entry in self._since(consumer, since_ms))

    def _since(self, consumer: str, since_ms: int) -> Iterable[Entry]:
        for entry in reversed(self.journals[consumer]):
            if entry.at_ms < since_ms:
                return
            yield entry

    def rest(self) -> set[int]:
        """Return the messages that have not ended as far as is known."""
        return set(range(self._plan.messages)) - self.acked - self.dead

    def in_doubt(self, consumer: str) -> set[int]:
        """Return the messages that have not ended as far as is known, if this consumer handled each; else {}."""
        rest = self.rest()
        return rest if rest <= self._handled[consumer] else set()

    def settle(self, consumer: str, acked: Iterable[tuple[int, int]]) -> None:
        """Count as acked what a consumer handled and of which the log holds the ack, by the record."""
        keys = set(acked)
        for entry in self.journals[consumer]:
            if entry.what is What.HANDLED and (entry.partition, entry.offset) in keys:
                self.acked.add(entry.number)
