"""The messages of one queue that a consumer took from one source partition with one ACQUIRE.

They share one lease, which costs nothing per message; only a message that was renewed on its own has its own expiry.
Times are seconds of the client's monotonic clock, measured from before the ACQUIRE or RENEW was sent. The tracker
measures from a later moment, so a lease never expires there before it expires here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from marq.client.codecs import Codec, CodecsByType
from marq.client.exception_rules import Failures
from marq.kafka.records import Records, Row
from marq.settings.queue import QueueSettings
from marq.wire.markers import BLOCKED_MS, LAST, Source

if TYPE_CHECKING:
    from marq.consumer.ack_batcher import AckBatcher
    from marq.consumer.one_per_key import Lines
    from marq.consumer.starts import Starts
    from marq.leases.circuit_breaker import QueueBreaker

# Shared empty containers, replaced on the first write. With thousands of queues, nearly every message has its own
# batch, and a garbage collection of all their containers would take longer than everything else.
_NO_OFFSETS = cast("set[int]", frozenset())
_NOTHING = cast("list[Any]", ())
_NO_TIMES = cast("dict[int, float]", MappingProxyType({}))
_DEFAULTS = QueueSettings()


class Released(NamedTuple):
    """A message to release: ``delay_ms`` may be BACKOFF; ``counted`` tells whether the attempt counts."""

    offset: int
    delay_ms: int
    counted: bool
    error: str


class Renewed(NamedTuple):
    """A message with a RENEW of its own; the lease may become shorter only if it is to end ``exactly`` then."""

    offset: int
    lease_ms: int
    exactly: bool


class HeldBatch:
    """The shared lease, and the outcomes that are not written yet."""

    __slots__ = (
        "acked", "acks", "at_most_once", "breaker", "codec", "decided", "dirty", "ends", "errors", "expires_s",
        "fixed_ms", "holder", "lease_s", "lines", "open", "own_expiry_s", "own_topic", "perhaps_started", "queue",
        "records", "rejected", "released", "renewed", "settings", "source", "started", "starts", "taken_s", "unseen",
    )  # fmt: skip

    def __init__(
        self,
        acks: AckBatcher,
        queue: str,
        source: Source,
        holder: int,
        records: Records,
        taken_s: float,
        lease_s: float,
        codec: Codec | CodecsByType | None = None,
        own_topic: bool = False,
    ) -> None:
        #: Without values, which each message has itself: keeping one message must not keep the values of all.
        self.records = records.without_values()
        #: Decodes the values; None for bytes.
        self.codec = codec
        #: True if the source is the queue's own topic, where senders choose the keys.
        self.own_topic = own_topic
        #: The queue's settings when the messages were acquired.
        self.settings = _DEFAULTS
        #: The queue's policies for exceptions, if any.
        self.errors: Failures | None = None
        self.breaker: QueueBreaker | None = None
        #: True if the queue delivers at most once.
        self.at_most_once = False
        #: Set if the starts of some messages have to be written before user code sees them.
        self.starts: Starts | None = None
        #: Offsets whose start is in the log, so that the attempt counts if the lease expires.
        self.started = _NO_OFFSETS
        #: Offsets of messages that user code has had for a while, and whose start may be in the log.
        self.perhaps_started = _NO_OFFSETS
        #: Set if the queue has ordering.
        self.lines: Lines | None = None
        self.acks = acks
        self.queue = queue
        self.source = source
        self.holder = holder
        self.taken_s = taken_s
        self.lease_s = lease_s
        #: The length of each renewal, if it is not the consumer's lease.
        self.fixed_ms: int | None = None
        #: True if the consumer does not renew it, because other programs have the messages.
        self.ends = False
        #: True if a lost lease counts as an attempt only for ``started`` messages.
        self.unseen = False
        self.expires_s = taken_s + lease_s
        #: Offsets that are still held; a message leaves when its outcome goes to the writer.
        self.open = set(records.offsets)
        #: Offsets whose outcome a call has already decided, so that the handler's return does not decide it again.
        self.decided = _NO_OFFSETS
        #: The expiry of messages that were renewed on their own, until the shared one passes it.
        self.own_expiry_s = _NO_TIMES
        self.dirty = False
        self.acked: list[int] = []
        self.released: list[Released] = _NOTHING
        self.rejected: list[tuple[int, str]] = _NOTHING
        self.renewed: list[Renewed] = _NOTHING

    def expiry_s(self, offset: int) -> float:
        """Return when the lease of one message ends."""
        return self.own_expiry_s.get(offset, self.expires_s) if self.own_expiry_s else self.expires_s

    def record(self, offset: int) -> Row:
        return self.records[bisect_left(self.records.offsets, offset)]

    def part(self, offsets: Sequence[int], now_s: float, lease_ms: int) -> HeldBatch:
        """Move some messages to a batch with its own lease; the earlier expiry counts until their RENEW is durable."""
        part = HeldBatch(
            self.acks, self.queue, self.source, self.holder, self.records, now_s, lease_ms / 1000, self.codec,
            self.own_topic,
        )  # fmt: skip
        part.open = set(offsets)
        part.fixed_ms, part.errors, part.breaker = lease_ms, self.errors, self.breaker
        part.settings = self.settings
        part.at_most_once, part.lines, part.unseen = self.at_most_once, self.lines, self.unseen
        part.starts, part.started, part.perhaps_started = self.starts, self.started, self.perhaps_started
        part.expires_s = min(part.expires_s, *(self.expiry_s(offset) for offset in offsets))
        self.open.difference_update(offsets)
        if self.lines is not None:
            self.lines.moved(self, part, offsets)
        for offset in offsets:
            part.renew(offset, lease_ms, exactly=True)
        return part

    def note_start(self, offset: int) -> None:
        """Note that the start of a message is in the log."""
        if not self.started:
            self.started = set()
        self.started.add(offset)

    def note_unconfirmed_start(self, offset: int) -> None:
        """Note that user code has a message, and that its start is being written."""
        if not self.perhaps_started:
            self.perhaps_started = set()
        self.perhaps_started.add(offset)

    def counts(self, offset: int) -> bool:
        """Return whether the attempt of a message certainly counts if its lease expires."""
        return not self.unseen or offset in self.started

    def counts_here(self, offset: int) -> bool:
        """Return whether the attempt counts for a consumer that delivers the message again itself."""
        return self.counts(offset) or offset in self.perhaps_started

    def decide(self, offset: int) -> bool:
        """Record that a message has an outcome; return False if it already had one."""
        if offset in self.decided:
            return False
        if not self.decided:
            self.decided = set()
        self.decided.add(offset)
        return True

    def ack(self, offset: int) -> None:
        """Queue an ACK; the batcher drops duplicates."""
        self.acked.append(offset)
        if not self.dirty:
            self.acks.touch(self)

    @property
    def unwritten(self) -> set[int]:
        """The offsets with an outcome that the writer has not taken yet."""
        released, rejected = [each.offset for each in self.released], [offset for offset, _ in self.rejected]
        return {*self.acked, *released, *rejected}

    def _is_superseded(self, offset: int) -> bool:
        """Return whether this lease has ended and the next attempt has the same holder: a marker would affect it."""
        return self.lines is not None and self.lines.active and offset not in self.open

    def release(self, offset: int, delay_ms: int, *, counted: bool = True, error: str = "") -> None:
        if self._is_superseded(offset):
            return
        self.end_attempt(offset, delay_ms, counted=counted, error=error)

    def end_attempt(self, offset: int, delay_ms: int, *, counted: bool = True, error: str = "") -> None:
        """Release a message although its lease has ended here: for the tracker, it still has this holder."""
        if self.lines is not None and self.lines.is_last(self, offset, counted=counted):
            delay_ms = LAST
        if delay_ms == LAST and self.lines is not None and self.lines.blocks:
            delay_ms = BLOCKED_MS
        if not self.released:
            self.released = []
        self.released.append(Released(offset, delay_ms, counted, error))
        self.acks.touch(self)

    def reject(self, offset: int, reason: str) -> None:
        if self._is_superseded(offset):
            return
        if self.lines is not None and self.lines.blocks:
            self.release(offset, LAST, error=reason)
            return
        if not self.rejected:
            self.rejected = []
        self.rejected.append((offset, reason))
        self.acks.touch(self)

    def renew(self, offset: int, lease_ms: int, *, exactly: bool = False) -> None:
        if not self.renewed:
            self.renewed = []
        self.renewed.append(Renewed(offset, lease_ms, exactly))
        self.acks.touch(self)

    def forget_outcomes(self) -> None:
        """Forget the outcomes that the writer has taken."""
        if self.acked:
            self.acked = []
        self.released = self.rejected = _NOTHING

    def take_renewals(self) -> list[Renewed]:
        """Return the RENEWs to write."""
        renewed, self.renewed = self.renewed, _NOTHING
        return renewed

    def renewed_until(self, offset: int, expires_s: float) -> None:
        """Give one message its own expiry."""
        if not self.own_expiry_s:
            self.own_expiry_s = {}
        self.own_expiry_s[offset] = expires_s
