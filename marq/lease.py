"""What one consumer holds: the messages of one queue that came from one source partition in one ACQUIRE.

They were taken at one moment, so they share one lease, which costs nothing per message; only a message that renewed
itself has a time of its own. Times are seconds of the client's own monotonic clock, counted from before the ACQUIRE
or RENEW was sent: the tracker counts from a later moment, so a lease that is not over here is not over there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from marq.codecs import Codec
from marq.core.markers import Source
from marq.failures import Failures
from marq.records import Records, Row

if TYPE_CHECKING:
    from marq.breaker import QueueBreaker
    from marq.outbox import Outbox
    from marq.spending import Spending


# What few leases have begins as one of these, which they share and nothing can be put into: with thousands of queues
# there is a lease for nearly each message, and a garbage collector that looks through all of their containers takes
# longer than all else.
_NO_OFFSETS = cast("set[int]", frozenset())
_NOTHING = cast("list[Any]", ())
_NO_TIMES = cast("dict[int, float]", MappingProxyType({}))


class Released(NamedTuple):
    """One message to give back: ``delay_ms`` or BACKOFF; ``counted`` False when the attempt was none."""

    offset: int
    delay_ms: int
    counted: bool
    error: str


class Lease:
    """The shared lease, and what has been decided about its messages and is not written yet."""

    __slots__ = (
        "acked",
        "breaker",
        "codec",
        "decided",
        "dirty",
        "errors",
        "expires_s",
        "fixed_ms",
        "holder",
        "lease_s",
        "open",
        "outbox",
        "own_expiry_s",
        "own_topic",
        "queue",
        "records",
        "rejected",
        "released",
        "renewed",
        "renewing",
        "source",
        "spending",
        "taken_s",
    )

    def __init__(
        self,
        outbox: Outbox,
        queue: str,
        source: Source,
        holder: int,
        records: Records,
        taken_s: float,
        lease_s: float,
        codec: Codec | None = None,
        own_topic: bool = False,
    ) -> None:
        #: Of all messages that were taken together. Their values go with the messages: who keeps one keeps no others'.
        self.records = records.without_values()
        #: What decodes the values; None for bytes.
        self.codec = codec
        #: From a topic of the queue's own, where keys are the senders'.
        self.own_topic = own_topic
        #: What the queue's settings say of exceptions; None for nothing.
        self.errors: Failures | None = None
        #: The queue's circuit breaker, if it has one.
        self.breaker: QueueBreaker | None = None
        #: Spends messages before user code sees them; None unless the queue delivers at most once.
        self.spending: Spending | None = None
        self.outbox = outbox
        self.queue = queue
        self.source = source
        self.holder = holder
        self.taken_s = taken_s
        self.lease_s = lease_s
        #: By how much it is renewed, where that is not by the consumer's lease.
        self.fixed_ms: int | None = None
        self.expires_s = taken_s + lease_s
        #: Offsets that are still held; what was decided leaves when it goes to the writer.
        self.open = set(records.offsets)
        #: Offsets whose own end was decided by a call, so that the handler's return does not decide again.
        self.decided = _NO_OFFSETS
        #: Of messages that were renewed on their own: counts instead of the shared one until that moves on past it.
        self.own_expiry_s = _NO_TIMES
        self.dirty = False
        self.acked: list[int] = []
        self.released: list[Released] = _NOTHING
        self.rejected: list[tuple[int, str]] = _NOTHING
        self.renewed: list[tuple[int, int]] = _NOTHING
        #: Offsets whose own RENEW is being written.
        self.renewing = _NO_OFFSETS

    def expiry_s(self, offset: int) -> float:
        """Return when the lease of one message is over."""
        return self.own_expiry_s.get(offset, self.expires_s) if self.own_expiry_s else self.expires_s

    def record(self, offset: int) -> Row:
        """Return the record of one message."""
        return self.records[bisect_left(self.records.offsets, offset)]

    def part(self, offsets: Sequence[int], now_s: float, lease_ms: int) -> Lease:
        """Take some messages out into a lease of their own, which is so long from now on; they are still to be renewed.

        Until that is durable the earlier end counts.
        """
        part = Lease(
            self.outbox, self.queue, self.source, self.holder, self.records, now_s, lease_ms / 1000, self.codec,
            self.own_topic,
        )  # fmt: skip
        part.open = set(offsets)
        part.fixed_ms, part.errors, part.breaker = lease_ms, self.errors, self.breaker
        part.spending = self.spending
        part.expires_s = min(part.expires_s, *(self.expiry_s(offset) for offset in offsets))
        self.open.difference_update(offsets)
        for offset in offsets:
            part.renew(offset, lease_ms)
        return part

    def ack(self, offset: int) -> None:
        """Queue an ACK. The hottest line of the library: no check, the writer drops doubles."""
        self.acked.append(offset)
        if not self.dirty:
            self.outbox.touch(self)

    def decide(self, offset: int) -> None:
        """Note that a call decides about a message."""
        if not self.decided:
            self.decided = set()
        self.decided.add(offset)

    def release(self, offset: int, delay_ms: int, *, counted: bool = True, error: str = "") -> None:
        if not self.released:
            self.released = []
        self.released.append(Released(offset, delay_ms, counted, error))
        self.outbox.touch(self)

    def reject(self, offset: int, reason: str) -> None:
        if not self.rejected:
            self.rejected = []
        self.rejected.append((offset, reason))
        self.outbox.touch(self)

    def renew(self, offset: int, lease_ms: int) -> None:
        if not self.renewed:
            self.renewed = []
        self.renewed.append((offset, lease_ms))
        self.outbox.touch(self)

    def forget_outcomes(self) -> None:
        """Begin anew: what was decided is the writer's."""
        if self.acked:
            self.acked = []
        self.released = self.rejected = _NOTHING

    def take_renewals(self) -> list[tuple[int, int]]:
        """Return the RENEWs to write, with their leases in ms; they are on their way from now on."""
        renewed, self.renewed = self.renewed, _NOTHING
        if renewed:
            self.renewing = {*self.renewing, *(offset for offset, _ in renewed)}
        return renewed

    def renewed_until(self, offset: int, expires_s: float) -> None:
        """Note that one message is held longer than the others, or less long."""
        if not self.own_expiry_s:
            self.own_expiry_s = {}
        self.own_expiry_s[offset] = expires_s
