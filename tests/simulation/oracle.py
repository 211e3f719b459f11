"""The naive fold: what the log says, marker by marker and message by message.

No heap, no index, no coalescing, no intervals, no bytes: it folds the batches as their writers made them, one message
at a time, and never forgets. Wherever the lease book and this differ, the book is wrong (or this is).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from marq.core import rows
from marq.core.leases import Destination, LeaseBook
from marq.core.markers import (
    BACKOFF,
    Ack,
    Acquire,
    Batch,
    Cause,
    Fact,
    Kind,
    Reject,
    Release,
    Renew,
    Source,
    Tick,
)
from marq.core.queue import QueueSettings
from marq.core.rows import Counts, State

Key = tuple[Source, int]

#: What DESIGN section 5 says: past this the monotonic time counts.
TOLERATED_JUMP_MS = 5_000


class Standing(NamedTuple):
    """Where an open message stands."""

    queue: str
    holder: int
    attempt: int
    due_ms: int
    since_ms: int
    state: State
    counted: bool
    text: str


class Firing(NamedTuple):
    """What is to be done with a due message."""

    destination: Destination
    attempt: int
    cause: Cause


@dataclass
class PlainFold:
    """The state of one markers partition after its record ``applied``."""

    settings: Callable[[str], QueueSettings]
    applied: int = -1
    now_ms: int = 0
    skew_ms: int = 0
    anchor: tuple[int, int, int] = (0, 0, 0)
    open: dict[Key, Standing] = field(default_factory=dict)
    acquired: set[tuple[str, Source, int]] = field(default_factory=set)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Offset and clock of each TICK folded, by holder: the newest.
    ticks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def fold(self, batch: Batch | None, time_ms: int, offset: int) -> None:
        """Fold the record at ``offset``; None stands for one that holds no markers."""
        assert offset > self.applied
        self.applied = offset
        self.now_ms = max(self.now_ms, time_ms - self.skew_ms)
        if isinstance(batch, Tick):
            self._tick(batch, time_ms, offset)
        elif isinstance(batch, Acquire):
            self._acquire(batch)
        elif batch is not None:
            for index, position in enumerate(batch.offsets):
                self._marker(batch, index, (batch.source, position))

    def _tick(self, batch: Tick, time_ms: int, offset: int) -> None:
        holder, anchor_now, anchor_monotonic = self.anchor
        if holder == batch.holder:
            monotonic = anchor_now + (batch.monotonic_ms - anchor_monotonic)
            if not -TOLERATED_JUMP_MS <= self.now_ms - monotonic <= TOLERATED_JUMP_MS:
                self.now_ms = monotonic
                self.skew_ms = time_ms - monotonic
        self.anchor = (batch.holder, self.now_ms, batch.monotonic_ms)
        self.ticks[batch.holder] = (offset, self.now_ms)

    def _acquire(self, batch: Acquire) -> None:
        for position, payload in zip(batch.offsets, batch.payloads, strict=True):
            key = (batch.source, position)
            standing = self.open.get(key)
            seen = (batch.queue, *key) in self.acquired
            if standing is None and not seen:
                self._count(batch.queue, "acquired")
            else:
                self._count(batch.queue, "reacquired")
                if standing is None or standing.state is not State.LEASED:
                    continue
            self.open[key] = Standing(
                batch.queue,
                batch.holder,
                payload.attempt,
                self.now_ms + batch.lease_ms,
                self.now_ms,
                State.LEASED,
                True,
                "",
            )
        for position in range(batch.from_offset, batch.offsets[-1] + 1):
            self.acquired.add((batch.queue, batch.source, position))

    def _marker(self, batch: Renew | Ack | Release | Reject | Fact, index: int, key: Key) -> None:
        standing = self.open.get(key)
        if isinstance(batch, Ack):
            self._count(batch.queue, "late" if standing is None else "acked")
            self.open.pop(key, None)
        elif isinstance(batch, Fact):
            self._count(batch.queue, "redelivered" if batch.kind is Kind.REDELIVERED else "dead")
            self._count(batch.queue, "expired", 1 if batch.causes[index] == Cause.EXPIRED else 0)
            self.open.pop(key, None)
        elif standing is None or standing.state is not State.LEASED or standing.holder != batch.holder:
            self._count(batch.queue, "late", 0 if isinstance(batch, Renew) else 1)
        elif isinstance(batch, Renew):
            self._count(standing.queue, "renewed")
            self.open[key] = standing._replace(due_ms=self.now_ms + batch.lease_ms)
        elif isinstance(batch, Release):
            self._count(standing.queue, "released")
            delay_ms = batch.delays_ms[index]
            if delay_ms == BACKOFF:
                delay_ms = self.settings(standing.queue).backoff.delay_ms(standing.attempt, rows.row_key(*key))
            due_ms, text = self.now_ms + delay_ms, batch.errors[index]
            self.open[key] = standing._replace(
                holder=0, due_ms=due_ms, state=State.RELEASED, counted=batch.counted, text=text
            )
        else:
            self._count(standing.queue, "rejected")
            text = batch.reasons[index]
            self.open[key] = standing._replace(holder=0, due_ms=self.now_ms, state=State.REJECTED, text=text)

    def _count(self, queue: str, name: str, by: int = 1) -> None:
        counts = self.counts.setdefault(queue, {})
        counts[name] = counts.get(name, 0) + by

    def firing(self, standing: Standing) -> Firing:
        """Say what becomes of a message that is due."""
        settings = self.settings(standing.queue)
        last = Destination.DEAD_LETTERS if settings.dead_letter else Destination.NOWHERE
        if standing.state is State.REJECTED:
            return Firing(last, standing.attempt, Cause.REJECTED)
        cause = Cause.EXPIRED if standing.state is State.LEASED else Cause.RELEASED
        if not standing.counted:
            return Firing(Destination.QUEUE, standing.attempt, cause)
        if standing.attempt < settings.max_attempts:
            return Firing(Destination.QUEUE, standing.attempt + 1, cause)
        return Firing(last, standing.attempt, cause)

    def difference(self, book: LeaseBook) -> str:
        """Say how a lease book differs from this fold, or nothing."""
        if book.applied != self.applied:
            return f"applied {book.applied}, the log says {self.applied}"
        clock = book.clock
        anchor = (clock.anchor_holder, clock.anchor_now_ms, clock.anchor_monotonic_ms)
        if (clock.now_ms, clock.skew_ms, anchor) != (self.now_ms, self.skew_ms, self.anchor):
            return f"clock {clock}, the log says {self.now_ms}, skew {self.skew_ms}, anchor {self.anchor}"
        found = standings(book)
        if found != self.open:
            wrong = {key for key in found.keys() | self.open.keys() if found.get(key) != self.open.get(key)}
            key = min(wrong)
            return f"message {key} is {found.get(key)}, the log says {self.open.get(key)}"
        for queue, counts in self.counts.items():
            for name in _COUNTED:
                if getattr(book.counts.get(queue, _NO_COUNTS), name) != counts.get(name, 0):
                    return f"{queue}: {name} is {book.counts.get(queue)}, the log says {counts}"
        return ""

    def table_difference(self, table: dict[bytes, bytes]) -> str:
        """Say how the rows of a table differ from this fold, or nothing."""
        book = LeaseBook(self.settings)
        book.restore(table.items())
        marked = set()
        for key, row in table.items():
            if key[:1] == b"m":
                queue, source = rows.parse_mark_key(key)
                for start, end in rows.decode_marks(row):
                    marked.update((queue, source, offset) for offset in range(start, end))
            if key[:1] == b"s" and b"r" + key[1:] not in table:
                return f"a lease without its message: {rows.parse_row_key(key)}"
        if marked != self.acquired:
            return f"marks differ from the log in {sorted(marked ^ self.acquired)[:5]}"
        return self.difference(book)


_COUNTED = tuple(each.name for each in fields(Counts))
_NO_COUNTS = Counts()


def standings(book: LeaseBook) -> dict[Key, Standing]:
    """Return the open messages of a lease book."""
    return {
        (source, offset): Standing(
            lease.queue,
            lease.holder,
            lease.attempt,
            lease.due_ms,
            lease.since_ms,
            lease.state,
            lease.counted,
            lease.text,
        )
        for source, offset, lease in book.open_leases()
    }
