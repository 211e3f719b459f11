"""The naive fold of a markers partition: marker by marker and message by message.

It does without heap, index, coalescing, intervals and bytes. It folds the batches as written, one message at a time,
and never forgets. It is written from docs/protocol.md and shares nothing with the lease book but the backoff's
formula: if the two differ, one of them is wrong. The checker, the simulation and the stateful test of the book use it.

A queue's backoff and max_attempts may change while messages are released, and no marker says which ones a tracker used.
Then a message may be due at several moments, and the fold keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marq.core.storage.rows import row_key
from marq.settings.backoff import Backoff
from marq.wire.markers import BACKOFF, MIXED_QUEUES, Source
from marq.wire.names import is_synthetic

Event = dict[str, Any]

#: max_attempts where no settings name it.
DEFAULT_LIMIT = 5
#: Past this a tracker's monotonic time counts (docs/protocol.md, "The log's clock").
TOLERATED_JUMP_MS = 5_000

LEASED, RELEASED, REJECTED = "LEASED", "RELEASED", "REJECTED"
#: State of a message in flight that is never redelivered, and of its end.
DISPATCHED, ABANDONED = "DISPATCHED", "ABANDONED"
HELD = (LEASED, DISPATCHED)
#: CANCELLED is a state, and the fact that ends it.
DELAYED, CANCELLED = "DELAYED", "CANCELLED"
#: States in which a message may be rescheduled and cancelled.
WAITING = (DELAYED, RELEASED)
REDELIVERED, DEAD_LETTERED, DELIVERED = "REDELIVERED", "DEAD_LETTERED", "DELIVERED"
#: Facts, with what is counted of each.
FACTS = {
    REDELIVERED: "redelivered", DEAD_LETTERED: "dead_lettered", DELIVERED: "delivered", CANCELLED: "cancelled",
    ABANDONED: "abandoned",
}  # fmt: skip
#: Facts that come with a record on the queue.
COPIED = (REDELIVERED, DELIVERED)


class Standing(NamedTuple):
    """The state of an open message; ``dues_ms``: when it may be due, the earliest first."""

    queue: str
    holder: str
    attempt: int
    dues_ms: tuple[int, ...]
    since_ms: int
    state: str = LEASED
    counted: bool = True
    text: str = ""

    @property
    def due_ms(self) -> int:
        return self.dues_ms[0]


class Ending(NamedTuple):
    """The end of a due message: kind of the fact, attempt, cause."""

    kind: str
    attempt: int
    cause: str


def ending(standing: Standing, max_attempts: int) -> Ending:
    """Say what becomes of a message that is due."""
    if standing.state == REJECTED:
        return Ending(DEAD_LETTERED, standing.attempt, "REJECTED")
    if standing.state == DELAYED:
        return Ending(DELIVERED, standing.attempt, "DUE")
    if standing.state == CANCELLED:
        return Ending(CANCELLED, standing.attempt, "CANCELLED")
    if standing.state == DISPATCHED:
        return Ending(ABANDONED, standing.attempt, "EXPIRED")
    cause = "EXPIRED" if standing.state == LEASED else "RELEASED"
    if not standing.counted:
        return Ending(REDELIVERED, standing.attempt, cause)
    if standing.attempt < max_attempts:
        return Ending(REDELIVERED, standing.attempt + 1, cause)
    return Ending(DEAD_LETTERED, standing.attempt, cause)


class Fold:
    """The state of one markers partition after its record ``applied``; messages by the names of their records."""

    def __init__(self, backoffs: Callable[[str], Sequence[Backoff]], limits: Callable[[str], Sequence[int]]) -> None:
        self._backoffs = backoffs
        #: All that max_attempts may have been.
        self._limits = limits
        self.applied = -1
        self.now_ms = 0
        self.skew_ms = 0
        #: Holder, clock and monotonic time of the last TICK.
        self.anchor = ("", 0, 0)
        self.open: dict[str, Standing] = {}
        #: By queue and source, a byte for each offset: whether the queue has acquired it; without a queue: whether it
        #: is a dead letter that was redriven or deleted.
        self.acquired: dict[tuple[str, str], bytearray] = {}
        #: Number ranges that were delayed with possible repetitions, by synthetic source: first inclusive, last
        #: exclusive. A schedule's numbers are seconds since the epoch.
        self.delayed: dict[str, list[tuple[int, int]]] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def fold(self, event: Event) -> None:
        """Fold one record of the partition."""
        offset, time_ms = event["offset"], event["time_ms"]
        assert offset > self.applied, f"record {offset} after {self.applied}"
        self.applied = offset
        corrected_ms = time_ms - self.skew_ms
        if corrected_ms > self.now_ms:
            self.now_ms = corrected_ms
        step = _STEPS.get(event["kind"])
        if step is not None:
            step(self, event)

    def put(self, key: str, standing: Standing) -> None:
        """A message is open from now on, or stands differently."""
        self.open[key] = standing

    def end(self, key: str) -> bool:
        """A message is closed; return whether it was open."""
        return self.open.pop(key, None) is not None

    def tick(self, event: Event) -> None:
        """The tracker's clock: where the log's differs by too much, this one counts."""
        holder, monotonic_ms = event["holder"], event["monotonic_ms"]
        anchor_holder, anchor_now_ms, anchor_monotonic_ms = self.anchor
        if anchor_holder == holder:
            expected_ms = anchor_now_ms + (monotonic_ms - anchor_monotonic_ms)
            own_ms = event["time_ms"] - self.skew_ms
            if self.now_ms > expected_ms + TOLERATED_JUMP_MS or own_ms < expected_ms - TOLERATED_JUMP_MS:
                self.now_ms = expected_ms
                self.skew_ms = event["time_ms"] - expected_ms
        self.anchor = (holder, self.now_ms, monotonic_ms)

    def _acquire(self, event: Event) -> None:
        queue, source, offsets = event["queue"], event["source"], event["offsets"]
        acquired = self.acquired.setdefault((queue, source), bytearray())
        dues_ms = event.get("dues_ms") or [-1] * len(offsets)
        for offset, attempt, due_ms in zip(offsets, event["attempts"], dues_ms, strict=True):
            key = f"{source}/{offset}"
            standing = self.open.get(key)
            if standing is None and not (offset < len(acquired) and acquired[offset]):
                self._count(queue, "acquired" if due_ms < 0 else "delayed")
            else:
                self._count(queue, "reacquired")
                if standing is None or standing.state != LEASED:
                    continue
            if due_ms < 0:
                self.put(
                    key, Standing(queue, event["holder"], attempt, (self.now_ms + event["lease_ms"],), self.now_ms)
                )
            else:
                self.put(key, Standing(queue, "", attempt, (due_ms,), self.now_ms, DELAYED))
        _mark(acquired, event["from_offset"], offsets[-1] + 1)

    def _delay(self, event: Event) -> None:
        queue, source, offsets, from_offset = event["queue"], event["source"], event["offsets"], event["from_offset"]
        spans = self.delayed.get(source, [])
        known = bytearray() if is_synthetic(source) else self.acquired.setdefault(("", source), bytearray())
        for offset, attempt, time_ms in zip(offsets, event["attempts"], event["times_ms"], strict=True):
            key = f"{source}/{offset}"
            repeated = from_offset is not None and any(start <= offset < end for start, end in spans)
            if key in self.open or repeated or (offset < len(known) and known[offset]):
                self._count(queue, "reacquired")
                continue
            if from_offset is not None and not is_synthetic(source):
                self._count(queue, "redriven")
            self._count(queue, "delayed")
            self.put(key, Standing(queue, "", attempt, (self._due_ms(event, time_ms),), self.now_ms, DELAYED))
        if from_offset is not None and is_synthetic(source):
            self.delayed[source] = [*spans, (from_offset, offsets[-1] + 1)]
        elif from_offset is not None:
            self._settle(event, known)

    def _discard(self, event: Event) -> None:
        known = self.acquired.setdefault(("", event["source"]), bytearray())
        for offset in event["offsets"]:
            settled = f"{event['source']}/{offset}" in self.open or (offset < len(known) and known[offset])
            self._count(event["queue"], "discarded", not settled)
        self._settle(event, known)

    def _settle(self, event: Event, known: bytearray) -> None:
        """Dead letters are taken once: these, and no others."""
        for offset in event["offsets"]:
            _mark(known, offset, offset + 1)

    def _due_ms(self, event: Event, time_ms: int) -> int:
        return self.now_ms + time_ms if event["relative"] else int(time_ms)

    def _reschedule(self, event: Event) -> None:
        for offset, time_ms in zip(event["offsets"], event["times_ms"], strict=True):
            key = f"{event['source']}/{offset}"
            standing = self.open.get(key)
            waits = standing is not None and standing.state in WAITING
            self.ask(key, event, in_time=waits)
            if standing is not None and waits:
                self.put(key, standing._replace(dues_ms=(self._due_ms(event, time_ms),)))

    def _cancel(self, event: Event) -> None:
        for offset in event["offsets"]:
            key = f"{event['source']}/{offset}"
            standing = self.open.get(key)
            waits = standing is not None and standing.state in WAITING
            self.ask(key, event, in_time=waits or (standing is not None and standing.state == CANCELLED))
            if standing is not None and waits:
                self.put(key, standing._replace(dues_ms=(self.now_ms,), state=CANCELLED))

    def ask(self, key: str, event: Event, *, in_time: bool) -> None:
        """Record a request to reschedule or cancel a message."""

    def _ack(self, event: Event) -> None:
        source = event["source"]
        if event["queue"] == MIXED_QUEUES:
            for offset in event["offsets"]:
                standing = self.open.get(f"{source}/{offset}")
                if standing is not None:
                    self._count(standing.queue, "acked", 1)
                    self.end(f"{source}/{offset}")
            return
        closed = sum([self.end(f"{source}/{offset}") for offset in event["offsets"]])
        self._count(event["queue"], "acked", closed)
        self._count(event["queue"], "late", len(event["offsets"]) - closed)

    def _fact(self, event: Event) -> None:
        queue, source, offsets = event["queue"], event["source"], event["offsets"]
        if "WITHDRAWN" in event["causes"]:
            # By a schedule that says something else now; what it says may be what it said before.
            self.delayed.pop(source, None)
            self._count(queue, "cancelled", sum([self.end(f"{source}/{offset}") for offset in offsets]))
            return
        self._count(queue, FACTS[event["kind"]], len(offsets))
        self._count(queue, "expired", event["causes"].count("EXPIRED"))
        for offset in offsets:
            self.end(f"{source}/{offset}")

    def _held(self, event: Event, index: int) -> tuple[str, Standing | None]:
        key = f"{event['source']}/{event['offsets'][index]}"
        standing = self.open.get(key)
        # A dispatched message comes back only if its holder says that no handler saw it.
        states = (LEASED,) if event["kind"] == "RELEASE" and event["counted"] else HELD
        if standing is not None and standing.state in states and standing.holder == event["holder"]:
            return key, standing
        return key, None

    def _renew(self, event: Event) -> None:
        for index in range(len(event["offsets"])):
            key, standing = self._held(event, index)
            if standing is not None:
                self._count(standing.queue, "renewed")
                state = DISPATCHED if event["kind"] == "DISPATCH" else standing.state
                self.put(key, standing._replace(dues_ms=(self.now_ms + event["lease_ms"],), state=state))

    def _release(self, event: Event) -> None:
        for index, delay_ms in enumerate(event["delays_ms"]):
            key, standing = self._held(event, index)
            if standing is None:
                self._count(event["queue"], "late")
                continue
            self._count(standing.queue, "released")
            delays_ms = [delay_ms] if delay_ms != BACKOFF else self._delays_ms(key, standing)
            # After the last attempt it is a dead letter, at once.
            last = [event["counted"] and standing.attempt >= limit for limit in self._limits(standing.queue)]
            delays_ms = [*([0] if any(last) else []), *([] if all(last) else delays_ms)]
            dues_ms = tuple(sorted({self.now_ms + each for each in delays_ms}))
            text = event["errors"][index]
            self.put(
                key,
                standing._replace(
                    holder="", dues_ms=dues_ms, state=RELEASED, counted=event["counted"], text=text
                ),
            )  # fmt: skip

    def _delays_ms(self, key: str, standing: Standing) -> list[int]:
        topic, partition, offset = key.rsplit("/", 2)
        seed = row_key(Source(topic, int(partition)), int(offset))
        return [backoff.delay_ms(standing.attempt, seed) for backoff in self._backoffs(standing.queue)]

    def _reject(self, event: Event) -> None:
        for index, reason in enumerate(event["reasons"]):
            key, standing = self._held(event, index)
            if standing is None:
                self._count(event["queue"], "late")
                continue
            self._count(standing.queue, "rejected")
            self.put(key, standing._replace(holder="", dues_ms=(self.now_ms,), state=REJECTED, text=reason))

    def _count(self, queue: str, name: str, by: int = 1) -> None:
        counts = self.counts.setdefault(queue, {})
        counts[name] = counts.get(name, 0) + by


def _mark(known: bytearray, start: int, end: int) -> None:
    if end > len(known):
        known.extend(bytes(end - len(known)))
    known[start:end] = b"\x01" * (end - start)


_STEPS: dict[str, Callable[[Any, Event], None]] = {
    "ACQUIRE": Fold._acquire,
    "ACK": Fold._ack,
    "RENEW": Fold._renew,
    "DISPATCH": Fold._renew,
    "RELEASE": Fold._release,
    "REJECT": Fold._reject,
    "DELAY": Fold._delay,
    "DISCARD": Fold._discard,
    "RESCHEDULE": Fold._reschedule,
    "CANCEL": Fold._cancel,
    **dict.fromkeys(FACTS, Fold._fact),
    "TICK": lambda fold, event: fold.tick(event),
}
