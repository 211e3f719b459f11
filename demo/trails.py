"""What the markers topic says about each record that was delivered: a plain fold of the log, made for reading it.

It is written from docs/protocol.md's rules and shares only the codec with the tracker, so that the account at the end
does not believe the code that it checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from demo.plan import read_number
from marq.core.markers import (
    Ack,
    Acquire,
    Batch,
    Cause,
    Fact,
    Kind,
    Reject,
    Release,
    Renew,
    Tick,
)

#: A record of the messages topic: partition and offset.
Key = tuple[int, int]


class State(Enum):
    """Where a record stands."""

    LEASED = "leased"
    GIVEN_BACK = "given back"
    CLOSED = "closed"


@dataclass(slots=True)
class Trail:
    """One record of the messages topic; times are the broker's append times, in ms."""

    number: int | None
    attempt: int
    due_ms: int
    #: Each consumer that took it, by its holder id, in order.
    holders: list[int]
    state: State = State.LEASED
    acked_ms: int | None = None
    #: Whether the ack came after the tracker had sent a copy.
    acked_late: bool = False
    #: Whether it was read again, by somebody else, after the tracker had sent a copy; that ACQUIRE counts for nothing.
    read_again: bool = False
    fact: Kind | None = None
    cause: Cause | None = None


class Lateness(NamedTuple):
    """By how much a redelivery came after the lease's end; ``inherited`` when that was before its tracker took over."""

    late_ms: int
    inherited: bool


@dataclass(slots=True)
class _Partition:
    """A markers partition."""

    now_ms: int = 0
    trails: dict[Key, Trail] = field(default_factory=dict)
    owner: int = 0
    #: When the owner gave its first sign.
    owned_since_ms: int = 0
    expired: list[Lateness] = field(default_factory=list)


class Trails:
    """The fold over all markers partitions."""

    def __init__(self) -> None:
        self._partitions: dict[int, _Partition] = {}
        self.redelivered: Counter[Cause] = Counter()
        #: Copies that facts tell of: (number, attempt).
        self.copies: Counter[tuple[int | None, int]] = Counter()
        #: Facts about records that nobody acquired.
        self.groundless_facts = 0

    def fold(self, markers_partition: int, batch: Batch, append_ms: int) -> None:
        partition = self._partitions.setdefault(markers_partition, _Partition())
        partition.now_ms = max(partition.now_ms, append_ms)
        if isinstance(batch, Tick | Fact):
            _see_owner(partition, batch.holder)
        if isinstance(batch, Acquire):
            _acquire(partition, batch)
        elif isinstance(batch, Fact):
            self._fact(partition, batch)
        elif not isinstance(batch, Tick):
            _end(partition, batch)

    def _fact(self, partition: _Partition, batch: Fact) -> None:
        for offset, attempt, code in zip(batch.offsets, batch.attempts, batch.causes, strict=True):
            cause = Cause(code)
            trail = partition.trails.get((batch.source.partition, offset))
            if trail is None:
                self.groundless_facts += 1
                continue
            if trail.state is State.LEASED and cause is Cause.EXPIRED:
                inherited = trail.due_ms <= partition.owned_since_ms
                partition.expired.append(Lateness(partition.now_ms - trail.due_ms, inherited))
            trail.fact, trail.cause, trail.state = batch.kind, cause, State.CLOSED
            if batch.kind is Kind.REDELIVERED:
                self.redelivered[cause] += 1
                self.copies[trail.number, attempt] += 1

    @property
    def by_record(self) -> Mapping[Key, Trail]:
        return {key: trail for partition in self._partitions.values() for key, trail in partition.trails.items()}

    def told(self, numbers: Collection[int], most: int) -> list[str]:
        """Say of some messages what the log says of each of their deliveries."""
        found: dict[int, list[str]] = {number: [] for number in sorted(numbers)[:most]}
        for (partition, offset), trail in self.by_record.items():
            if trail.number in found:
                ended = trail.state.value if trail.fact is None else trail.fact.name
                acked = "" if trail.acked_ms is None else ", acked"
                found[trail.number].append(f"attempt {trail.attempt} at {partition}/{offset}: {ended}{acked}")
        return [f"message {number}: {'; '.join(told) or 'never acquired'}" for number, told in found.items()]

    def held(self, markers_partition: int) -> Counter[int]:
        """Return how many messages each holder holds now, by the log's clock."""
        partition = self._partitions.get(markers_partition, _Partition())
        return Counter(
            trail.holders[-1]
            for trail in partition.trails.values()
            if trail.state is State.LEASED and trail.due_ms > partition.now_ms
        )

    def open_rows(self, markers_partition: int) -> int:
        partition = self._partitions.get(markers_partition, _Partition())
        return sum(trail.state is not State.CLOSED for trail in partition.trails.values())

    def lateness(self) -> Iterator[Lateness]:
        """Of each redelivery after a lease that ran out."""
        for partition in self._partitions.values():
            yield from partition.expired


def _see_owner(partition: _Partition, holder: int) -> None:
    if partition.owner != holder:
        partition.owner, partition.owned_since_ms = holder, partition.now_ms


def _acquire(partition: _Partition, batch: Acquire) -> None:
    due_ms = partition.now_ms + batch.lease_ms
    for offset, payload in zip(batch.offsets, batch.payloads, strict=True):
        key = (batch.source.partition, offset)
        trail = partition.trails.get(key)
        if trail is None:
            number = read_number(payload.value)
            partition.trails[key] = Trail(number, payload.attempt, due_ms, [batch.holder])
            continue
        # Taken again. One that is not leased any more stays as it is, but a consumer has it in hand all the same.
        trail.holders.append(batch.holder)
        trail.read_again |= trail.fact is not None and trail.holders[0] != batch.holder
        if trail.state is State.LEASED:
            trail.due_ms = due_ms


def _end(partition: _Partition, batch: Renew | Ack | Release | Reject) -> None:
    for offset in batch.offsets:
        trail = partition.trails.get((batch.source.partition, offset))
        if trail is None:
            continue
        if isinstance(batch, Ack):
            _ack(trail, partition.now_ms)
        elif trail.state is State.LEASED and trail.holders[-1] == batch.holder:
            if isinstance(batch, Renew):
                trail.due_ms = partition.now_ms + batch.lease_ms
            else:
                trail.state = State.GIVEN_BACK


def _ack(trail: Trail, now_ms: int) -> None:
    if trail.acked_ms is None:
        trail.acked_ms = now_ms
        trail.acked_late = trail.fact is not None
    trail.state = State.CLOSED
