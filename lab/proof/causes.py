"""Why a lease ran out, and why a message was delivered more than once.

An explanation needs evidence in the history: a fault that hit the consumer, or a write that failed or took too long.
The end of a lease alone is not evidence. A duplicate without evidence violates the guarantees.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.proof.evidence import ACK, EVERYBODY, Evidence, TrackerFact, Trail
from lab.proof.findings import Why

#: Faults that may keep a process from renewing in time.
_HINDRANCES = {"pause", "cut"}
#: Faults that may make it drop messages that it has acquired and not delivered.
_INTERRUPTIONS = {"stop", "revoke"}


def why_expired(evidence: Evidence, trail: Trail, fact: TrackerFact, holder: str, *, read_again: bool) -> Why | None:
    """Return why a holder's lease ran out, by the faults and failed writes until the tracker decided.

    ``read_again``: whether a consumer acquired the message after that.
    """
    decided = [decision.number for decision in trail.decisions if decision.holder == fact.holder]
    until = max(decided, default=fact.number)
    process = evidence.process_of.get(holder, "")
    befell = evidence.befell(process, EVERYBODY, since=_taken_at(trail, holder), until=until)
    if "kill" in befell:
        return Why.KILLED
    in_hand = any(delivery.holder == holder for delivery in trail.deliveries)
    if is_hindered(trail, befell) or (not in_hand and befell & _INTERRUPTIONS):
        return _cause(trail, fact, in_hand, read_again)
    return Why.CLOCK if "clock" in evidence.befell(fact.log, EVERYBODY, until=until) else None


def _taken_at(trail: Trail, holder: str) -> int:
    """Return the number of the event by which a holder's lease had begun.

    If a client does not record its ACQUIREs, only the log has them, and the event of a delivery may come first.
    """
    requests = trail.requested("acquire", holder=holder)
    deliveries = [delivery.number for delivery in trail.deliveries if delivery.holder == holder]
    markers = [number for _, number, taker in trail.acquired if taker == holder]
    return min(requests or [*deliveries, *markers], default=min(trail.events))


def is_hindered(trail: Trail, befell: set[str]) -> bool:
    """Whether a holder could not renew in time: by its process's faults, failed or slow writes, or a handler."""
    troubled = trail.unconfirmed or trail.slowest_ms * 4 > trail.lease_ms
    return bool(befell & _HINDRANCES or troubled or trail.hung)


def _cause(trail: Trail, fact: TrackerFact, in_hand: bool, read_again: bool) -> Why:
    if read_again:
        return Why.NOT_COMMITTED
    if not in_hand:
        return Why.TAKEN_BY_LATE_MARKER if trail.deliveries else Why.NOT_COMMITTED
    if trail.acked_at is None:
        return Why.LEASE_ENDED
    return Why.ACK_TOO_LATE if trail.acked_at > fact.offset else Why.ACK_BEHIND_COPY


def deliveries_asked_for(trails: Sequence[Trail]) -> int:
    """Return how many deliveries of a message followed a release, or a redrive of its dead letter."""
    facts = ((trail, fact) for trail in trails for fact in trail.facts)
    return sum(
        fact.kind == "DELIVERED" if trail.redriven else fact.kind == "REDELIVERED" and fact.cause == "RELEASED"
        for trail, fact in facts
    )


def why_read_again(evidence: Evidence, trail: Trail) -> Why | None:
    """Return why one record was delivered more than once."""
    if "offsets" in evidence.befell(f"queue {trail.queue}", EVERYBODY):
        return Why.OFFSETS_LOST
    # A group delivers a record once, even if its queue has moved meanwhile.
    groups = {delivery.group for delivery in trail.deliveries}
    return Why.MOVED if trail.queue in evidence.moved and len(groups) == len(trail.deliveries) else None


def why_delivered_again(trails: Sequence[Trail]) -> list[Why]:
    """Return a cause for each delivery of a message that may have been one too many."""
    causes: list[Why] = []
    for trail in trails:
        if trail.why_delivered_twice is not None:
            causes += [trail.why_delivered_twice] * (len(trail.deliveries) - 1)
        if not trail.began and trail.deliveries and not trail.committed:
            causes.append(Why.ABORTED_COPY)
    return causes + [trail.why_expired for trail in trails if trail.why_expired is not None]


def why_done_and_dead(trails: Sequence[Trail]) -> Why | None:
    """Return why a message is dead although a handler finished it; None if the history does not show it.

    A redelivery of an aborted transaction has its own end. Otherwise no ack came in time, or the ack came for a record
    that was read again after its end.
    """
    if any(trail.acquired and not trail.committed for trail in trails):
        return Why.ABORTED_COPY
    finished = [trail for trail in trails if trail.said & ACK]
    return next((why for trail in finished if (why := trail.why_expired or trail.why_delivered_twice)), None)
