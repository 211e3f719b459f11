"""The account: what became of each message that was sent. Pure, so that it can be shown to find what is wrong.

It rests on three records that know nothing of each other: what the consumers wrote into their journals, the markers
topic, and the dead-letters topic.

* A message is *acked* when a consumer handled it and the log holds the ack of that very delivery.
* It is *dead* when it is in the dead-letters topic, and *lost* when it was sent and is neither.
* Each time it ended more than once is a *duplicate*, whose reason must be found in the log or is "unexplained".
* What was handled and never sent, or not like this, came *from nowhere*.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from demo.journal import Entry, What
from demo.trails import Key, Lateness, Trail, Trails
from marq.core.markers import Cause


class Reason(StrEnum):
    """Why a message ended more than once."""

    CONSUMER_KILLED = "its consumer was killed before the ack was durable"
    TAKEN_OVER = "its consumer was killed before it had committed, and another read the record again"
    LEASE_OVER = "the ack came after the lease had run out"
    TAKEN_TOO_LATE = (
        "its consumer was killed before it had committed, and another read the record after a copy was sent"
    )
    READ_AGAIN = "a rebalance: two consumers read the record"
    ABORTED_COPY = "the copy of a transaction that a killed worker left open"
    UNEXPLAINED = "unexplained"


class DeadLetter(NamedTuple):
    """A record of the dead-letters topic; ``key`` is the delivery that it was made of."""

    number: int | None
    attempt: int
    key: Key
    reason: str
    at_ms: int


class Ending(NamedTuple):
    """A delivery that was to be the last: handled by a consumer, or made a dead letter (then ``consumer`` is None)."""

    at_ms: int
    attempt: int
    key: Key
    consumer: str | None


class Duplicate(NamedTuple):
    """A message ended at ``first``, and again at ``second``."""

    number: int
    first: Ending
    second: Ending
    reason: Reason


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at the end of a run."""

    sent: Collection[int]
    journals: Mapping[str, Sequence[Entry]]
    dead_letters: Sequence[DeadLetter]
    trails: Mapping[Key, Trail]
    #: Consumers that got kill -9.
    killed: Collection[str] = ()
    #: Records of the messages topic whose transaction was aborted.
    aborted: Collection[Key] = ()


@dataclass(slots=True)
class Account:
    """The result; messages are named by their numbers."""

    sent: int = 0
    acked: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    #: Where they were met: a journal's name or "dead letters", and the record.
    from_nowhere: list[tuple[str, Key]] = field(default_factory=list)
    #: Deliveries whose ack a consumer was told to be durable, and that the log does not hold.
    false_acks: list[tuple[str, Key]] = field(default_factory=list)
    #: Messages by the attempt that ended them.
    acked_at: Counter[int] = field(default_factory=Counter)
    dead_at: Counter[int] = field(default_factory=Counter)

    @property
    def reasons(self) -> Counter[Reason]:
        return Counter(duplicate.reason for duplicate in self.duplicates)

    @property
    def unexplained(self) -> list[Duplicate]:
        return [duplicate for duplicate in self.duplicates if duplicate.reason is Reason.UNEXPLAINED]

    @property
    def right(self) -> bool:
        """Whether nothing was lost, invented, or falsely said to be durable."""
        return not (self.lost or self.from_nowhere or self.false_acks)


def draw_up(evidence: Evidence) -> Account:
    """Return the account."""
    account = Account(sent=len(evidence.sent))
    endings: dict[int, list[Ending]] = {}
    for consumer, journal in evidence.journals.items():
        for entry in journal:
            _enter(account, evidence, endings, consumer, entry)
    for letter in evidence.dead_letters:
        _enter_dead(account, evidence, endings, letter)
    # By id, from what was sent: nothing is counted that was not looked up.
    account.lost = [number for number in evidence.sent if number not in account.acked and number not in account.dead]
    why = _Why(evidence)
    for number, found in endings.items():
        found.sort(key=lambda ending: ending.at_ms)
        _count_attempt(account, evidence, number, found)
        for first, second in itertools.pairwise(found):
            account.duplicates.append(Duplicate(number, first, second, why.reason(number, first, second)))
    return account


def _enter(account: Account, evidence: Evidence, endings: dict[int, list[Ending]], consumer: str, entry: Entry) -> None:
    key = (entry.partition, entry.offset)
    trail = evidence.trails.get(key)
    in_log = trail is not None and trail.acked_ms is not None
    if entry.what is What.ACKED and not in_log:
        account.false_acks.append((consumer, key))
    if entry.what is What.STRANGE or (entry.what is What.HANDLED and entry.number not in evidence.sent):
        account.from_nowhere.append((consumer, key))
    elif entry.what is What.HANDLED:
        endings.setdefault(entry.number, []).append(Ending(entry.at_ms, entry.attempt, key, consumer))
        if in_log:
            account.acked.add(entry.number)


def _enter_dead(account: Account, evidence: Evidence, endings: dict[int, list[Ending]], letter: DeadLetter) -> None:
    if letter.number is None or letter.number not in evidence.sent:
        account.from_nowhere.append(("dead letters", letter.key))
        return
    endings.setdefault(letter.number, []).append(Ending(letter.at_ms, letter.attempt, letter.key, None))
    account.dead.add(letter.number)


def _count_attempt(account: Account, evidence: Evidence, number: int, found: Sequence[Ending]) -> None:
    for ending in found:
        trail = evidence.trails.get(ending.key)
        if ending.consumer is None:
            account.dead_at[ending.attempt] += 1
            return
        if trail is not None and trail.acked_ms is not None:
            account.acked_at[ending.attempt] += 1
            return


class _Why:
    """Finds the reason of a duplicate; each reason needs the marks that it leaves in the log."""

    def __init__(self, evidence: Evidence) -> None:
        self._trails = evidence.trails
        self._killed = evidence.killed
        living = [journal for consumer, journal in evidence.journals.items() if consumer not in evidence.killed]
        self._living = {holder for journal in living for holder in holders_of(journal, evidence.trails)}
        # By message: what was made of such a copy later has no mark of its own.
        self._copied = {evidence.trails[key].number for key in evidence.aborted if key in evidence.trails}

    def reason(self, number: int, first: Ending, second: Ending) -> Reason:
        trail = self._trails.get(first.key)
        if trail is None:
            return Reason.UNEXPLAINED
        reason = self._read_twice(first, second) or self._returned(trail, first)
        if reason is None and number in self._copied:
            reason = Reason.ABORTED_COPY
        return reason or Reason.UNEXPLAINED

    def _read_twice(self, first: Ending, second: Ending) -> Reason | None:
        for key in (first.key, second.key):
            trail = self._trails.get(key)
            if trail is not None and trail.read_again:
                return Reason.READ_AGAIN if trail.holders[0] in self._living else Reason.TAKEN_TOO_LATE
        trail = self._trails[first.key]
        if first.key == second.key and len(set(trail.holders)) > 1:
            return Reason.READ_AGAIN if trail.holders[0] in self._living else Reason.TAKEN_OVER
        return None

    def _returned(self, trail: Trail, first: Ending) -> Reason | None:
        if trail.cause is not Cause.EXPIRED:
            return None
        if first.consumer in self._killed and (trail.acked_ms is None or trail.acked_late):
            return Reason.CONSUMER_KILLED
        return Reason.LEASE_OVER if trail.acked_ms is not None and trail.acked_ms >= trail.due_ms else None


def unfounded_copies(trails: Trails) -> set[Key]:
    """Return deliveries of which there are more than facts tell of: among them are copies of aborted transactions."""
    keys: dict[tuple[int | None, int], list[Key]] = {}
    for key, trail in trails.by_record.items():
        keys.setdefault((trail.number, trail.attempt), []).append(key)
    return {
        key
        for (number, attempt), found in keys.items()
        # The first delivery is the sender's; all others are copies.
        if len(found) > trails.copies[number, attempt] + (attempt == 1)
        for key in found
    }


def percentile(values: Iterable[int], share: float) -> int | None:
    """Return the value that so large a share of them does not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


def late_ms(found: Iterable[Lateness], *, inherited: bool | None = None) -> list[int]:
    """Return the lateness of redeliveries: of all, or of those that a tracker inherited overdue, or of the others."""
    return [each.late_ms for each in found if inherited is None or each.inherited is inherited]


def holders_of(journal: Iterable[Entry], trails: Mapping[Key, Trail]) -> set[int]:
    """Return the holder ids of a consumer process: those of the records that nobody but it can have taken."""
    keys = [(entry.partition, entry.offset) for entry in journal if entry.what is not What.READY]
    found = [trails[key].holders for key in keys if key in trails]
    return {holders[0] for holders in found if len(holders) == 1}
