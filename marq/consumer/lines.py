"""Lines: the messages of a queue with ordering, from one source, by ordering key.

A line has the open messages of one key in the order of their offsets. Only its first message is delivered. The next one
follows when the end of the first is durable, so that the first can never be delivered again after it, even after a
crash. A message that is released, or whose lease has expired, keeps its place: it is acquired and delivered again
there. A message without a key is a line of its own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from marq.consumer.held_batch import HeldBatch, Released
from marq.consumer.line_rows import delivered_again, is_leased, line_keys, row_of
from marq.consumer.message import Message
from marq.core.redeliver_or_dead_letter import is_exhausted, release_delay_ms
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.rows import row_key
from marq.kafka.records import Records, Row
from marq.settings.queue import BLOCK, QueueSettings
from marq.wire.markers import LAST, Source
from marq.wire.record_headers import origin

if TYPE_CHECKING:
    from marq.consumer.ack_batcher import Settled

_offset_of = attrgetter("offset")


class Open(NamedTuple):
    """A message that was open when the source was resumed; its lease or delay ends at ``until_s``.

    ``attempt`` is the number of its last delivery if it was leased, else of the next one. If it ``blocks``, an
    operator has to move or cancel it.
    """

    leased: bool
    attempt: int
    until_s: float
    error: str
    blocks: bool


@dataclass(slots=True, eq=False)
class Place:
    """The place of an open message.

    It has a ``message`` while it is leased here; otherwise a ``row`` with which it is acquired again. Nothing happens
    to it before ``due_s``, or while it is ``busy``: delivered, being acquired, or about to end.
    """

    offset: int
    key: bytes | None
    #: Bytes of its value.
    size: int
    message: Message | None = None
    row: Row | None = None
    due_s: float = 0.0
    busy: bool = False
    #: Ask before it is acquired: it was cancelled or moved, or, if it is ``leased``, another holder works on it.
    foreign: bool = False
    leased: bool = False
    #: The error of its last attempt, if it becomes a dead letter as soon as it is acquired.
    last: str | None = None
    #: An earlier attempt was acked while the current one is being handled.
    done: bool = False


class Feed(Protocol):
    """What lines do with their first messages."""

    def ready(self, lines: Lines, place: Place) -> None:
        """Deliver a message."""

    def again(self, lines: Lines, place: Place) -> None:
        """Acquire a message, after asking about it if it is foreign."""

    def later(self, lines: Lines, place: Place) -> None:
        """Call :meth:`Lines.due` at ``due_s`` of the place."""

    def settled(self) -> None:
        """Continue after outcomes."""

    def now_s(self) -> float: ...
    def settings(self, queue: str) -> QueueSettings: ...


class Lines:
    """The lines of one queue in one source, for one assignment."""

    def __init__(
        self,
        feed: Feed,
        queue: str,
        source: Source,
        holder: int,
        acquired: Iterable[tuple[int, int]],
        opened: Mapping[int, Open],
        *,
        own_topic: bool,
    ) -> None:
        self.queue = queue
        self.source = source
        self.holder = holder
        self.own_topic = own_topic
        #: False when the source was given up: outcomes of messages in flight change nothing here any more.
        self.active = True
        self.feed = feed
        self._acquired = AcquiredRanges(acquired)
        #: Open messages whose records are not read yet.
        self._opened = dict(opened)
        self._places: dict[int, Place] = {}
        #: Bytes of the values of all open messages.
        self.size = 0
        self._lines: dict[bytes, deque[Place]] = {}
        self._delivered: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def waiting(self) -> int:
        """The number of messages that are not delivered."""
        return len(self._places) - len(self._delivered)

    def low(self, end: int) -> int:
        """Return the lowest offset that is open, at most ``end``: reading starts there after a crash."""
        # Places are added in the order of the log.
        return min(next(iter(self._places), end), end)

    # --- reading ------------------------------------------------------------------------------------------------------

    def select(self, own: Records) -> tuple[Records, Records]:
        """Return the records to acquire, and those of messages that are open already; leave out finished ones."""
        if own.offsets[0] >= self._acquired.end and not self._opened:
            return own, own[:0]
        new, known = [], []
        for index, offset in enumerate(own.offsets):
            if offset in self._opened:
                known.append(index)
            elif offset not in self._acquired:
                new.append(index)
        return own if len(new) == len(own) else own.at(new), own.at(known)

    def add(self, messages: Sequence[Message], rows: Records, known: Records) -> None:
        """Add messages that were acquired, and the ``known`` records of messages that are open already."""
        read = zip(messages, line_keys(rows, own_topic=self.own_topic), strict=True)
        places = [Place(message._offset, key, len(message._raw or b""), message) for message, key in read]
        if len(known):
            again = zip(known, line_keys(known, own_topic=self.own_topic), strict=True)
            places += [Place(row.offset, key, len(row.value or b""), row=row) for row, key in again]
            places.sort(key=_offset_of)
        now_s = self.feed.now_s()
        for place in places:
            if place.offset not in self._places:
                self._insert(place, now_s)

    def _insert(self, place: Place, now_s: float) -> None:
        self._places[place.offset] = place
        self.size += place.size
        opened = self._opened.pop(place.offset, None) if self._opened else None
        first = True
        if place.key is not None:
            line = self._lines.get(place.key)
            first = line is None
            if line is None:
                self._lines[place.key] = deque((place,))
            elif line[-1].offset < place.offset:
                line.append(place)
            else:
                insort(line, place, key=_offset_of)
        if opened is not None and place.row is not None:
            self._take_over(place, opened, first)
        if first:
            self._advance(place, now_s)

    def _take_over(self, place: Place, opened: Open, first: bool) -> None:
        """Prepare the delivery of a message that another holder had."""
        assert place.row is not None
        place.due_s, place.foreign, place.leased = opened.until_s, True, opened.leased
        if not opened.leased:
            self._attempt(place, opened.attempt, opened.error)
        elif first:
            # Only the first message of a line can have been delivered.
            self._count(place, opened.attempt, opened.error or "its lease ended")

    # --- what happens next --------------------------------------------------------------------------------------------

    def due(self, place: Place) -> None:
        """Continue with a place whose time may have come."""
        if self.active and not place.busy and self._places.get(place.offset) is place:
            self._advance(place, self.feed.now_s())

    def _advance(self, place: Place, now_s: float) -> None:
        """Continue with the first message of a line."""
        if place.busy or (place.key is not None and self._lines[place.key][0] is not place):
            return
        message = place.message
        if place.due_s > now_s:
            self.feed.later(self, place)
            return
        place.busy = True
        if message is not None and not place.foreign and is_leased(message, now_s):
            self._delivered.add(place.offset)
            self.feed.ready(self, place)
            return
        if message is not None:
            place.row, place.message = row_of(message), None
            message._held.open.discard(place.offset)
        self.feed.again(self, place)

    def reacquired(self, message: Message) -> bool:
        """Take over a message that was acquired again; return False if it is no longer open here."""
        place = self._places.get(message._offset)
        if not self.active or place is None or place.row is None:
            return False
        place.message, place.row, place.busy = message, None, False
        if place.last is not None:
            place.busy = True
            message._held.release(message._offset, LAST, error=place.last)
        else:
            self._advance(place, self.feed.now_s())
        return True

    def not_acquired(self, place: Place, due_s: float) -> None:
        """Try again later to acquire a message."""
        place.busy, place.due_s = False, due_s
        self.due(place)

    def answered(self, place: Place, opened: Open | None, until_s: float) -> bool:
        """Process the answer about a foreign message; return whether it may be acquired now.

        If it is still leased, ask again at ``until_s``.
        """
        place.busy = False
        if self._places.get(place.offset) is not place:
            return False
        if opened is None:
            self.end(place.offset)
            return False
        assert place.row is not None
        if not opened.leased and (place.leased or self._attempt_of(place.row) != opened.attempt):
            # Released before its lease ended, perhaps uncounted.
            place.last = None
            self._attempt(place, opened.attempt, opened.error)
        place.leased = opened.leased
        left_s = opened.until_s - self.feed.now_s()
        if opened.blocks and not self.blocks:
            # Dead letters no longer block their lines.
            place.last = opened.error
        elif left_s > 0:
            place.due_s = min(opened.until_s, until_s)
            self.feed.later(self, place)
            return False
        place.busy, place.foreign, place.due_s = True, False, 0.0
        return True

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settled(self, settled: Settled) -> None:
        """Note outcomes that are durable."""
        if not self.active:
            return
        _, held, acked, released, rejected = settled
        now_s = self.feed.now_s()
        for offset in acked:
            place = self._places.get(offset)
            if place is not None and offset in self._delivered and not _is_of(place, held):
                # Its handler lost the lease but acked anyway; the handler of the next attempt is running.
                place.done = True
            elif place is not None:
                self._end(place, now_s)
        for offset, _ in rejected:
            self.end(offset)
        for each in released:
            if each.delay_ms == LAST:
                self.end(each.offset)
            else:
                self._released(each)

    def end(self, offset: int) -> None:
        """Remove a message, and continue with the next one of its line."""
        place = self._places.get(offset)
        if place is not None:
            self._end(place, self.feed.now_s())

    def _end(self, place: Place, now_s: float) -> None:
        del self._places[place.offset]
        self.size -= place.size
        if place.key is None:
            return
        line = self._lines[place.key]
        if line[0] is not place:
            line.remove(place)
            return
        line.popleft()
        if line:
            self._advance(line[0], now_s)
        else:
            del self._lines[place.key]

    def _released(self, released: Released) -> None:
        place = self._places.get(released.offset)
        if place is None or place.message is None:
            return
        if place.done:
            self.end(place.offset)
            return
        row = place.row = row_of(place.message)
        place.message = place.last = None
        settings, attempt = self.feed.settings(self.queue), self._attempt_of(row)
        seed = row_key(self.queue, self.source, released.offset)
        delay_ms = release_delay_ms(attempt, released.counted, released.delay_ms, settings, seed)
        self._attempt(place, attempt + released.counted, released.error, counted=released.counted)
        # It may be cancelled or moved meanwhile.
        place.busy, place.foreign, place.leased = False, True, False
        now_s = self.feed.now_s()
        place.due_s = now_s + delay_ms / 1000
        self._advance(place, now_s)

    def lost(self, held: HeldBatch, offsets: Collection[int]) -> int:
        """Note that leases have ended by this client's clock; return how many of these messages were in flight."""
        delivered = self._delivered.intersection(offsets)
        self._delivered -= delivered
        for offset in offsets if self.active else ():
            place = self._places.get(offset)
            if place is None or place.message is None or place.message._held is not held:
                continue
            row = place.row = row_of(place.message)
            place.message = None
            if offset not in delivered:
                continue
            if place.done:
                self.end(offset)
                continue
            self._count(place, self._attempt_of(row), "its lease ended")
            if place.last is not None:
                # The tracker still has this holder for the message.
                place.message, place.row = Message(held, offset, row.value), None
                held.release(offset, LAST, error=place.last)
                continue
            # Another process may have acked it.
            place.busy, place.foreign, place.leased = False, True, True
            self._advance(place, self.feed.now_s())
        return len(delivered)

    def left(self, held: HeldBatch, offsets: Iterable[int]) -> int:
        """Note that messages are no longer held in this batch; return how many of them were in flight."""
        before = len(self._delivered)
        # A handler that lost its lease may end its message while the next attempt is in flight.
        places = [(offset, self._places.get(offset)) for offset in offsets]
        self._delivered -= {o for o, place in places if place is None or place.message is None or _is_of(place, held)}
        return before - len(self._delivered)

    @property
    def blocks(self) -> bool:
        """Whether a message that would become a dead letter blocks its line."""
        return self.feed.settings(self.queue).on_dead_letter == BLOCK

    def is_last(self, held: HeldBatch, offset: int, *, counted: bool) -> bool:
        """Return whether a release of this message is its last one."""
        return counted and is_exhausted(self._attempt_of(held.record(offset)), True, self.feed.settings(self.queue))

    @property
    def undelivered(self) -> list[Message]:
        """The messages that are leased here and were not delivered."""
        return [
            place.message
            for place in self._places.values()
            if place.message is not None and place.offset not in self._delivered and place.last is None
        ]

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _attempt_of(self, row: Row) -> int:
        return origin(self.source, row.offset, row.timestamp, row.headers).attempt

    def _count(self, place: Place, attempt: int, error: str) -> None:
        """Count an attempt whose lease has ended."""
        if is_exhausted(attempt, True, self.feed.settings(self.queue)):
            place.last = error
            self._attempt(place, attempt, error)
        else:
            self._attempt(place, attempt + 1, error)

    def _attempt(self, place: Place, attempt: int, error: str, *, counted: bool = True) -> None:
        """Give the record of a message the headers that a redelivery with this attempt has."""
        assert place.row is not None
        place.row = delivered_again(self.source, self.queue, place.row, attempt, error, counted)


def _is_of(place: Place, held: HeldBatch) -> bool:
    return place.message is not None and place.message._held is held
