"""Lines: the messages of a queue with ordering, from one source, by ordering key.

A line contains the open messages with one key, in offset order. Only its first message is delivered. The next one
follows when the end of the first is durable; otherwise a crash could redeliver the first after it. A message that is
released, or whose lease has expired, keeps its place. A message without a key is a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from marq.consumer.held_batch import HeldBatch, Released
from marq.consumer.line_links import LineOrder
from marq.consumer.line_places import Open, Place
from marq.consumer.message import Message
from marq.consumer.ordered_records import delivered_again, is_leased, line_keys, row_of
from marq.consumer.settlement import put_back
from marq.core.redeliver_or_dead_letter import is_exhausted, release_delay_ms
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.rows import row_key
from marq.kafka.records import Records, Row
from marq.settings.queue import BLOCK
from marq.wire.markers import LAST, Cause, Source
from marq.wire.record_headers import origin

if TYPE_CHECKING:
    from marq.consumer.ack_batcher import Settled
    from marq.consumer.ordered_receiving import Ordering


class Lines:
    """The lines of one queue in one source, for one assignment."""

    def __init__(
        self,
        feed: Ordering,
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
        #: False once the source is given up: from then on, outcomes of messages in flight change nothing here.
        self.active = True
        self.feed = feed
        self._acquired = AcquiredRanges(acquired)
        #: Open messages whose records are not read yet.
        self._opened = dict(opened)
        #: Where the records end that cycles of this assignment have tried to acquire.
        self._tried = 0
        #: The values of all open messages, in the order of the log, and their total bytes.
        self._values: dict[int, bytes | None] = {}
        self.size = 0
        self._order = LineOrder()
        #: The batch of each message that is leased here.
        self._held: dict[int, HeldBatch] = {}
        self._delivered: set[int] = set()
        #: Messages that are not leased here, and leased ones that become dead letters.
        self._places: dict[int, Place] = {}
        #: Messages whose outcome is being written.
        self._settling: set[int] = set()
        #: Messages whose earlier attempt was acked while the current one is being handled.
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def waiting(self) -> int:
        """The number of messages that have not been delivered."""
        return len(self._values) - len(self._delivered)

    def low(self, end: int) -> int:
        """Return the lowest open offset, or ``end`` if none is lower: reading starts there after a crash."""
        # Messages are added in the order of the log.
        return min(next(iter(self._values), end), end)

    # --- reading ------------------------------------------------------------------------------------------------------

    def select(self, own: Records) -> tuple[Records, Records]:
        """Return the records to acquire, and those of messages that are open already; leave out finished ones."""
        tried, self._tried = self._tried, max(self._tried, own.offsets[-1] + 1)
        if own.offsets[0] >= max(self._acquired.end, tried) and not self._opened:
            return own, own[:0]
        new, known = [], []
        for index, offset in enumerate(own.offsets):
            if offset < tried and offset not in self._values and self._is_skipped(offset, own.timestamps[index]):
                # A cycle that failed may have acquired it before its purge, so ask the tracker.
                until_s = self.feed.now_s() + self.feed.settings(self.queue).lease_ms / 1000
                self._opened.setdefault(offset, Open(True, self._attempt_of(own[index]) - 1, until_s, "", False))
            if offset in self._opened:
                known.append(index)
            elif offset not in self._acquired:
                new.append(index)
        return own if len(new) == len(own) else own.at(new), own.at(known)

    def _is_skipped(self, offset: int, timestamp_ms: int) -> bool:
        skipped = self.feed.skipped(self.queue)
        return skipped is not None and not skipped.left(self.source, offset, timestamp_ms)

    def add(self, acquired: Sequence[tuple[HeldBatch, Records]], known: Records) -> None:
        """Add the messages that a cycle acquired, and the ``known`` records of messages that are open already."""
        if not self.active:
            # The source was given up while the cycle committed: another consumer would wait for these leases.
            put_back([Message(held, offset, None) for held, records in acquired for offset in records.offsets])
            return
        parts = [self._unadded(records) for _, records in acquired]
        for (held, _), records in zip(acquired, parts, strict=True):
            self._held.update(dict.fromkeys(records.offsets, held))
        known = self._unadded(known)
        if len(known):
            parts = [Records.of(sorted(chain(known, *parts), key=attrgetter("offset")))]
        firsts = []
        for records in parts:
            self._values.update(zip(records.offsets, records.values, strict=True))
            self.size += sum([len(value or b"") for value in records.values])
            firsts += self._order.add(records.offsets, line_keys(records, own_topic=self.own_topic))
        for row in known:
            place = self._places[row.offset] = Place(row)
            opened = self._opened.pop(row.offset, None)
            if opened is not None:
                self._take_over(place, opened)
        self._continue(firsts)

    def _unadded(self, records: Records) -> Records:
        """Leave out messages that are here already."""
        if self._values.keys().isdisjoint(records.offsets):
            return records
        return records.at([index for index, offset in enumerate(records.offsets) if offset not in self._values])

    def _take_over(self, place: Place, opened: Open) -> None:
        """Prepare the delivery of a message that another holder had."""
        place.due_s, place.foreign, place.leased = opened.until_s, True, opened.leased
        if not opened.leased:
            self._attempt(place, opened.attempt, opened.error)
        elif self._order.is_first(place.offset):
            # Only the first message of a line can have been delivered.
            self._count(place, opened.attempt, opened.error or "its lease ended")

    # --- what happens next --------------------------------------------------------------------------------------------

    def _continue(self, firsts: Iterable[int]) -> None:
        """Continue with messages that are the first of their lines."""
        if self.feed.stopped:
            return
        now_s, places, values = self.feed.now_s(), self._places, self._values
        ready: list[int] = []
        of: HeldBatch | None = None
        for offset in firsts:
            held = self._held.get(offset)
            if offset in places:
                self._advance(places[offset], now_s)
            elif held is None:
                # It has ended together with the one before it.
                continue
            elif is_leased(held, offset, now_s):
                if held is not of:
                    self._deliver(of, ready)
                    of, ready = held, []
                ready.append(offset)
            else:
                del self._held[offset]
                held.open.discard(offset)
                place = places[offset] = Place(row_of(held, offset, values[offset]), busy=True)
                # Its ACQUIRE may have come after its purge.
                place.foreign = self._is_skipped(offset, place.row.timestamp)
                self.feed.again(self, place)
        self._deliver(of, ready)

    def _deliver(self, held: HeldBatch | None, offsets: Sequence[int]) -> None:
        if held is not None:
            self._delivered.update(offsets)
            self.feed.ready(held, offsets, [self._values[offset] for offset in offsets])

    def due(self, place: Place) -> None:
        """Continue with a place whose time may have come."""
        if self.active and self._places.get(place.offset) is place:
            self._advance(place, self.feed.now_s())

    def _advance(self, place: Place, now_s: float) -> None:
        """Acquire a message again if it is the first of its line, and it is time."""
        if place.busy or not self._order.is_first(place.offset):
            return
        if place.due_s > now_s:
            self.feed.later(self, place)
            return
        place.busy = True
        self.feed.again(self, place)

    def reacquired(self, held: HeldBatch, offset: int) -> bool:
        """Note that a message was acquired again; return False if it is no longer open here."""
        place = self._places.get(offset)
        if not self.active or place is None or offset in self._held:
            return False
        self._held[offset] = held
        if place.last is not None:
            held.release(offset, LAST, error=place.last)
        else:
            del self._places[offset]
            self._continue([offset])
        return True

    def not_acquired(self, place: Place, due_s: float) -> None:
        """Try again later to acquire a message."""
        place.busy, place.due_s = False, due_s
        self.due(place)

    def answered(self, place: Place, opened: Open | None) -> bool:
        """Process the answer about a foreign message; return whether it may be acquired now."""
        place.busy = False
        if self._places.get(place.offset) is not place:
            return False
        if opened is None:
            self._end([place.offset])
            return False
        if not opened.leased and (place.leased or self._attempt_of(place.row) != opened.attempt):
            # Released before its lease ended, perhaps uncounted.
            place.last = None
            self._attempt(place, opened.attempt, opened.error)
        elif opened.leased and not place.own and place.last is None and opened.attempt >= self._attempt_of(place.row):
            # Its handler has started since the last answer.
            self._count(place, opened.attempt, opened.error or "its lease ended")
        place.leased = opened.leased
        left_s = opened.until_s - self.feed.now_s()
        if opened.blocks and not self.blocks:
            # The queue's setting has changed: dead letters no longer block their lines. No delivery follows, so no
            # attempt is added.
            self._attempt(place, opened.attempt - 1, opened.error)
            place.last = opened.error
        elif left_s > 0:
            place.due_s = opened.until_s
            self.feed.later(self, place)
            return False
        place.busy, place.foreign, place.due_s = True, False, 0.0
        return True

    def purged(self, ended: Callable[[Message], bool]) -> None:
        """Remove the messages that wait here and that a purge has ``ended``; nothing is written about them."""
        batches = {id(held): held for held in self._held.values()}.values()
        settling = self._settling.union(*[held.unwritten for held in batches])
        offsets = [each._offset for each in self.undelivered if each._offset not in settling and ended(each)]
        for offset in offsets:
            # It must not be renewed any longer.
            self._held[offset].open.discard(offset)
        self._end(offsets)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def settled(self, settled: Settled) -> None:
        """Note outcomes that are durable."""
        if not self.active:
            return
        _, held, acked, released, rejected = settled
        self._settling.difference_update(acked, [each.offset for each in released], [each for each, _ in rejected])
        if not self._delivered.isdisjoint(acked):
            # Its handler lost the lease but acked anyway; the handler of the next attempt is running.
            done = {each for each in acked if each in self._delivered and self._held.get(each) is not held}
            self._done |= done
            acked = [each for each in acked if each not in done]
        self._end([*acked, *[offset for offset, _ in rejected]])
        for each in released:
            if each.delay_ms == LAST:
                self._end([each.offset])
            else:
                self._released(each)

    def _end(self, offsets: Sequence[int]) -> None:
        """Remove messages, and continue with the next ones of their lines."""
        values, held, size = self._values, self._held, 0
        for offset in offsets:
            size += len(values.pop(offset, None) or b"")
            held.pop(offset, None)
        self.size -= size
        if self._places or self._done:
            self._done.difference_update(offsets)
            for offset in offsets:
                self._places.pop(offset, None)
        self._continue(self._order.remove(offsets))

    def _released(self, released: Released) -> None:
        offset = released.offset
        held = self._held.pop(offset, None)
        if held is None:
            return
        if offset in self._done:
            self._end([offset])
            return
        row = row_of(held, offset, self._values[offset])
        # It may be cancelled or moved meanwhile.
        place = self._places[offset] = Place(row, foreign=True)
        settings, attempt = self.feed.settings(self.queue), self._attempt_of(row)
        seed = row_key(self.queue, self.source.log, offset)
        delay_ms = release_delay_ms(attempt, released.counted, released.delay_ms, settings, seed)
        self._attempt(place, attempt + released.counted, released.error, counted=released.counted)
        now_s = self.feed.now_s()
        place.due_s = now_s + delay_ms / 1000
        self._advance(place, now_s)

    def lost(self, held: HeldBatch, offsets: Collection[int]) -> int:
        """Note that leases have ended by this client's clock; return how many of these messages were in flight."""
        delivered = self._delivered.intersection(offsets)
        self._delivered -= delivered
        unwritten = held.unwritten
        # The others are acquired again when their turn comes, or continue when their outcomes are durable.
        for offset in offsets if self.active else ():
            if offset not in delivered or offset in unwritten or self._held.get(offset) is not held:
                continue
            if offset in self._done:
                self._end([offset])
                self.feed.settled()
                continue
            place = self._places[offset] = Place(row_of(held, offset, self._values[offset]))
            attempt = self._attempt_of(place.row)
            self._count(place, attempt if held.counts_here(offset) else attempt - 1, "its lease ended")
            if place.last is not None:
                place.busy = True
                held.end_attempt(offset, LAST, error=place.last)
                continue
            del self._held[offset]
            # Another process may have acked it.
            place.foreign = place.leased = place.own = True
            self._advance(place, self.feed.now_s())
        return len(delivered)

    def moved(self, former: HeldBatch, held: HeldBatch, offsets: Iterable[int]) -> None:
        """Note that messages are in another batch now."""
        self._held.update(dict.fromkeys([offset for offset in offsets if self._held.get(offset) is former], held))

    def left(self, held: HeldBatch, offsets: Sequence[int]) -> int:
        """Note that messages are no longer held in this batch; return how many of them were in flight."""
        before, of = len(self._delivered), self._held
        self._settling.update(offsets)
        # A handler that lost its lease may end its message while the next attempt is in flight.
        self._delivered.difference_update([offset for offset in offsets if of.get(offset, held) is held])
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
        return [Message(self._held[offset], offset, self._values[offset]) for offset in self._waiting_here()]

    def _waiting_here(self) -> list[int]:
        return [each for each in self._held if each not in self._delivered and each not in self._places]

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _attempt_of(self, row: Row) -> int:
        return origin(self.source, row.offset, row.timestamp, row.headers).attempt

    def _count(self, place: Place, used: int, error: str) -> None:
        """Prepare what follows a lease that has ended, after ``used`` attempts."""
        if is_exhausted(used, True, self.feed.settings(self.queue)):
            place.last = error
            self._attempt(place, used, error)
        else:
            self._attempt(place, used + 1, error, expired=True)

    def _attempt(self, place: Place, attempt: int, error: str, *, counted: bool = True, expired: bool = False) -> None:
        """Give the record of a message the headers that a redelivery with this attempt has."""
        cause = Cause.EXPIRED if expired else Cause.RELEASED
        place.row = delivered_again(self.source, self.queue, place.original, attempt, error, counted, cause)
