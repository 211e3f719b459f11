"""The lease machine: the states of a message, and what each marker does to them.

A message is *open* from the ACQUIRE or DELAY that opens it until an ACK or a fact of the tracker ends it. An open
message has one row and one of the states in :class:`State`. A message without a row is NEW, or ENDED if a marker has
opened it before. :data:`TRANSITIONS` says what a marker does in each state. A marker has no effect in a state that its
entry lacks.

Every open message has a due time. If that time comes before another marker, the tracker acts: :data:`DUE` says what it
does in each state, and the fact that it writes ends the message. A redelivery is a new record with a new identity. A
late marker of a former holder names the old record, whose message has ENDED, so it is ignored: the identity fences.

Messages of a queue with ordering keep their place instead. In the states LEASED_IN_ORDER and WAITING_IN_ORDER the
tracker never acts: the consumer that reads their source acquires the same record again and delivers it again. Here the
holder fences: see the rule about ordered ACQUIREs.

Rules that are easy to get wrong, and the reason for each:

* ACQUIRE does nothing to an ENDED record: a consumer read it a second time because its commit had failed. Opening it
  again would deliver it forever.
* ACQUIRE takes over a LEASED record, because the former holder crashed between its marker and its commit. A RELEASED or
  REJECTED record stays as its holder left it.
* RENEW, DISPATCH, RELEASE and REJECT count only from the holder (:data:`HOLDER_ONLY`). ACK counts from any consumer,
  because the work is done.
* A DISPATCHED message is never delivered twice. Only a RELEASE that does not count returns it to its queue: its holder
  says that no handler has seen it.
* A redriven dead letter (a DELAY of its place) or a deleted one (DISCARD) is settled for good: a second request changes
  nothing.
* An ordered ACQUIRE takes a message over only from a holder whose RESUME is not after its own. The holder of ordered
  messages contains the place of its RESUME in the log (:mod:`marq.wire.ordered_holders`), and a WAITING_IN_ORDER
  message keeps its holder. So a late marker of a consumer that lost the source takes nothing from its successor.
* An unordered ACQUIRE takes over ordered messages, too: its consumer does not know about the ordering. From then on the
  tracker redelivers them, because no consumer would.
* RESUME removes messages from their lines if they come before the place where its consumer resumes reading: their
  records are gone from the source, so no consumer could deliver them in their place. The tracker redelivers them when
  their leases or delays end; one that blocked its line is due at once. The attempt of a LEASED one does not count
  then, because it may never have been delivered. Only another ACQUIRE, or a RENEW which says that user code has it,
  makes it count.
* A last RELEASE turns a message into a dead letter, even if the tracker knows a higher ``max_attempts``, because a
  redelivery would be behind later messages.
* Consumers of a queue with ordering write early ACQUIREs for new records only: the tracker delivers those when they are
  due, behind all others.
* RESCHEDULE and CANCEL affect WAITING_IN_ORDER messages only while they block their lines: no consumer delivers such a
  message before an operator moves it. Any other message may be about to be delivered again.
* PURGE cancels messages, so a redelivery that is being written stays what it is: its fact ends the message. A NEW
  message counts as acquired from then on: the tracker ignores the ACQUIRE of a consumer that does not know of the purge
  yet. It leaves messages in flight to their consumers, and WAITING_IN_ORDER ones that do not block their lines,
  unless it is a PURGE in flight.
* The attempt of an ACQUIRE that does not count starts to count with a RENEW which says that user code has the message.
  So a process that dies uses up attempts only of messages whose handlers have started.
* A RELEASE that counts and uses up the last attempt is due at once, because the message becomes a dead letter.
  ``max_attempts`` is read when the RELEASE is folded, and again when the message is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import NamedTuple

from marq.core.storage.rows import HELD, IN_ORDER, State
from marq.wire.markers import Cause, Kind


class Absent(IntEnum):
    """A message without a row: no marker has opened it yet, or it has ended."""

    NEW = -1
    ENDED = -2


class Marker(StrEnum):
    """A marker as the machine distinguishes them, by its name in the diagram."""

    ACQUIRE = "ACQUIRE"
    #: A consumer found the message before its delivery time: it holds no lease.
    ACQUIRE_EARLY = "early ACQUIRE"
    #: A consumer of a queue with ordering takes the message, or takes it again to deliver it again.
    ACQUIRE_IN_ORDER = "ordered ACQUIRE"
    DELAY = "DELAY"
    DISCARD = "DISCARD"
    RENEW = "RENEW"
    DISPATCH = "DISPATCH"
    RELEASE = "RELEASE"
    #: The attempt does not count: the consumer shut down before its handler began.
    RELEASE_UNCOUNTED = "uncounted RELEASE"
    #: Its consumer will not deliver it again.
    RELEASE_LAST = "last RELEASE"
    #: The message comes before the place where its consumer resumes reading.
    RESUME = "RESUME"
    REJECT = "REJECT"
    RESCHEDULE = "RESCHEDULE"
    CANCEL = "CANCEL"
    PURGE = "PURGE"
    #: A PURGE that ends messages in flight, too.
    PURGE_IN_FLIGHT = "PURGE in flight"
    ACK = "ACK"
    #: The tracker wrote it with a redelivery, dead letter, delivery or cancellation.
    FACT = "fact"


NEW, ENDED = Absent
LEASED, RELEASED, REJECTED, DELAYED, CANCELLED, DISPATCHED, LEASED_IN_ORDER, WAITING_IN_ORDER, EXHAUSTED = State

Moves = Mapping[State | Absent, State | Absent]

#: Ends a message in any state.
END: Moves = dict.fromkeys(State, ENDED)

#: The states in which a client may end a message without a delivery.
_CANCELLABLE: Moves = dict.fromkeys((DELAYED, RELEASED, WAITING_IN_ORDER, CANCELLED), CANCELLED)

TRANSITIONS: Mapping[Marker, Moves] = {
    Marker.ACQUIRE: {NEW: LEASED, LEASED: LEASED, **dict.fromkeys(IN_ORDER, LEASED)},
    Marker.ACQUIRE_EARLY: {NEW: DELAYED, LEASED: DELAYED},
    Marker.ACQUIRE_IN_ORDER: {
        NEW: LEASED_IN_ORDER,
        LEASED: LEASED_IN_ORDER,
        LEASED_IN_ORDER: LEASED_IN_ORDER,
        WAITING_IN_ORDER: LEASED_IN_ORDER,
    },
    Marker.DELAY: {NEW: DELAYED},
    Marker.DISCARD: {NEW: ENDED},
    Marker.RENEW: {LEASED: LEASED, DISPATCHED: DISPATCHED, LEASED_IN_ORDER: LEASED_IN_ORDER},
    Marker.DISPATCH: {LEASED: DISPATCHED, DISPATCHED: DISPATCHED},
    Marker.RELEASE: {LEASED: RELEASED, LEASED_IN_ORDER: WAITING_IN_ORDER},
    Marker.RELEASE_UNCOUNTED: {LEASED: RELEASED, DISPATCHED: RELEASED, LEASED_IN_ORDER: WAITING_IN_ORDER},
    Marker.RELEASE_LAST: {LEASED: EXHAUSTED, LEASED_IN_ORDER: EXHAUSTED},
    Marker.RESUME: {LEASED_IN_ORDER: LEASED, WAITING_IN_ORDER: RELEASED},
    Marker.REJECT: {LEASED: REJECTED, DISPATCHED: REJECTED, LEASED_IN_ORDER: REJECTED},
    Marker.RESCHEDULE: {DELAYED: DELAYED, RELEASED: RELEASED, WAITING_IN_ORDER: WAITING_IN_ORDER},
    Marker.CANCEL: _CANCELLABLE,
    Marker.PURGE: {NEW: ENDED, **_CANCELLABLE},
    Marker.PURGE_IN_FLIGHT: {NEW: ENDED, **_CANCELLABLE, **dict.fromkeys(HELD, CANCELLED)},
    Marker.ACK: END,
    Marker.FACT: END,
}

#: Markers that have no effect on a message that another consumer holds.
HOLDER_ONLY = frozenset(
    {
        Marker.RENEW,
        Marker.DISPATCH,
        Marker.RELEASE,
        Marker.RELEASE_UNCOUNTED,
        Marker.RELEASE_LAST,
        Marker.REJECT,
    }
)


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
    EXHAUSTED: Due(Cause.RELEASED, Kind.DEAD_LETTERED, exhausted=Kind.DEAD_LETTERED),
    DISPATCHED: Due(Cause.EXPIRED, Kind.ABANDONED, exhausted=Kind.ABANDONED),
}

#: Facts that come with a record on the queue.
TO_QUEUE = (Kind.REDELIVERED, Kind.DELIVERED)
