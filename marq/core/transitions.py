"""The lease machine: the states of a message, and what each marker does to them.

A message is *open* from the ACQUIRE or DELAY that opens it until an ACK or a fact of the tracker ends it. An open
message has one row and one of the states in :class:`State`. A message without a row is NEW, or ENDED if a marker has
opened it before. :data:`TRANSITIONS` says what a marker does in each state. A marker has no effect in a state that its
entry lacks.

Every open message has a due time. When that time comes before another marker, the tracker acts: :data:`DUE` says what
it does in each state, and the fact that it writes ends the message. A redelivery is a new record with a new identity.
So a late marker of a former holder names the old record, finds an ENDED message and is ignored: the identity fences.

Rules that are easy to get wrong, and the reason for each:

* ACQUIRE does nothing to an ENDED record: a consumer read it a second time because its commit had failed. Opening it
  again would deliver it forever.
* ACQUIRE takes a LEASED record over: the former holder crashed between its marker and its commit. A RELEASED or
  REJECTED record stays as its holder left it.
* RENEW, DISPATCH, RELEASE and REJECT count only from the holder (:data:`HOLDER_ONLY`). ACK counts from any consumer,
  because the work is done.
* A DISPATCHED message is never delivered twice. Only a RELEASE that does not count returns it to its queue: its holder
  says that no handler has seen it.
* A redriven dead letter (a DELAY of its place) or a deleted one (DISCARD) is settled for good: a second request changes
  nothing.
* A RELEASE that counts and uses up the last attempt is due at once, because the message becomes a dead letter.
  ``max_attempts`` is read when the RELEASE is folded, and again when the message is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import NamedTuple

from marq.core.storage.rows import State
from marq.wire.markers import Cause, Kind


class Absent(IntEnum):
    """A message without a row: no marker has opened it yet, or it has ended."""

    NEW = -1
    ENDED = -2


class Marker(StrEnum):
    """A marker as far as the machine tells them apart, by its name in the diagram."""

    ACQUIRE = "ACQUIRE"
    #: A consumer found the message before its delivery time: it holds no lease.
    ACQUIRE_EARLY = "early ACQUIRE"
    DELAY = "DELAY"
    DISCARD = "DISCARD"
    RENEW = "RENEW"
    DISPATCH = "DISPATCH"
    RELEASE = "RELEASE"
    #: The attempt does not count: the consumer shut down before its handler began.
    RELEASE_UNCOUNTED = "uncounted RELEASE"
    REJECT = "REJECT"
    RESCHEDULE = "RESCHEDULE"
    CANCEL = "CANCEL"
    ACK = "ACK"
    #: The tracker wrote it with a redelivery, dead letter, delivery or cancellation.
    FACT = "fact"


NEW, ENDED = Absent
LEASED, RELEASED, REJECTED, DELAYED, CANCELLED, DISPATCHED = State

Moves = Mapping[State | Absent, State | Absent]

#: Ends a message in any state.
END: Moves = dict.fromkeys(State, ENDED)

TRANSITIONS: Mapping[Marker, Moves] = {
    Marker.ACQUIRE: {NEW: LEASED, LEASED: LEASED},
    Marker.ACQUIRE_EARLY: {NEW: DELAYED, LEASED: DELAYED},
    Marker.DELAY: {NEW: DELAYED},
    Marker.DISCARD: {NEW: ENDED},
    Marker.RENEW: {LEASED: LEASED, DISPATCHED: DISPATCHED},
    Marker.DISPATCH: {LEASED: DISPATCHED, DISPATCHED: DISPATCHED},
    Marker.RELEASE: {LEASED: RELEASED},
    Marker.RELEASE_UNCOUNTED: {LEASED: RELEASED, DISPATCHED: RELEASED},
    Marker.REJECT: {LEASED: REJECTED, DISPATCHED: REJECTED},
    Marker.RESCHEDULE: {DELAYED: DELAYED, RELEASED: RELEASED},
    Marker.CANCEL: {DELAYED: CANCELLED, RELEASED: CANCELLED, CANCELLED: CANCELLED},
    Marker.ACK: END,
    Marker.FACT: END,
}

#: Markers that have no effect on a message that another consumer holds.
HOLDER_ONLY = frozenset({Marker.RENEW, Marker.DISPATCH, Marker.RELEASE, Marker.RELEASE_UNCOUNTED, Marker.REJECT})


class Due(NamedTuple):
    """The fact that the tracker writes for a due message, and the one after its last attempt."""

    cause: Cause
    fact: Kind
    exhausted: Kind


DUE: Mapping[State, Due] = {
    LEASED: Due(Cause.EXPIRED, Kind.REDELIVERED, exhausted=Kind.DEAD_LETTERED),
    RELEASED: Due(Cause.RELEASED, Kind.REDELIVERED, exhausted=Kind.DEAD_LETTERED),
    REJECTED: Due(Cause.REJECTED, Kind.DEAD_LETTERED, exhausted=Kind.DEAD_LETTERED),
    DELAYED: Due(Cause.DUE, Kind.DELIVERED, exhausted=Kind.DELIVERED),
    CANCELLED: Due(Cause.CANCELLED, Kind.CANCELLED, exhausted=Kind.CANCELLED),
    DISPATCHED: Due(Cause.EXPIRED, Kind.ABANDONED, exhausted=Kind.ABANDONED),
}

#: Facts that come with a record on the queue.
TO_QUEUE = (Kind.REDELIVERED, Kind.DELIVERED)
