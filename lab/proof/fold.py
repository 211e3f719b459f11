"""The naive fold of a markers partition: marker by marker and message by message.

It uses no heap, index, coalescing, intervals or bytes, folds one message at a time and never forgets. It is
written from docs/protocol.md and shares only the backoff's formula with the lease book: if they differ, one is wrong.

A queue's backoff and max_attempts may change while messages are released, and no marker says which ones a tracker used.
Then a message may be due at several moments, and the fold keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lab.proof.history import IN_RECORD, Event
from marq.core.storage.rows import row_key
from marq.settings.backoff import Backoff
from marq.wire.markers import ANY_QUEUE, BACKOFF, BLOCKED_MS, LAST, MAX_TIME_MS, Source
from marq.wire.names import WITHOUT_RECORDS, is_scheduled, is_synthetic

#: A message: its queue, and the name of its place. Several queues may have a message at one place.
Key = tuple[str, str]
#: Settings of a queue: ``max_attempts``, ``backoff``, ``deduplication_window_ms`` and others, or defaults.
Settings = Mapping[str, Any]

# --- states -----------------------------------------------------------------------------------------------------------

LEASED, RELEASED, REJECTED = "LEASED", "RELEASED", "REJECTED"
#: State of an in-flight message that is never redelivered, and the fact that ends it.
DISPATCHED, ABANDONED = "DISPATCHED", "ABANDONED"
#: States of messages that keep their place: no tracker ever redelivers them.
LEASED_IN_ORDER, WAITING_IN_ORDER = "LEASED_IN_ORDER", "WAITING_IN_ORDER"
#: State of a message whose last delivery in its place failed.
EXHAUSTED = "EXHAUSTED"
#: The text of a leased message that has lost its place.
OUT_OF_LINE = "its record is gone"
IN_ORDER = (LEASED_IN_ORDER, WAITING_IN_ORDER)
HELD = (LEASED, DISPATCHED, LEASED_IN_ORDER)
#: CANCELLED is both a state and the fact that ends it.
DELAYED, CANCELLED = "DELAYED", "CANCELLED"
#: States in which a message may be rescheduled and cancelled.
WAITING = (DELAYED, RELEASED, WAITING_IN_ORDER)
REDELIVERED, DEAD_LETTERED, DELIVERED = "REDELIVERED", "DEAD_LETTERED", "DELIVERED"
#: Facts, with the name of the counter of each.
FACTS = {name: name.lower() for name in (REDELIVERED, DEAD_LETTERED, DELIVERED, CANCELLED, ABANDONED)}
#: Facts that come with a record on the queue.
COPIED = (REDELIVERED, DELIVERED)
#: Low bits of an ordered message's holder; the bits above them are the offset of its RESUME.
HOLDER_BITS = 16


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

    def blocks(self, now_ms: int) -> bool:
        """Whether a message that waits in its line blocks it until an operator acts."""
        return self.due_ms - now_ms >= BLOCKED_MS // 2


def comes_after(holder: str, other: str) -> bool:
    """Whether one holder of ordered messages resumed after another, or is the same one."""
    return int(holder, 16) >> HOLDER_BITS >= int(other, 16) >> HOLDER_BITS


# --- the fold ---------------------------------------------------------------------------------------------------------

#: max_attempts if no settings name it.
DEFAULT_LIMIT = 5
#: deduplication_window if no settings name it.
DEFAULT_WINDOW_MS = 300_000
#: Beyond a jump of this size a tracker's monotonic time counts (docs/protocol.md, "The log's clock").
TOLERATED_JUMP_MS = 5_000


class Fold:
    """The state of one markers partition after its record ``applied``."""

    def __init__(self, settings: Callable[[str], Sequence[Settings]]) -> None:
        #: All settings that a queue may have had.
        self._settings = settings
        self.applied = -1
        self.now_ms = 0
        self.skew_ms = 0
        #: Holder, clock and monotonic time of the last TICK.
        self.anchor = ("", 0, 0)
        self.open: dict[Key, Standing] = {}
        #: The queues that ever had an open message at a place.
        self._queues: dict[str, tuple[str, ...]] = {}
        #: By queue and source, a byte for each offset: whether the queue has acquired it; without a queue: whether it
        #: is a dead letter that was redriven or deleted.
        self.acquired: dict[tuple[str, str], bytearray] = {}
        #: Number ranges whose DELAYs may be repeated, by synthetic source: first inclusive, last
        #: exclusive. A schedule's numbers are seconds since the epoch.
        self.delayed: dict[str, list[tuple[int, int]]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        #: The deduplication ids of each queue, and until when they are remembered.
        self.ids: dict[tuple[str, str], int] = {}

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

    def put(self, key: Key, standing: Standing) -> None:
        """Open a message, or change its standing."""
        queue, place = key
        queues = self._queues.get(place, ())
        if queue not in queues:
            self._queues[place] = (*queues, queue)
        self.open[key] = standing

    def named(self, event: Event, offset: int) -> list[Key]:
        """Return the message that an event names; with ANY_QUEUE, those that were ever open at that place."""
        queue, place = event["queue"], f"{event['source']}/{offset}"
        return [(name, place) for name in (self._queues.get(place, ()) if queue == ANY_QUEUE else [queue])]

    def end(self, key: Key) -> bool:
        """Close a message; return whether it was open."""
        return self.open.pop(key, None) is not None

    def tick(self, event: Event) -> None:
        """Apply the tracker's clock, which counts if the log's differs by too much."""
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
        dues_ms, in_order = event.get("dues_ms") or [-1] * len(offsets), event.get("in_order", False)
        for offset, attempt, due_ms in zip(offsets, event["attempts"], dues_ms, strict=True):
            key = queue, f"{source}/{offset}"
            standing = self.open.get(key)
            new = standing is None and not (offset < len(acquired) and acquired[offset])
            state = DELAYED if due_ms >= 0 else LEASED_IN_ORDER if in_order else LEASED
            if new:
                self._count(queue, "delayed" if state == DELAYED else "acquired")
            else:
                taken = standing is not None and _is_taken(standing, state, event["holder"], attempt, in_order)
                self._count_again(queue, standing if taken else None, state, attempt)
                if not taken:
                    continue
            holder, ends_ms = event["holder"], self.now_ms + event["lease_ms"]
            if state == DELAYED:
                holder, ends_ms = self._place(), min(due_ms or self.now_ms, MAX_TIME_MS)
            counted = event.get("counted", True) or state == DELAYED
            # An attempt that counts stays so.
            counted = counted or (standing is not None and standing.counted and standing.attempt == attempt)
            self.put(key, Standing(queue, holder, attempt, (ends_ms,), self.now_ms, state, counted))
        _mark(acquired, event["from_offset"], offsets[-1] + 1)

    def _mixed_acquire(self, event: Event) -> None:
        for acquire in acquires_of(event):
            self._acquire(acquire)

    def _count_again(self, queue: str, standing: Standing | None, state: str, attempt: int) -> None:
        """Count a message that was acquired before; an ordered one may come back in its place."""
        before = standing if state == LEASED_IN_ORDER else None
        released = before is not None and before.state == WAITING_IN_ORDER
        expired = before is not None and before.state == LEASED_IN_ORDER and attempt > before.attempt
        self._count(queue, "expired", expired)
        for name in ("redelivered", "acquired") if released or expired else ("reacquired",):
            self._count(queue, name)

    def _resume(self, event: Event) -> None:
        """Records before the first one that a consumer can read are gone, so their messages will be redelivered."""
        for key, standing in list(self.open.items()) if event["onwards"] else ():
            queue, place = key
            source, _, offset = place.rpartition("/")
            before = (queue, source) == (event["queue"], event["source"]) and int(offset) < event["offsets"][0]
            if before and standing.state in IN_ORDER:
                if standing.state == LEASED_IN_ORDER:
                    # It is not known whether a handler has seen it.
                    self.put(key, standing._replace(state=LEASED, counted=False, text=OUT_OF_LINE))
                else:
                    dues_ms = (self.now_ms,) if standing.blocks(self.now_ms) else standing.dues_ms
                    self.put(key, standing._replace(holder="", dues_ms=dues_ms, state=RELEASED))

    def _delay(self, event: Event) -> None:
        queue, source, offsets, from_offset = event["queue"], event["source"], event["offsets"], event["from_offset"]
        spans = self.delayed.get(source, [])
        known = bytearray() if is_synthetic(source) else self.acquired.setdefault(("", source), bytearray())
        ids = event.get("deduplication_ids") or [""] * len(offsets)
        for offset, attempt, time_ms, own_id in zip(offsets, event["attempts"], event["times_ms"], ids, strict=True):
            key = queue, f"{source}/{offset}"
            repeated = from_offset is not None and any(start <= offset < end for start, end in spans)
            if key in self.open or repeated or (offset < len(known) and known[offset]):
                self._count(queue, "reacquired")
                continue
            if own_id and self.ids.get((queue, own_id), 0) > self.now_ms:
                self._count(queue, "deduplicated")
                self.drop(key)
                continue
            if own_id:
                self.ids[queue, own_id] = self.now_ms + self._settings(queue)[-1].get(
                    "deduplication_window_ms", DEFAULT_WINDOW_MS
                )
            if from_offset is not None and not is_synthetic(source):
                self._count(queue, "redriven")
            self._count(queue, "delayed")
            due_ms = self._due_ms(event, time_ms)
            self.put(key, Standing(queue, self._place(), attempt, (due_ms,), self.now_ms, DELAYED))
        if from_offset is not None and is_synthetic(source):
            self.delayed[source] = [*spans, (from_offset, offsets[-1] + 1)]
        elif from_offset is not None:
            self._settle(event, known)

    def _place(self) -> str:
        """Return what a delayed message has instead of a holder: the place of its marker, by which it is ordered."""
        return f"{self.applied:016x}" if self.applied else ""

    def drop(self, key: Key) -> None:
        """Drop a duplicate, a message whose deduplication id was accepted before."""

    def _discard(self, event: Event) -> None:
        known = self.acquired.setdefault(("", event["source"]), bytearray())
        for offset in event["offsets"]:
            settled = (event["queue"], f"{event['source']}/{offset}") in self.open or (
                offset < len(known) and known[offset]
            )
            self._count(event["queue"], "deleted", not settled)
        self._settle(event, known)

    def _settle(self, event: Event, known: bytearray) -> None:
        """Mark these dead letters as settled, and no others between them."""
        for offset in event["offsets"]:
            _mark(known, offset, offset + 1)

    def _due_ms(self, event: Event, time_ms: int) -> int:
        return min(self.now_ms + time_ms if event["relative"] else int(time_ms), MAX_TIME_MS)

    def _reschedule(self, event: Event) -> None:
        for offset, time_ms in zip(event["offsets"], event["times_ms"], strict=True):
            moved = [key for key in self.named(event, offset) if self._is_movable(key)]
            self._ask(event, offset, moved)
            for key in moved:
                self.put(key, self.open[key]._replace(dues_ms=(self._due_ms(event, time_ms),)))

    def _cancel(self, event: Event) -> None:
        for offset in event["offsets"]:
            keys = [key for key in self.named(event, offset) if key in self.open]
            moved = [key for key in keys if self._is_movable(key)]
            self._ask(event, offset, [key for key in keys if key in moved or self.open[key].state == CANCELLED])
            for key in moved:
                self.put(key, self.open[key]._replace(dues_ms=(self.now_ms,), state=CANCELLED, holder=""))

    def _purge(self, event: Event) -> None:
        queue, source, end = event["queue"], event["source"], event["offsets"][0]
        # Its offset is then a time, and it concerns messages that DELAYs have opened, in any source.
        without_records = source.startswith(f"{WITHOUT_RECORDS}/")
        for key, standing in list(self.open.items()):
            own, _, offset = key[1].rpartition("/")
            if key[0] != queue or (not without_records and own != source):
                continue
            if without_records and ((queue, own) in self.acquired or is_scheduled(own)):
                continue
            before = (standing.since_ms if without_records else int(offset)) < end
            if before and self._is_purged(standing, event, own):
                self.put(key, standing._replace(dues_ms=(self.now_ms,), state=CANCELLED, holder=""))
        if not without_records:
            _mark(self.acquired.setdefault((queue, source), bytearray()), 0, end)

    def _is_purged(self, standing: Standing, event: Event, source: str) -> bool:
        state, in_flight = standing.state, event["in_flight"]
        if state == DELAYED:
            waits_from = standing.since_ms if is_synthetic(source) else self.now_ms
            return event["delayed"] or standing.due_ms <= waits_from
        if state == WAITING_IN_ORDER:
            return in_flight or standing.blocks(self.now_ms)
        return state == RELEASED or (in_flight and state in HELD)

    def _ask(self, event: Event, offset: int, in_time: Sequence[Key]) -> None:
        for key in in_time:
            self.ask(key, event, in_time=True)
        if not in_time:
            self.ask((event["queue"], f"{event['source']}/{offset}"), event, in_time=False)

    def _is_movable(self, key: Key) -> bool:
        """Whether a message waits; an ordered one counts only if it blocks its line."""
        standing = self.open.get(key)
        if standing is None:
            return False
        if standing.state == WAITING_IN_ORDER:
            return standing.blocks(self.now_ms)
        return standing.state in WAITING

    def ask(self, key: Key, event: Event, *, in_time: bool) -> None:
        """Record a request to reschedule or cancel a message; ``key`` may have ANY_QUEUE if it came too late."""

    def acknowledged(self, event: Event, offset: int) -> list[Key]:
        """Return the messages that an ACK ends; with ANY_QUEUE the only one at that place, or those of its holder."""
        keys = [key for key in self.named(event, offset) if key in self.open]
        if event["queue"] != ANY_QUEUE or len(keys) == 1:
            return keys
        return [key for key in keys if self.open[key].holder == event["holder"]]

    def _ack(self, event: Event) -> None:
        for offset in event["offsets"]:
            keys = self.acknowledged(event, offset)
            for key in keys:
                self._count(key[0], "acked")
                self.end(key)
            if event["queue"] != ANY_QUEUE:
                self._count(event["queue"], "late", not keys)

    def _fact(self, event: Event) -> None:
        queue, source, offsets = event["queue"], event["source"], event["offsets"]
        if "WITHDRAWN" in event["causes"]:
            # The schedule was changed; if it is changed back, it delays the same numbers again.
            self.delayed.pop(source, None)
            self._count(queue, "cancelled", sum([self.end((queue, f"{source}/{offset}")) for offset in offsets]))
            return
        expired = event["causes"].count("MESSAGE_EXPIRED")
        self._count(queue, "messages_expired", expired)
        # No client has cancelled them.
        self._count(queue, FACTS[event["kind"]], len(offsets) - expired * (event["kind"] == CANCELLED))
        self._count(queue, "expired", event["causes"].count("EXPIRED"))
        self._count(queue, "too_large", event["causes"].count("TOO_LARGE"))
        self._count(queue, "gone", event["causes"].count("GONE"))
        for offset in offsets:
            self.end((queue, f"{source}/{offset}"))

    def _held(self, event: Event) -> Iterator[tuple[int, Key, Standing]]:
        """Yield the messages of a marker that its holder has in flight, with their places in the marker."""
        kind = event["kind"]
        states: tuple[str, ...] = HELD
        if kind == "DISPATCH":
            states = (LEASED, DISPATCHED)
        elif kind == "RELEASE" and event["counted"]:
            # A dispatched message comes back only if its holder says that no handler saw it.
            states = (LEASED, LEASED_IN_ORDER)
        for index, offset in enumerate(event["offsets"]):
            key = event["queue"], f"{event['source']}/{offset}"
            standing = self.open.get(key)
            if standing is not None and standing.state in states and standing.holder == event["holder"]:
                yield index, key, standing
            elif kind in ("RELEASE", "REJECT"):
                self._count(event["queue"], "late")

    def _renew(self, event: Event) -> None:
        for _, key, standing in self._held(event):
            self._count(standing.queue, "renewed")
            state = DISPATCHED if event["kind"] == "DISPATCH" else standing.state
            counted = standing.counted or event.get("started", False)
            dues_ms = (self.now_ms + event["lease_ms"],)
            if not event.get("exactly", False):
                dues_ms = max(dues_ms, standing.dues_ms)
            self.put(key, standing._replace(dues_ms=dues_ms, state=state, counted=counted))

    def _release(self, event: Event) -> None:
        for index, key, standing in self._held(event):
            delay_ms, settings = event["delays_ms"][index], self._settings(standing.queue)
            self._count(standing.queue, "released")
            delays_ms = [max(delay_ms, 0)] if delay_ms != BACKOFF else self._delays_ms(key, standing)
            # After the last attempt it becomes a dead letter at once; a blocked message blocks its line instead.
            last = [
                event["counted"]
                and standing.attempt >= rules.get("max_attempts", DEFAULT_LIMIT)
                and delay_ms < BLOCKED_MS
                for rules in settings
            ]
            delays_ms = [*([0] if any(last) else []), *([] if all(last) else delays_ms)]
            dues_ms = tuple(sorted({min(self.now_ms + delay_ms, MAX_TIME_MS) for delay_ms in delays_ms}))
            state, holder = RELEASED, ""
            if delay_ms == LAST and standing.state in (LEASED, LEASED_IN_ORDER):
                state = EXHAUSTED
            elif standing.state == LEASED_IN_ORDER:
                state, holder = WAITING_IN_ORDER, standing.holder
            text = event["errors"][index]
            released = standing._replace(holder=holder, dues_ms=dues_ms, state=state, counted=event["counted"])
            self.put(key, released._replace(text=text))

    def _delays_ms(self, key: Key, standing: Standing) -> list[int]:
        queue, place = key
        topic, partition, offset = place.rsplit("/", 2)
        seed = row_key(queue, Source(topic, int(partition)), int(offset))
        backoffs = [Backoff(*settings.get("backoff", ())) for settings in self._settings(queue)]
        return [backoff.delay_ms(standing.attempt, seed) for backoff in backoffs]

    def _reject(self, event: Event) -> None:
        for index, key, standing in self._held(event):
            self._count(standing.queue, "rejected")
            # A rejected message was delivered.
            rejected = standing._replace(holder="", dues_ms=(self.now_ms,), state=REJECTED, counted=True)
            self.put(key, rejected._replace(text=event["reasons"][index]))

    def _count(self, queue: str, name: str, by: int = 1) -> None:
        counts = self.counts.setdefault(queue, {})
        counts[name] = counts.get(name, 0) + by


def _is_taken(standing: Standing, state: str, holder: str, attempt: int, in_order: bool) -> bool:
    """Whether an ACQUIRE with this state takes over an open message; none delays an ordered one."""
    if standing.state not in IN_ORDER:
        # A RESUME takes the order from messages whose records are gone.
        return standing.state == LEASED and not (in_order and standing.text == OUT_OF_LINE)
    # A lower attempt of the same holder was written late.
    late = holder == standing.holder and attempt < standing.attempt
    return state == LEASED or (state == LEASED_IN_ORDER and comes_after(holder, standing.holder) and not late)


def acquires_of(event: Event) -> list[Event]:
    """Return a MIXED_ACQUIRE as the ACQUIRE of each message."""
    messages = zip(event["queues"], event["offsets"], event["from_offsets"], strict=True)
    own = {"kind": "ACQUIRE", "attempts": [1], "contents": [IN_RECORD]}
    return [
        event | own | {"queue": queue, "offsets": [offset], "from_offset": known} for queue, offset, known in messages
    ]


def _mark(known: bytearray, start: int, end: int) -> None:
    if end > len(known):
        known.extend(bytes(end - len(known)))
    known[start:end] = b"\x01" * (end - start)


_STEPS: dict[str, Callable[[Any, Event], None]] = {
    "ACQUIRE": Fold._acquire,
    "MIXED_ACQUIRE": Fold._mixed_acquire,
    "ACK": Fold._ack,
    "RENEW": Fold._renew,
    "DISPATCH": Fold._renew,
    "RELEASE": Fold._release,
    "REJECT": Fold._reject,
    "DELAY": Fold._delay,
    "DISCARD": Fold._discard,
    "RESCHEDULE": Fold._reschedule,
    "CANCEL": Fold._cancel,
    "RESUME": Fold._resume,
    "PURGE": Fold._purge,
    **dict.fromkeys(FACTS, Fold._fact),
    "TICK": lambda fold, event: fold.tick(event),
}
