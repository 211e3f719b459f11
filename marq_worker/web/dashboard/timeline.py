"""The timeline of one message, computed from its markers.

The id of a message is the place of its first record. Each redelivery is a record with a place of its own and the id in
a header, and the ACQUIRE that takes it carries the headers. So one read of the markers in order finds all places and
all events; timeline_reader.py does this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marq.client.receipt import Receipt
from marq.wire.error_texts import error_of, traceback_of
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode
from marq.wire.markers import (
    ANY_QUEUE,
    BACKOFF,
    BLOCKED_MS,
    DUE_AT_ONCE,
    LAST,
    NOW,
    Ack,
    Acquire,
    Answer,
    Cancel,
    Cause,
    Delay,
    Discard,
    Dispatch,
    Fact,
    Kind,
    MixedAcquire,
    Payload,
    PlainBatch,
    Purge,
    Record,
    Reject,
    Release,
    Renew,
    RequestOutcome,
    Reschedule,
    Resume,
    Resumed,
    Source,
    Tick,
    kind_of,
    payload_of,
)
from marq.wire.names import ID_HEADER, is_scheduled, is_synthetic
from marq.wire.record_headers import record_id
from marq_worker.web.dashboard.actor import RELEASED_BY_OPERATOR
from marq_worker.web.message_listing import moment


@dataclass
class Timeline:
    """The events of one message; takes markers in the order of each partition.

    ``queue``: omits the events of other queues, which may have a message with the same id; ANY_QUEUE: omits none.
    """

    id: str
    queue: str = ANY_QUEUE
    places: set[tuple[Source, int]] = field(default_factory=set)
    events: list[dict[str, Any]] = field(default_factory=list)
    #: The queues that have markers about a message with this id.
    queues: set[str] = field(default_factory=set)
    #: The message in the last marker that carried it.
    payload: Payload | None = None

    def __post_init__(self) -> None:
        receipt = Receipt.of(self.id)
        self.places.add((Source(receipt.topic, receipt.partition), receipt.offset))

    def read(self, record: Record, partition: int) -> None:
        """Read a record of the markers topic."""
        try:
            batch = decode(record.value)
        except CorruptMarker:
            return
        if isinstance(batch, _OF_NO_MESSAGE):
            return
        wanted = self.id.encode()
        if isinstance(batch, Acquire | Delay) and wanted in (record.value or b""):
            self._find_places(batch, wanted)
        for source, number in list(self.places):
            # An id does not have the id of its topic's incarnation.
            if source not in (batch.source, batch.source.log):
                continue
            if isinstance(batch, Purge):
                # The queue of a record is not known from its place. If the message was acquired, its fact tells more.
                if batch.queue == self.queue and number < batch.end and not self.events:
                    self._note(batch, 0, number, record, partition)
            elif (index := _index(batch.offsets, number)) is None:
                continue
            elif isinstance(batch, MixedAcquire):
                # Only now: it has thousands of messages, and nearly all such markers have none with this id.
                self._note(batch.acquires()[index], 0, number, record, partition)
            else:
                self._note(batch, index, number, record, partition)

    def _find_places(self, batch: Acquire | Delay, wanted: bytes) -> None:
        for offset in batch.offsets:
            if (ID_HEADER, wanted) in [tuple(header) for header in payload_of(batch, offset).headers]:
                self.queues.add(batch.queue)
                if self.queue in (ANY_QUEUE, batch.queue):
                    self.places.add((batch.source, offset))

    def _note(self, batch: PlainBatch, index: int, number: int, record: Record, partition: int) -> None:
        assert not isinstance(batch, _OF_NO_MESSAGE)
        if batch.queue != ANY_QUEUE:
            self.queues.add(batch.queue)
            if self.queue not in (ANY_QUEUE, batch.queue):
                return
        if isinstance(batch, Acquire | Delay) and not (payload := batch.payloads[index]).left:
            self.payload = payload
        self.events.append(
            {
                "at": moment(record.timestamp),
                "at_ms": record.timestamp,
                "kind": kind_of(batch).name,
                **_told(batch, index)._asdict(),
                "queue": batch.queue,
                "holder": f"{batch.holder:016x}",
                "place": record_id(batch.source, number),
                "marker": f"{partition}/{record.offset}",
            }
        )

    def keep(self, count: int) -> int | None:
        """Drop all but the first events; return the time of the first dropped one, None if there were no more."""
        self.events.sort(key=lambda event: event["at_ms"])
        dropped = self.events[count:]
        del self.events[count:]
        return dropped[0]["at_ms"] if dropped else None

    def told(self, consumers: Mapping[str, str] | None = None, since_ms: int | None = None) -> list[dict[str, Any]]:
        """Return the events in order, consecutive renewals as one.

        Args:
            consumers: the names of consumers by holder, as in events.
            since_ms: when the message was sent; default: at the first event.
        """
        events: list[dict[str, Any]] = []
        ended: set[str] = set()
        failed, error = 0, ""
        for event in sorted(self.events, key=lambda event: event["at_ms"]):
            if events and event["kind"] == "RENEW" and _is_next(event, events[-1]):
                events[-1]["markers"].append(event["marker"])
                continue
            begin_ms = since_ms if since_ms is not None else events[0]["at_ms"] if events else event["at_ms"]
            name = (consumers or {}).get(event["holder"]) if _CONSUMER in event["text"] else None
            # The consumer's lease had ended.
            late = event["kind"] in _OF_HOLDERS and event["place"] in ended
            if event["kind"] == "DELAY":
                # A redriven message starts again.
                failed, error = 0, ""
            elif event["kind"] in ("RELEASE", "REJECT") and not late:
                failed, error = failed + event["failed"], event["detail"]
            text = event["text"].replace(_CONSUMER, name or "a consumer")
            text = text.replace(_WHY_RELEASED, f"it {_failures(failed, error)}" if error else "it was released")
            text = text.replace(_WHY_REJECTED, f"it was rejected: {error}" if error else "it was rejected")
            events.append(
                {key: value for key, value in event.items() if key not in ("marker", "failed")}
                | {
                    "text": text,
                    "consumer": name,
                    "late": late,
                    "elapsed_seconds": max(0, event["at_ms"] - begin_ms) / 1000,
                    "markers": [event["marker"]],
                }
            )
            if event["kind"] in _ENDING:
                ended.add(event["place"])
        return events


def _failures(count: int, error: str) -> str:
    """Return how often a message failed, and its last error."""
    return f"failed {count:,} times: {error}" if count > 1 else f"failed: {error}"


def _is_next(event: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return all(event[name] == before[name] for name in ("kind", "place", "holder"))


def status_after(events: Sequence[Mapping[str, Any]], missing: str = "") -> str:
    """Return the status of a message that no tracker has and that is not a dead letter.

    ``missing``: why earlier events may be missing, else "".
    """
    if missing and not events:
        return "unknown"
    told = [event for event in events if not event["late"] and event["kind"] in _STATUSES]
    if told and told[-1]["kind"] == "CANCELLED" and _CAUSES[Cause.MESSAGE_EXPIRED] in told[-1]["text"]:
        return "expired"
    return _STATUSES[told[-1]["kind"]] if told else "waiting" if not events else "finished"


def last_place(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the place of a message that is open after these events; empty if they do not tell."""
    # Markers of a lost lease may still name a former place.
    opened = [event for event in events if event["kind"] in _OPENING] or events
    return str(opened[-1]["place"]) if opened else ""


def _index(offsets: Sequence[int], number: int) -> int | None:
    index = bisect_left(offsets, number)
    return index if index < len(offsets) and offsets[index] == number else None


#: Questions about all open messages, and markers without messages.
_OF_NO_MESSAGE = (Resume, Resumed, Tick)
#: Kinds of markers that open a message at their place.
_OPENING = ("ACQUIRE", "DELAY")
#: Kinds of facts that end it there; consumers' markers that come later do not count.
_ENDING = ("REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED", "ABANDONED")
_OF_HOLDERS = ("ACK", "RELEASE", "REJECT", "RENEW", "DISPATCH")
_STATUSES: Mapping[str, str] = {
    "ACK": "acknowledged",
    "REDELIVERED": "waiting",
    "DELIVERED": "waiting",
    "DEAD_LETTERED": "dead-lettered, and redriven, deleted or removed since",
    "CANCELLED": "cancelled",
    "ABANDONED": "abandoned",
    "DISCARD": "deleted",
    "PURGE": "purged",
}
#: Stand for what an earlier event says in the text of an event: the name of the holder, and why an attempt ended.
_CONSUMER, _WHY_RELEASED, _WHY_REJECTED = "{consumer}", "{released}", "{rejected}"
_CAUSES: Mapping[int, str] = {
    Cause.EXPIRED: "its lease expired",
    Cause.RELEASED: _WHY_RELEASED,
    Cause.REJECTED: _WHY_REJECTED,
    Cause.TOO_LARGE: "its redelivery would have been too large",
    Cause.GONE: "its record was removed before the message could be delivered again",
    Cause.DUE: "it was due",
    Cause.CANCELLED: "it was cancelled",
    Cause.WITHDRAWN: "its schedule was withdrawn",
    Cause.MESSAGE_EXPIRED: "it had expired before it could be delivered",
}
_FACTS = {
    Kind.REDELIVERED: "Redelivered for attempt {attempt}, because {cause}",
    Kind.DEAD_LETTERED: "Dead-lettered after attempt {attempt}, because {cause}",
    Kind.DELIVERED: "Sent to its queue, because {cause}",
    Kind.CANCELLED: "Finished without a delivery, because {cause}",
    Kind.ABANDONED: "Abandoned without a redelivery, because {cause}",
}


class _Told(NamedTuple):
    """A marker's meaning for a message in words; ``detail``: more, such as the error of a handler.

    ``failed``: whether an attempt that counts ended with this error.
    """

    text: str
    detail: str = ""
    traceback: str = ""
    failed: bool = False


def _told(batch: PlainBatch, index: int) -> _Told:
    match batch:
        case Acquire():
            return _acquired(batch, index)
        case Renew(started=True):
            return _Told(f"In the handler of {_CONSUMER}", "the attempt counts from here on")
        case Renew():
            return _Told(f"Lease renewed by {_CONSUMER}", f"for {_seconds(batch.lease_ms)} each time")
        case Dispatch():
            return _Told(f"Passed to the handler of {_CONSUMER}", "at most once: no redelivery from here on")
        case Ack():
            return _Told(f"Acknowledged by {_CONSUMER}")
        case Release():
            return _released(batch, index)
        case Reject():
            reason = batch.reasons[index]
            return _Told(f"Rejected by {_CONSUMER}", error_of(reason) or "no reason was given", traceback_of(reason))
        case Delay():
            return _Told(f"{_origin(batch)}, due {_time(batch.times_ms[index], relative=batch.relative)}")
        case Reschedule():
            return _Told(f"Reschedule requested, due {_time(batch.times_ms[index], relative=batch.relative)}")
        case Cancel():
            return _Told("Cancellation requested")
        case Purge():
            return _Told("Its queue was purged")
        case Discard():
            return _Told("Dead letter deleted")
        case Answer():
            done = batch.outcomes[index] == RequestOutcome.DONE
            return _Told("Request done" if done else "Request refused", "" if done else "too late: no longer delayed")
        case Fact():
            cause = _CAUSES.get(batch.causes[index], "of a cause unknown to this version")
            attempt = batch.attempts[index]
            if batch.kind is Kind.DEAD_LETTERED and not attempt:
                return _Told(f"Dead-lettered before its first attempt, because {cause}")
            return _Told(_FACTS.get(batch.kind, "").format(attempt=attempt, cause=cause))
        case Tick() | Resume() | Resumed():
            return _Told("")


def _origin(batch: Delay) -> str:
    if is_scheduled(batch.source.topic):
        return "Scheduled"
    return "Delayed by its sender" if is_synthetic(batch.source.topic) else "Redriven"


def _acquired(batch: Acquire, index: int) -> _Told:
    due_ms = NOW if batch.dues_ms is None else batch.dues_ms[index]
    if due_ms == DUE_AT_ONCE:
        detail = "unless it has expired"
        return _Told("Left with the tracker, which delivers it as soon as its queue is not paused", detail)
    if due_ms != NOW:
        return _Told(f"Delayed by its sender, due {_time(due_ms, relative=False)}")
    attempt = 1 if batch.attempts is None else batch.attempts[index]
    lease = f"lease of {_seconds(batch.lease_ms)}"
    if batch.in_order:
        detail = f"{lease}, delivered at its turn"
        return _Told(f"Acquired by {_CONSUMER}, attempt {attempt}", detail)
    return _Told(f"Delivered to {_CONSUMER}, attempt {attempt}", lease)


def _released(batch: Release, index: int) -> _Told:
    delay_ms, error = batch.delays_ms[index], error_of(batch.errors[index])
    traceback, failed = traceback_of(batch.errors[index]), batch.counted and bool(error)
    if delay_ms == LAST:
        return _Told(f"Released by {_CONSUMER} after its last attempt", error, traceback, failed)
    if delay_ms == BLOCKED_MS:
        text = f"Released by {_CONSUMER}; it blocks its key until it is delivered now or cancelled"
        # A last release follows it.
        return _Told(text, error, traceback)
    when = "after its backoff" if delay_ms == BACKOFF else f"in {_seconds(delay_ms)}" if delay_ms else "at once"
    by = "an operator" if error == RELEASED_BY_OPERATOR else _CONSUMER
    uncounted = "" if batch.counted else ", without counting the attempt"
    if by != _CONSUMER:
        return _Told(f"Released by {by}, to be redelivered {when}{uncounted}")
    return _Told(f"Released by {by}, to be redelivered {when}{uncounted}", error, traceback, failed)


def _time(time_ms: int, *, relative: bool) -> str:
    if relative:
        return f"in {_seconds(time_ms)}" if time_ms else "at once"
    return f"at {moment(time_ms).replace('T', ' ')[:19]} UTC"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:,g} s"
