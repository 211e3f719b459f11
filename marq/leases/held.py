"""What one consumer holds: its leases, the outcomes of its messages, and the markers to write about them.

The messages that a consumer took from one source partition with one ACQUIRE share a lease, which costs nothing per
message; only a message that was renewed on its own has its own expiry. Times are seconds of the client's monotonic
clock, measured from before the ACQUIRE or RENEW was sent. The tracker measures from a later moment, so a lease never
expires there before it expires here.

:class:`Held` decides; it neither waits nor writes. Its methods take what has happened and the time, and return what
follows: markers to write, and leases that have ended. What is written goes back to it when it is durable.

* **Outcomes** are written in batches, all that are decided at that moment. A message leaves ``open`` when its outcome
  goes to the writer, and stays in flight until then, so ``max_in_flight`` bounds what waits here.
* **RENEWs** are written every third of a lease, one for each queue, source partition and holder. A message is renewed
  until ``max_lease`` after it was acquired, because a hanging handler must lose it eventually. A RENEW never shortens a
  lease unless it says so (docs/decisions/0047), so the order in which two arrive does not matter.
* **Expiry** is noticed at once, even while a broker does not answer, because from then on the handler's work is wasted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import floor, inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from marq.client.codecs import Codec, CodecsByType
from marq.core.redeliver_or_dead_letter import is_exhausted
from marq.kafka.records import Records, Row
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.queue import AT_MOST_ONCE, BLOCK, QueueSettings
from marq.wire.markers import ANY_QUEUE, BLOCKED_MS, LAST, Ack, Dispatch, Reject, Release, Renew, Source
from marq.wire.record_headers import origin

if TYPE_CHECKING:
    from marq.leases.circuit_breaker import QueueBreaker
    from marq.leases.failure_log import FailureLog

#: A lease is renewed if less than this fraction is left.
_RENEW_BELOW = 0.75

# Shared empty containers, replaced on the first write. With thousands of queues, nearly every message has its own
# batch, and a garbage collection of all their containers would take longer than everything else.
_NO_OFFSETS = cast("set[int]", frozenset())
_NOTHING = cast("list[Any]", ())
_NO_TIMES = cast("dict[int, float]", MappingProxyType({}))
_DEFAULTS = QueueSettings()

#: A marker of a consumer about messages that it or another consumer holds.
OutcomeMarker = Ack | Release | Reject | Renew | Dispatch


class Released(NamedTuple):
    """A message to release: ``delay_ms`` may be BACKOFF; ``counted`` tells whether the attempt counts."""

    offset: int
    delay_ms: int
    counted: bool
    error: str


class Renewed(NamedTuple):
    """A message with a RENEW of its own. The lease may become shorter only if it is to end ``exactly`` then."""

    offset: int
    lease_ms: int
    exactly: bool


class Keeper(Protocol):
    """The consumer that holds messages, as they see it."""

    #: The state that the lifespans of the process yielded, for :attr:`marq.Message.state`.
    state: Any
    failures: FailureLog
    settings: ReceiverSettings

    def now_s(self) -> float:
        """Return monotonic seconds."""

    def wall_s(self) -> float:
        """Return seconds since 1970, for display only."""

    def touch(self, batch: LeasedBatch) -> None:
        """Note that a batch has something to write."""

    async def settled(self) -> None:
        """Return when all outcomes so far are durable. Raises BrokerUnavailable if the consumer is stopped first."""


class LeasedBatch:
    """The shared lease of some messages, and their outcomes that are not written yet."""

    __slots__ = (
        "acked", "breaker", "codec", "decided", "dirty", "ends", "expires_s", "fixed_ms", "holder", "in_order",
        "keeper", "lease_s", "open", "own_expiry_s", "own_topic", "queue", "records", "rejected", "released", "renewed",
        "settings", "source", "started", "starting", "starts_first", "taken_s", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        keeper: Keeper,
        queue: str,
        source: Source,
        holder: int,
        records: Records,
        taken_s: float,
        lease_s: float,
        codec: Codec | CodecsByType | None = None,
        own_topic: bool = False,
    ) -> None:
        self.keeper = keeper
        #: Without values, which each message has itself: keeping one message must not keep the values of all.
        self.records = records.without_values()
        #: Decodes the values; None for bytes.
        self.codec = codec
        #: True if the source is the queue's own topic, where senders choose the keys.
        self.own_topic = own_topic
        #: The queue's settings when the messages were acquired.
        self.settings = _DEFAULTS
        self.breaker: QueueBreaker | None = None
        #: True if the starts of some messages have to be written before user code sees them.
        self.starts_first = False
        #: Offsets of messages that user code has, and whose start is in the log or on its way there.
        self.started = _NO_OFFSETS
        #: True if the messages keep their places when they are released or lost: the next attempt has the same holder.
        self.in_order = False
        #: Offsets that wait for earlier messages with their keys; they are not in flight yet.
        self.waiting = _NO_OFFSETS
        self.queue = queue
        self.source = source
        self.holder = holder
        self.taken_s = taken_s
        self.lease_s = lease_s
        #: The length of each renewal, if it is not the consumer's lease.
        self.fixed_ms: int | None = None
        #: True if the consumer does not renew it, because other programs have the messages.
        self.ends = False
        self.expires_s = taken_s + lease_s
        #: Offsets that are still held; a message leaves when its outcome goes to the writer.
        self.open = set(records.offsets)
        #: Offsets whose outcome a call has already decided, so that the handler's return does not decide it again.
        self.decided = _NO_OFFSETS
        #: The expiry of messages that were renewed on their own, until the shared one passes it.
        self.own_expiry_s = _NO_TIMES
        self.dirty = False
        self.acked: list[int] = _NOTHING
        self.released: list[Released] = _NOTHING
        self.rejected: list[tuple[int, str]] = _NOTHING
        self.renewed: list[Renewed] = _NOTHING
        #: Offsets whose start is not written yet.
        self.starting: list[int] = _NOTHING

    @property
    def at_most_once(self) -> bool:
        """Whether the queue delivers at most once."""
        return self.settings.delivery == AT_MOST_ONCE

    @property
    def may_expire(self) -> bool:
        """Whether messages may expire: those that keep their places do not, because no tracker delivers them again."""
        return not self.in_order

    def expiry_s(self, offset: int) -> float:
        """Return when the lease of one message ends."""
        return self.own_expiry_s.get(offset, self.expires_s) if self.own_expiry_s else self.expires_s

    def lasts(self, offset: int, now_s: float) -> bool:
        """Return whether a message that has waited is leased for long enough to be delivered."""
        if offset not in self.open or self.expiry_s(offset) - now_s < self.lease_s / 2:
            return False
        # One that has waited for a long time could only be renewed for a shorter time than others.
        return now_s - self.taken_s <= self.lease_s

    def record(self, offset: int) -> Row:
        return self.records[bisect_left(self.records.offsets, offset)]

    def part(self, offsets: Sequence[int], now_s: float, lease_ms: int, *, started: bool = False) -> LeasedBatch:
        """Move some messages to a batch with its own lease; the earlier expiry counts until their RENEW is durable."""
        part = LeasedBatch(
            self.keeper, self.queue, self.source, self.holder, self.records, now_s, lease_ms / 1000, self.codec,
            self.own_topic,
        )  # fmt: skip
        part.open = set(offsets)
        part.fixed_ms, part.settings, part.breaker = lease_ms, self.settings, self.breaker
        part.in_order, part.starts_first = self.in_order, self.starts_first
        part.started = self.started
        part.expires_s = min(part.expires_s, *(self.expiry_s(offset) for offset in offsets))
        self.open.difference_update(offsets)
        for offset in offsets:
            part.renew(offset, lease_ms, exactly=True)
            # The former batch no longer has the message, so it does not write a start that it has queued.
            if started or offset in self.started:
                part.start(offset)
        return part

    def start(self, offset: int) -> None:
        """Queue the start of a message: user code has it, or will have it when the start is durable."""
        if not self.starting:
            self.starting = []
        self.starting.append(offset)
        self.touch()

    def note_start(self, offset: int) -> None:
        """Note that user code has a message whose start is in the log or on its way there."""
        if not self.started:
            self.started = set()
        self.started.add(offset)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def decide(self, offset: int) -> bool:
        """Record that a message has an outcome; return False if it already had one."""
        if offset in self.decided:
            return False
        if not self.decided:
            self.decided = set()
        self.decided.add(offset)
        return True

    def touch(self) -> None:
        """Note that there is something to write."""
        if not self.dirty:
            self.dirty = True
            self.keeper.touch(self)

    def ack(self, offset: int) -> None:
        """Queue an ACK; the writer drops duplicates."""
        if not self.acked:
            self.acked = []
        self.acked.append(offset)
        self.touch()

    @property
    def unwritten(self) -> set[int]:
        """The offsets with an outcome that the writer has not taken yet."""
        released, rejected = [release.offset for release in self.released], [offset for offset, _ in self.rejected]
        return {*self.acked, *released, *rejected}

    def _is_superseded(self, offset: int) -> bool:
        """Return whether this lease has ended and the next attempt has the same holder: a marker would affect it."""
        return self.in_order and offset not in self.open

    def release(self, offset: int, delay_ms: int, *, counted: bool = True, error: str = "") -> None:
        if self._is_superseded(offset):
            return
        if self.in_order:
            settings = self.keeper.settings.queue(self.queue)
            record = self.record(offset)
            attempt = origin(self.source, offset, record.timestamp, record.headers).attempt
            if counted and is_exhausted(attempt, True, settings):
                # Its redelivery would be behind later messages with its key, even if the tracker allowed one.
                delay_ms = LAST
            if delay_ms == LAST and settings.on_dead_letter == BLOCK:
                delay_ms = BLOCKED_MS
        if not self.released:
            self.released = []
        self.released.append(Released(offset, delay_ms, counted, error))
        self.touch()

    def put_back(self, offsets: Iterable[int], delay_ms: int = 0) -> int:
        """Release messages that user code has not seen, uncounted; return how many were still leased."""
        count = 0
        for offset in offsets:
            if offset in self.open:
                self.release(offset, delay_ms, counted=False)
                count += 1
        return count

    def reject(self, offset: int, reason: str) -> None:
        if self._is_superseded(offset):
            return
        if self.in_order and self.keeper.settings.queue(self.queue).on_dead_letter == BLOCK:
            self.release(offset, LAST, error=reason)
            return
        if not self.rejected:
            self.rejected = []
        self.rejected.append((offset, reason))
        self.touch()

    def renew(self, offset: int, lease_ms: int, *, exactly: bool = False) -> None:
        if not self.renewed:
            self.renewed = []
        self.renewed.append(Renewed(offset, lease_ms, exactly))
        self.touch()


class Ended(NamedTuple):
    """The outcomes of some messages of a batch."""

    batch: LeasedBatch
    acked: Sequence[int]
    released: Sequence[Released]
    rejected: Sequence[tuple[int, str]]


class OutcomeBatch(NamedTuple):
    """Outcomes to write, RENEWs of single messages, and the offsets of those whose starts to write.

    ``left``: how many messages of each batch are not held now.
    """

    markers: Sequence[OutcomeMarker]
    ended: Sequence[Ended]
    left: Sequence[tuple[LeasedBatch, int]]
    renewed: Sequence[tuple[LeasedBatch, Sequence[Renewed]]]
    starting: Sequence[tuple[LeasedBatch, Sequence[int]]]


class Share(NamedTuple):
    """The messages of a batch that are renewed for ``lease_ms``."""

    batch: LeasedBatch
    lease_ms: int
    offsets: Sequence[int]


class Lost(NamedTuple):
    """Leases of a batch that have ended; ``in_flight`` of the messages were."""

    batch: LeasedBatch
    offsets: Sequence[int]
    in_flight: int


class Held:
    """All batches of one consumer."""

    def __init__(self, settings: ReceiverSettings) -> None:
        self._settings = settings
        self._batches: list[LeasedBatch] = []
        self._grown_to = 0
        self._dirty: list[LeasedBatch] = []
        self._foreign: list[OutcomeMarker] = []

    def add(self, batch: LeasedBatch) -> None:
        """Renew a batch until its messages have ended."""
        self._batches.append(batch)
        if len(self._batches) > 2 * self._grown_to + 256:
            self._drop_ended()

    def _drop_ended(self) -> None:
        self._batches = [batch for batch in self._batches if batch.open]
        self._grown_to = len(self._batches)

    def holders(self, limit: int) -> list[int]:
        """Return the holders of messages in flight, newest first."""
        return list(dict.fromkeys(batch.holder for batch in reversed(self._batches) if batch.open))[:limit]

    def find(self, holder: int, source: Source, offset: int) -> LeasedBatch | None:
        """Return the batch of a message that is held here."""
        for batch in self._batches:
            if batch.holder == holder and batch.source == source and offset in batch.open:
                return batch
        return None

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def touch(self, batch: LeasedBatch) -> None:
        """Note that a batch has something to write."""
        self._dirty.append(batch)

    def settle_foreign(self, marker: OutcomeMarker) -> None:
        """Note an outcome or a RENEW of messages that this consumer does not hold."""
        self._foreign.append(marker)

    @property
    def has_outcomes(self) -> bool:
        return bool(self._dirty or self._foreign)

    def take_outcomes(self, now_s: float) -> OutcomeBatch:
        """Return what to write now; the messages are no longer held."""
        dirty, self._dirty = self._dirty, []
        foreign, self._foreign = self._foreign, []
        markers: list[OutcomeMarker] = [*_joined(foreign), *_ack_batches(dirty, now_s), *_other_batches(dirty)]
        renewed = [(batch, batch.renewed) for batch in dirty if batch.renewed]
        starting = [(batch, batch.starting) for batch in dirty if batch.starting]
        # Only messages that keep their places have others waiting for them.
        ended = [Ended(batch, tuple(batch.acked), batch.released, batch.rejected) for batch in dirty if batch.in_order]
        return OutcomeBatch(markers, ended, [(batch, _leave(batch)) for batch in dirty], renewed, starting)

    def starts(self, starting: Iterable[tuple[LeasedBatch, Sequence[int]]], now_s: float) -> Iterator[Dispatch | Renew]:
        """Return the markers of starts, except those of messages whose leases have ended.

        User code will not see those messages. A tracker that lags behind would count their attempts, or abandon them.
        """
        groups: dict[tuple[str, int, Source, bool], set[int]] = {}
        for batch, offsets in starting:
            leased = [offset for offset in offsets if offset in batch.open and now_s < batch.expiry_s(offset)]
            if leased:
                key = (batch.queue, batch.holder, batch.source, batch.at_most_once)
                groups.setdefault(key, set()).update(leased)
        for (queue, holder, source, at_most_once), members in groups.items():
            if at_most_once:
                yield Dispatch(queue, holder, source, sorted(members), self._settings.lease_of(queue))
            else:
                # It must not lengthen the lease: that would hide the message if this process died.
                yield Renew(queue, holder, source, sorted(members), 0, started=True)

    def written(self, outcomes: OutcomeBatch, sent_s: float, now_s: float) -> None:
        """Change leases whose own RENEW is durable, counted from before it was sent; a late RENEW has no effect."""
        for batch, renewed in outcomes.renewed:
            for offset, lease_ms, exactly in renewed:
                until_s, before_s = sent_s + lease_ms / 1000, batch.expiry_s(offset)
                if before_s > now_s and (exactly or until_s > before_s):
                    if not batch.own_expiry_s:
                        batch.own_expiry_s = {}
                    batch.own_expiry_s[offset] = until_s

    # --- leases -------------------------------------------------------------------------------------------------------

    def shortest_lease_ms(self, queues: Iterable[str]) -> int:
        """Return the shortest lease of these queues, and of those with messages in flight."""
        held = {self._full_ms(batch) for batch in self._batches if batch.open and not batch.ends}
        return min([self._settings.shortest_lease_ms(queues), *held])

    def _full_ms(self, batch: LeasedBatch) -> int:
        return batch.fixed_ms or self._settings.lease_of(batch.queue)

    def shares(self, now_s: float) -> list[Share]:
        """Return what to renew now, each batch within its queue's ``max_lease``."""
        self._drop_ended()
        shares = []
        for batch in self._batches:
            if batch.ends:
                continue
            full_ms = self._full_ms(batch)
            # Rounded down, also below zero: one millisecond more would exceed max_lease.
            left_ms = floor((batch.taken_s - now_s) * 1000) + self._settings.max_lease_of(batch.queue)
            lease_ms = min(full_ms, left_ms)
            # Queues with different leases are renewed at their own pace.
            early = batch.expires_s - now_s > full_ms * _RENEW_BELOW / 1000
            if not early and now_s + lease_ms / 1000 > batch.expires_s:
                shares.append(Share(batch, lease_ms, _to_renew(batch, now_s + lease_ms / 1000)))
        return shares

    def renewed(self, shares: Iterable[Share], sent_s: float, done_s: float) -> None:
        """Note that RENEWs are durable."""
        for batch, lease_ms, offsets in shares:
            until_s = sent_s + lease_ms / 1000
            # A RENEW after the lease has expired has no effect: the tracker may have redelivered the message.
            if done_s < batch.expires_s:
                batch.expires_s = until_s
                for offset in offsets if batch.own_expiry_s else ():
                    if batch.own_expiry_s.get(offset, done_s) < until_s:
                        batch.own_expiry_s.pop(offset, None)

    def expire(self, now_s: float) -> list[Lost]:
        """Give up the messages whose leases have ended."""
        ended = []
        for batch in self._batches:
            if not batch.open or (now_s < batch.expires_s and not batch.own_expiry_s):
                continue
            lost = [offset for offset in batch.open if now_s >= batch.expiry_s(offset)]
            if lost:
                batch.open.difference_update(lost)
                ended.append(Lost(batch, lost, len(lost) - len(batch.waiting.intersection(lost))))
        return ended

    def next_expiry_s(self, now_s: float) -> float:
        """Return when the next lease ends, infinite if none does."""
        return min([_next_expiry_s(batch, now_s) for batch in self._batches if batch.open], default=inf)


def renewals(shares: Iterable[Share]) -> Iterator[Renew]:
    """Return the RENEWs of batches: one for each queue, source partition, holder and lease."""
    groups: dict[tuple[str, int, Source, int], list[int]] = {}
    for batch, lease_ms, offsets in shares:
        # Empty if all messages of the batch have longer leases of their own.
        if offsets:
            groups.setdefault((batch.queue, batch.holder, batch.source, lease_ms), []).extend(offsets)
    for (queue, holder, source, lease_ms), offsets in groups.items():
        yield Renew(queue, holder, source, sorted(set(offsets)), lease_ms)


def _next_expiry_s(batch: LeasedBatch, now_s: float) -> float:
    return min([time_s for time_s in (batch.expires_s, *batch.own_expiry_s.values()) if time_s > now_s], default=inf)


def _to_renew(batch: LeasedBatch, until_s: float) -> list[int]:
    """Return the offsets of a batch, except those whose own leases end later."""
    own = batch.own_expiry_s
    return [offset for offset in batch.open if own.get(offset, 0.0) < until_s] if own else list(batch.open)


def _leave(batch: LeasedBatch) -> int:
    """Remove the messages with outcomes from a batch; return how many of them were in flight."""
    batch.dirty = False
    held, waiting = batch.open, batch.waiting
    before = len(held)
    waited = len(waiting & held) if waiting else 0
    if batch.acked:
        held.difference_update(batch.acked)
        batch.acked = _NOTHING
    if batch.released:
        held.difference_update([release.offset for release in batch.released])
    if batch.rejected:
        held.difference_update([offset for offset, _ in batch.rejected])
    batch.released = batch.rejected = batch.renewed = batch.starting = _NOTHING
    return before - len(held) - (waited - len(waiting & held) if waiting else 0)


def _joined(foreign: Sequence[OutcomeMarker]) -> Iterator[OutcomeMarker]:
    """Merge the ACKs of each queue, holder and source into one; the other markers keep their order."""
    acked: dict[tuple[str, int, Source], set[int]] = {}
    for marker in foreign:
        if isinstance(marker, Ack):
            acked.setdefault((marker.queue, marker.holder, marker.source), set()).update(marker.offsets)
        else:
            yield marker
    for place, offsets in acked.items():
        yield Ack(*place, sorted(offsets))


def _other_batches(dirty: Sequence[LeasedBatch]) -> Iterator[OutcomeMarker]:
    """Return the markers of all kinds except ACK, by queue, holder and source; offsets are sorted and unique."""
    groups: dict[tuple[str, int, Source], list[LeasedBatch]] = {}
    for batch in dirty:
        if batch.released or batch.rejected or batch.renewed:
            groups.setdefault((batch.queue, batch.holder, batch.source), []).append(batch)
    for (queue, holder, source), batches in groups.items():
        released = {release.offset: release for batch in batches for release in batch.released}
        if released:
            yield from _releases(queue, holder, source, released)
        rejected = {offset: reason for batch in batches for offset, reason in batch.rejected}
        if rejected:
            yield Reject(queue, holder, source, sorted(rejected), [rejected[offset] for offset in sorted(rejected)])
        for (lease_ms, exactly), offsets in _by_lease([one for batch in batches for one in batch.renewed]):
            yield Renew(queue, holder, source, offsets, lease_ms, exactly=exactly)


def _ack_batches(dirty: Sequence[LeasedBatch], now_s: float) -> Iterator[Ack]:
    """Return one ACK for each holder and source partition, for all queues together.

    If the leases have ended there is one ACK for each queue, because the tracker counts late ACKs by queue.
    """
    groups: dict[tuple[int, Source, str], list[LeasedBatch]] = {}
    for batch in dirty:
        if batch.acked:
            # In a queue's own topic, other queues may have messages at the same places.
            queue = batch.queue if batch.own_topic or now_s >= batch.expires_s else ANY_QUEUE
            groups.setdefault((batch.holder, batch.source, queue), []).append(batch)
    for (holder, source, queue), batches in groups.items():
        acked = {offset for batch in batches for offset in batch.acked}
        alone = batches[0].queue if len({batch.queue for batch in batches}) == 1 else queue
        yield Ack(alone, holder, source, sorted(acked))


def _releases(queue: str, holder: int, source: Source, released: dict[int, Released]) -> Iterator[Release]:
    def kind(release: Released) -> tuple[bool, bool]:
        return release.counted, release.delay_ms == LAST

    ordered = sorted(released.values(), key=lambda release: (kind(release), release.offset))
    for (counted, _), group in groupby(ordered, key=kind):
        members = list(group)
        offsets = [release.offset for release in members]
        delays, errors = [release.delay_ms for release in members], [release.error for release in members]
        yield Release(queue, holder, source, offsets, delays, counted, errors)


def _by_lease(renewed: Sequence[Renewed]) -> Iterator[tuple[tuple[int, bool], list[int]]]:
    """Return the leases with their offsets; several RENEWs of a message become one with their effect."""
    leases: dict[int, tuple[int, bool]] = {}
    for offset, lease_ms, exactly in renewed:
        before_ms, to_the_point = leases.get(offset, (0, False))
        leases[offset] = (lease_ms if exactly else max(lease_ms, before_ms), exactly or to_the_point)
    groups: dict[tuple[int, bool], list[int]] = {}
    for offset in sorted(leases):
        groups.setdefault(leases[offset], []).append(offset)
    yield from groups.items()
