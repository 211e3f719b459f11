"""A clean history in which each thing happens once: the tests break it, one property at a time.

Five messages of one queue, in one partition (offsets 0 to 4), and what became of them:

0. acknowledged;
1. its consumer was killed: redelivered (5), then acknowledged;
2. released with an error: redelivered (6), then acknowledged;
3. rejected: a dead letter;
4. removed by retention before a consumer read it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lab.proof import history
from lab.proof.checker import check
from lab.proof.findings import Report
from lab.proof.history import Event, History
from marq.wire.markers import Ack, Acquire, Batch, Cause, Fact, Kind, Payload, Reject, Release, Renew, Source, Tick

Events = list[Event]
Change = Callable[[Events], None]
#: The property that is broken, in words how, and what breaks it.
Broken = tuple[str, str, Change]

SOURCE = Source("marq.messages", 0)
LOG, MARKERS, DEAD = "marq.messages/0", "marq.markers/0", "marq.dead-letters/0"
QUEUE, GROUP = "q", "marq.queue.q"
FIRST, SECOND, TRACKER = 1, 2, 9
LEASE_MS = 1_000
OTHER_CONTENT = "-.something-else.-"
SETTINGS = {"max_attempts": 3, "dead_letter": True, "group": None, "backoff": [100, 2.0, 1_000, False]}


def value(number: int) -> bytes:
    return b"message %d" % number


class Story:
    """Builds a history step by step; the markers log has a clock of its own, ``time_ms``."""

    def __init__(self) -> None:
        self.history = History()
        self.time_ms = 10_000
        self.offset = 0
        self.tick_at: int | None = None
        add = self.history.add
        add("marq.queues/0", "ok", "settings", version=1, queues={QUEUE: SETTINGS})
        add("marq.messages", "ok", "limit", log="marq.messages", bytes=100_000)
        add("tracker", "ok", "settings", version=1)
        add("tracker", "ok", "own", holder=self.name(TRACKER), log=MARKERS, fenced_at=0, position=0)

    @staticmethod
    def name(holder: int) -> str:
        return history.holder_name(holder)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def mark(self, batch: Batch | None, after_ms: int = 1, value: bytes | None = None) -> int:
        """Append to the markers log; return the offset."""
        self.time_ms += after_ms
        self.history.events.append(history.marker(MARKERS, self.offset, self.time_ms, batch, value))
        self.offset += 1
        return self.offset - 1

    def record(self, offset: int, number: int, *headers: tuple[str, bytes], committed: bool = True) -> None:
        time_ms = 5_000 + offset
        self.history.events.append(
            history.record(LOG, offset, time_ms, QUEUE, b"q", value(number), headers, committed=committed)
        )

    def copy(self, offset: int, number: int, attempt: int, *headers: tuple[str, bytes], committed: bool = True) -> None:
        own = [("marq-id", b"%s/%d" % (LOG.encode(), number)), ("marq-attempt", b"%d" % attempt)]
        own.append(("marq-first-sent", b"%d" % (5_000 + number)))
        self.record(offset, number, *own, *headers, committed=committed)

    def dead(self, number: int, attempt: int = 1, *, offset: int | None = None) -> None:
        headers = [("marq-id", b"%s/%d" % (LOG.encode(), number)), ("marq-attempt", b"%d" % attempt)]
        headers += [("marq-first-sent", b"%d" % (5_000 + number)), ("marq-reason", b"no good")]
        headers.append(("marq-origin", b"%s/%d" % (LOG.encode(), number if offset is None else offset)))
        self.history.events.append(history.record(DEAD, 0, 1, QUEUE, b"q", value(number), headers, op="dead"))

    # --- clients ------------------------------------------------------------------------------------------------------

    @contextmanager
    def sending(self, number: int, place: str) -> Iterator[None]:
        """Send a message; the context writes it to its place."""
        said = {"message": str(number), "queue": QUEUE, "content": history.content(QUEUE, b"q", value(number), ())}
        self.history.add("producer", "invoke", "send", **said)
        yield
        self.history.add("producer", "ok", "send", **said, record=place)

    def send(self, number: int) -> None:
        with self.sending(number, f"{LOG}/{number}"):
            self.record(number, number)

    def said(self, process: str, op: str, holder: int, offsets: list[int], **fields: object) -> None:
        names = {"holder": self.name(holder), "queue": QUEUE, "source": LOG, "offsets": offsets}
        self.history.add(process, "invoke", op, **names)
        self.history.add(process, "ok", op, **names, took_ms=1, **fields)

    def acquire(self, process: str, holder: int, offset: int, number: int, attempt: int = 1, **columns: Any) -> None:
        self.said(process, "acquire", holder, [offset])
        payload = Payload(1, attempt, b"q", (), value(number))
        self.mark(Acquire(QUEUE, holder, SOURCE, [offset], LEASE_MS, offset, [payload], **columns))
        self.said(process, "commit", holder, [offset])

    def deliver(self, process: str, holder: int, offset: int, number: int, attempt: int = 1, **fields: object) -> None:
        content = history.content(QUEUE, b"q", value(number), ())
        self.history.add(
            process, "ok", "deliver", group=GROUP, holder=self.name(holder), record=f"{LOG}/{offset}", queue=QUEUE,
            attempt=attempt, content=content, **fields,
        )  # fmt: skip

    def take(self, process: str, holder: int, offset: int, number: int, attempt: int = 1) -> None:
        self.acquire(process, holder, offset, number, attempt)
        self.deliver(process, holder, offset, number, attempt)

    def ack(self, process: str, holder: int, offset: int) -> None:
        self.said(process, "ack", holder, [offset])
        self.mark(Ack(QUEUE, holder, SOURCE, [offset]))

    def renew(self, process: str, holder: int, offset: int, after_ms: int = 1) -> None:
        self.said(process, "renew", holder, [offset])
        self.mark(Renew(QUEUE, holder, SOURCE, [offset], LEASE_MS), after_ms)

    def release(
        self, process: str, holder: int, offset: int, error: str = "boom", *, counted: bool = True, delay_ms: int = 0
    ) -> None:
        self.said(process, "release", holder, [offset])
        self.mark(Release(QUEUE, holder, SOURCE, [offset], [delay_ms], counted, [error]))

    def reject(self, process: str, holder: int, offset: int) -> None:
        self.said(process, "reject", holder, [offset])
        self.mark(Reject(QUEUE, holder, SOURCE, [offset], ["no good"]))

    def kill(self, process: str) -> None:
        self.history.add("nemesis", "info", "kill", target=process)

    # --- trackers -----------------------------------------------------------------------------------------------------

    def tick(self, after_ms: int = 1) -> None:
        self.tick_at = self.mark(Tick(TRACKER, self.time_ms + after_ms), after_ms)

    def fire(
        self, offset: int, kind: Kind, attempt: int, cause: Cause, source: Source = SOURCE, *, decided: bool = True
    ) -> None:
        """Decide, and write the fact."""
        if decided:
            self.history.add(
                "tracker", "invoke", "fire", holder=self.name(TRACKER), queue=QUEUE, source=history.log_name(source),
                offset=offset, kind=kind.name, attempt=attempt, cause=cause.name, log=MARKERS, applied=self.offset - 1,
                tick=self.tick_at,
            )  # fmt: skip
        self.mark(Fact(kind, QUEUE, TRACKER, source, [offset], [attempt], [cause]))

    def redeliver(self, cause: Cause, attempt: int = 2, *, decided: bool = True) -> None:
        """Redeliver message 0; the second consumer acknowledges the copy."""
        self.fire(0, Kind.REDELIVERED, attempt, cause, decided=decided)
        self.copy(1, 0, attempt)
        self.take("second", SECOND, 1, 0, attempt)
        self.ack("second", SECOND, 1)


def tell(story: Story) -> None:
    """The whole story."""
    for number in range(5):
        story.send(number)
    story.take("first", FIRST, 0, 0)
    story.take("first", FIRST, 1, 1)
    story.take("second", SECOND, 2, 2)
    story.take("second", SECOND, 3, 3)
    story.ack("first", FIRST, 0)
    story.kill("first")
    story.release("second", SECOND, 2)
    story.reject("second", SECOND, 3)
    story.tick()
    story.fire(2, Kind.REDELIVERED, 2, Cause.RELEASED)
    story.fire(3, Kind.DEAD_LETTERED, 1, Cause.REJECTED)
    story.copy(5, 2, 2, ("marq-error", b"boom"))
    story.dead(3)
    story.tick(LEASE_MS)
    story.fire(1, Kind.REDELIVERED, 2, Cause.EXPIRED)
    story.copy(6, 1, 2)
    story.take("second", SECOND, 5, 2, 2)
    story.take("second", SECOND, 6, 1, 2)
    story.ack("second", SECOND, 5)
    story.ack("second", SECOND, 6)
    story.history.add(LOG, "ok", "truncate", offset=5)
    story.history.add("second", "ok", "skipped", source=LOG, start=4, end=5)
    story.mark(None, value=b"???")
    origin = {"origin": f"{MARKERS}/{story.offset - 1}", "content": history.digest(b"???")}
    story.history.add("marq.quarantine/0", "ok", "quarantine", **origin)


def events_of(told: Callable[[Any], None], story: type[Story] = Story) -> Events:
    """Return the events of a story, for a test to change."""
    told(teller := story())
    return copy.deepcopy(teller.history.events)


def clean() -> Events:
    """Return the events of the whole story."""
    return events_of(tell)


def judged(told: Callable[[Any], None], story: type[Story] = Story) -> Report:
    """Return what the checker says of another story."""
    return check(events_of(told, story))


# --- what breaks a story ----------------------------------------------------------------------------------------------


def find(events: Events, op: str, type_: str = "ok", **fields: Any) -> Event:
    """Return the first event like that."""
    for event in events:
        if (event["op"], event["type"]) == (op, type_) and all(
            event.get(key) == value for key, value in fields.items()
        ):
            return event
    raise AssertionError(f"no {op} {type_} {fields}")


def marker(events: Events, kind: str, offset: int) -> Event:
    return find(events, "marker", kind=kind, offsets=[offset])


def change(op: str, where: dict[str, Any], type_: str = "ok", /, **to: Any) -> Change:
    """Change the first event like that."""
    return lambda events: find(events, op, type_, **where).update(to)


def omit(op: str, type_: str = "ok", **where: Any) -> Change:
    """Remove the first event like that."""
    return lambda events: events.remove(find(events, op, type_, **where))


def repeat(op: str, where: dict[str, Any], /, **to: Any) -> Change:
    """Add the first event like that once more, with changes."""
    return lambda events: events.append({**find(events, op, **where), **to})


def decide(offset: int, fact: str, **otherwise: Any) -> Change:
    """Change a tracker's decision and its fact."""

    def change(events: Events) -> None:
        for event in (find(events, "fire", "invoke", kind=fact, offset=offset), marker(events, fact, offset)):
            event |= otherwise | {f"{name}s": [value] for name, value in otherwise.items() if name != "kind"}

    return change


def keep(wanted: Callable[[Event], bool]) -> Change:
    """Remove all other events."""

    def change(events: Events) -> None:
        events[:] = filter(wanted, events)

    return change
