"""Whose turn it is: the order of each key, limits of a queue and of its keys, and fairness, as a pure engine.

Messages wait in the line of their key. A message without a key is a key of its own. Ordering is a limit of one message
of each key at a time. A message has its turn until it has ended, it is to be delivered again, or its source is given
up.

A message that only the limit of its key could delay has its turn at once if the key is not at its limit. Otherwise keys
take turns: each :meth:`Turns.take` gives the next message of the key that has waited longest since its last turn, if
neither the key nor the queue is at a limit.

Limits hold without coordination, because a partition has one reader, and each reader takes the share of a queue's
limits that its partitions are of all. Messages that another consumer still has leased keep their turns here. Nothing is
given before all of those that count are known, or in the first interval of a rate: the former reader may have just
begun one.

Rates use the generic cell rate algorithm (ITU-T I.371), so messages begin evenly spaced. Times are monotonic seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import chain, count, islice
from math import inf
from typing import Generic, NamedTuple, TypeVar

from marq.settings.limits import Limits, Rate
from marq.settings.queue import QueueSettings

#: How many keys may have the memory of a rate before those that may begin at once are forgotten.
_MAX_KEYS = 10_000
#: How many messages of a key a former consumer may have begun, if no limit says so, and at most.
_EARLY, _MAX_EARLY = 64, 1_000
_NO_LIMITS = Limits()
#: How long messages of other consumers are awaited after the ends of their leases, in case they can't be read.
_AWAIT_S = 60.0
#: Sums of intervals are not exact.
_ROUNDING_S = 1e-6

#: The messages of a queue in one source.
L = TypeVar("L", bound=Hashable)
#: Bytes, or the offset of a message without a key.
Key = bytes | int
#: The offsets of waiting messages; just the offset of a single one, because a deque takes 0.6 kB.
Line = int | deque[int]


#: How many keys of a source to look at for those that wait: a look at 100,000 would hold up the handlers.
_MAX_BUSY = 10_000


class BusyKey(NamedTuple, Generic[L]):
    """A key with messages that wait for their turns; ``first`` is the offset of the first one."""

    source: L
    key: bytes
    first: int
    waiting: int
    running: int
    at_limit: bool


class Turns(Generic[L]):
    """The waiting messages of one queue, in all sources of one receiver."""

    def __init__(self, settings: QueueSettings, share: float = 1.0) -> None:
        self.lines: dict[L, Lines[L]] = {}
        #: How many messages have their turns.
        self.running = 0
        #: How many may have their turns, with those of other consumers.
        self._free: float = inf
        #: The offset of the message that :meth:`has_next` has found.
        self._next = 0
        self._numbers = count()
        self._now_s = -inf
        #: The keys with waiting messages that are not at a limit, by the time of their last turn.
        self._queue: deque[tuple[Lines[L], Key]] = deque()
        #: Keys whose rate lets their next message begin later.
        self._later: list[tuple[float, int, Lines[L], Key]] = []
        self._pace_s = -inf
        #: Of sources that this receiver may keep, by place: when it began with them, and the rates of their keys.
        self._kept: dict[Hashable, tuple[float, dict[Key, float]]] = {}
        #: Messages that had their turns in sources that were given up, until they end or the sources are known again.
        self._former: dict[Hashable, set[int]] = {}
        #: The places that this receiver has now.
        self._places: Collection[Hashable] = ()
        #: The sources that wait for messages of other consumers.
        self.awaiting: list[Lines[L]] = []
        self.apply(settings, share)

    def apply(self, settings: QueueSettings, share: float) -> None:
        """Apply the settings; the partitions of this receiver are this ``share`` of all."""
        self.limits, self._share = settings.limits or _NO_LIMITS, share
        #: How many may have their turns now, because handlers and calls want them, or a circuit breaker admits them.
        self.wanted = self.admitted = inf
        #: True while no message of the queue may have its turn.
        self.paused = settings.paused
        #: Messages of a key are delivered one after the other, even if one waits for its retry.
        self.strict = settings.ordered
        self.rated = self.limits.rate is not None or self.limits.per_key.rate is not None
        #: How many messages of a key may have their turns.
        self.most_of_key: float = 1 if self.strict else self.limits.per_key.concurrency or inf
        #: True if messages get turns only when handlers and calls want them: the next turn may be a later message's.
        self.sparing = settings.fair or settings.priority is not None or self.rated
        #: True if the receiver reads on while all handlers are busy, because the next turn may be a later message's.
        self.reads_ahead = (settings.fair or settings.priority is not None) and not self.paused
        most = self.limits.concurrency
        self._most = inf if most is None else max(1, int(most * share))
        #: True if each message that another consumer has counts; otherwise only the first one of its key.
        self.counts_others = not self.strict or self._most < inf
        self._pace_s = _capped(self._pace_s, self.limits.rate, self._now_s, share)
        # A higher rate applies at once.
        later, self._later = self._later, []
        for _, _, lines, key in later:
            self._queue.append((lines, key))
        for lines in self.lines.values():
            lines.apply(self._now_s)

    @property
    def most_at_once(self) -> float:
        """How many messages of a key may have their turns as soon as they are read; 0 if something else counts, too."""
        return 0 if self.paused or self.sparing or min(self.admitted, self._most) < inf else self.most_of_key

    def busy_keys(self, now_s: float) -> list[BusyKey[L]]:
        """Return the keys with messages that wait for their turns, of at most some thousands in each source."""
        return [key for lines in self.lines.values() for key in lines.busy_keys(now_s)]

    @property
    def waits(self) -> bool:
        """Whether some keys have to wait for :meth:`take`."""
        return bool(self._queue or self._later or self.awaiting)

    def line(self, source: L, began_s: float, place: Hashable = None) -> Lines[L]:
        """Begin with a source at ``place``, which this receiver has had since ``began_s``."""
        kept = self._kept.get(place)
        self._former.pop(place, None)
        lines = self.lines[source] = Lines(self, source, place, *(kept or (began_s, {})))
        rate = self.limits.rate
        if rate is not None and kept is None:
            burst_s = (rate.burst(self._share) - 1) * rate.interval_s / self._share
            self._pace_s = max(self._pace_s, began_s + rate.interval_s + burst_s)
        return lines

    def give_up(self) -> None:
        """Forget all sources."""
        self._kept |= {lines.place: (lines.began_s, lines.paces_s) for lines in self.lines.values()}
        for lines in self.lines.values():
            self._former.setdefault(lines.place, set()).update(lines.begun)
        self.lines.clear()
        self._queue, self._later, self.awaiting, self.running = deque(), [], [], 0

    def keep(self, places: Collection[Hashable]) -> None:
        """Forget the rates of all places but these, because other receivers begin messages there.

        Those receivers also count the messages that still run here. They count here again once their place is back.
        """
        self._places = frozenset(places)
        self._kept = {place: kept for place, kept in self._kept.items() if place in places}
        self._former = {place: offsets for place, offsets in self._former.items() if offsets}

    def end_former(self, place: Hashable, offsets: Iterable[int]) -> None:
        """Note that messages of a former assignment no longer run."""
        if place in self._former:
            self._former[place].difference_update(offsets)

    def take(self, now_s: float) -> list[tuple[L, int]]:
        """Return the messages that have their turns now, with their sources."""
        self.pass_time(now_s)
        taken: list[tuple[L, int]] = []
        while self.running < self.wanted and self.has_next():
            taken.append(self.take_next())
        return taken

    def pass_time(self, now_s: float) -> None:
        """Let the keys whose rates allow it by now take turns."""
        self._now_s = now_s
        for lines in [lines for lines in self.awaiting if not lines.awaited or now_s >= lines.awaited_until_s]:
            self.awaiting.remove(lines)
            # Those that are not known by now can't be read.
            lines.awaited.clear()
            lines.offer_all()
        awaited = sum([len(offsets) for place, offsets in self._former.items() if place in self._places])
        # Those that are awaited count for the queue, too.
        awaited += sum([len(lines.awaited) for lines in self.awaiting])
        self._free = min(self._most - awaited, self.admitted)
        while self._later and self._later[0][0] <= now_s:
            _, _, lines, key = heapq.heappop(self._later)
            self._queue.append((lines, key))

    def has_next(self) -> bool:
        """Return whether a message may have its turn at the time that has passed, if handlers want it."""
        if self.limits.rate is not None and self._now_s < self._may_begin_s:
            return False
        rated = self.limits.per_key.rate is not None
        while self._queue and self.running < self._free:
            lines, key = self._queue[0]
            if (offset := lines.next_of(key)) is None or lines.is_full(key):
                self._queue.popleft()
                lines.queued.discard(key)
            elif rated and (begins_s := lines.begins_s(key)) > self._now_s:
                self._queue.popleft()
                heapq.heappush(self._later, (begins_s, next(self._numbers), lines, key))
            else:
                self._next = offset
                return True
        return False

    def take_next(self) -> tuple[L, int]:
        """Give the next message its turn, after :meth:`has_next`; return its source and its offset."""
        lines, key = self._queue.popleft()
        if lines.begin(key, self._next, self._now_s):
            self._queue.append((lines, key))
        else:
            lines.queued.discard(key)
        if self.limits.rate is not None:
            self._pace_s = max(self._pace_s, self._now_s) + self.limits.rate.interval_s / self._share
        return lines.source, self._next

    @property
    def next_s(self) -> float:
        """When to call :meth:`take` at the latest, if nothing else happens."""
        times = [lines.awaited_until_s for lines in self.awaiting]
        if self._later:
            times.append(self._later[0][0])
        # Other waits, for the end of a message or for handlers, end with an event.
        if self._queue and self._may_begin_s > self._now_s:
            times.append(self._may_begin_s)
        return min(times, default=inf)

    @property
    def _may_begin_s(self) -> float:
        rate = self.limits.rate
        return -inf if rate is None else _begins_s(rate, self._pace_s, self._share)

    def offer(self, lines: Lines[L], keys: Iterable[Key]) -> None:
        """Give keys their next turns after those of all others that wait."""
        if lines.awaited:
            return
        new = [key for key in dict.fromkeys(keys) if key not in lines.queued]
        lines.queued.update(new)
        self._queue.extend([(lines, key) for key in new])


class Lines(Generic[L]):
    """The messages of one source, in a line for each key."""

    def __init__(self, turns: Turns[L], source: L, place: Hashable, began_s: float, paces_s: dict[Key, float]) -> None:
        self.turns, self.source, self.place, self.began_s = turns, source, place, began_s
        #: The key of each message.
        self._keys: dict[int, Key] = {}
        #: The messages of each key that wait for their first turn here, and those that are to be delivered again.
        self._lines: dict[Key, Line] = {}
        self._again: dict[Key, Line] = {}
        #: Keys whose last turn was that of a message that was delivered again: the next one is another's.
        self._repeated: set[Key] = set()
        #: The messages that have their turns, and how many of each key.
        self.begun: set[int] = set()
        self._running: dict[Key, int] = {}
        #: The rates of keys that had a turn lately, and at how many of them the others are forgotten.
        self.paces_s = paces_s
        self._most_paces = max(_MAX_KEYS, 2 * len(paces_s))
        #: The keys that :class:`Turns` has queued.
        self.queued: set[Key] = set()
        #: Messages that other consumers have leased, and whose keys are not known yet; and until when to wait for them.
        self.awaited: set[int] = set()
        self.awaited_until_s = inf
        #: Messages that wait for a delay; with ordering, no other message of their keys has its turn meanwhile.
        self._parked: set[int] = set()
        self._stopped: set[Key] = set()

    def apply(self, now_s: float) -> None:
        """Offer the keys that changed limits may no longer hold back."""
        rate = self.turns.limits.per_key.rate
        self.paces_s = {key: _capped(pace_s, rate, now_s) for key, pace_s in self.paces_s.items() if rate is not None}
        self.offer_all()

    def offer_all(self) -> None:
        """Offer all keys with waiting messages."""
        self.turns.offer(self, [*self._lines, *self._again])

    @property
    def _most_at_once(self) -> float:
        """How many messages of a key may have their turns at once; 0 if something else counts, too."""
        return 0 if self.awaited else self.turns.most_at_once

    def add(self, offsets: Iterable[int], keys: Iterable[bytes | None], *, known: bool = False) -> list[int]:
        """Let messages wait in the lines of their keys; return those that have their turns at once.

        Those are messages that only the limit of their key could delay, and does not. If some of the messages are
        ``known`` already, all wait: another consumer may have their turns.
        """
        of, lines, running, again, stopped = self._keys, self._lines, self._running, self._again, self._stopped
        most = 0 if known else self._most_at_once
        begun, waiting = list[int](), list[Key]()
        for offset, its_key in zip(offsets, keys, strict=True):
            key = of[offset] = offset if its_key is None else its_key
            is_next = key not in lines and key not in again and key not in stopped
            if is_next and (others := running.get(key, 0)) < most:
                running[key] = others + 1
                begun.append(offset)
            else:
                _append(lines, key, offset)
                waiting.append(key)
        self.begun.update(begun)
        self.turns.running += len(begun)
        if not most:
            self.turns.offer(self, waiting)
        return begun

    def remove(self, offsets: Iterable[int]) -> list[int]:
        """Remove messages that have ended; return those that have their turns instead at once."""
        of, lines, begun, most = self._keys, self._lines, self.begun, self._most_at_once
        following = list[int]()
        for offset in offsets:
            key = of.pop(offset, None)
            if key is None:
                continue
            # The limit may be lower now than when these began.
            may_follow = key in lines and offset in begun and key not in self._again and self._running[key] <= most
            if may_follow and (first := self._first(lines, key)) is not None:
                _drop_first(lines, key)
                begun.remove(offset)
                begun.add(first)
                self._repeated.discard(key)
                following.append(first)
                continue
            if self._parked:
                self._unpark(offset, key)
            self._end(offset, key)
        return following

    def is_first(self, offset: int) -> bool:
        """Return whether a message has its turn."""
        return offset in self.begun

    def is_early(self, offset: int) -> bool:
        """Return whether a message is one of the first of its key, which a former consumer may have begun."""
        key = self._keys[offset]
        # With ordering, an earlier message that waits for its next attempt is still the first one.
        if self.turns.strict and (key in self._running or key in self._stopped or key in self._again):
            return offset in self.begun
        return offset in islice(_line(self._lines, key), self._most_early)

    def may_run(self, offset: int) -> bool:
        """Return whether a former consumer, which has leased a message, may have begun it.

        It began messages of a key in order, so those that it had not begun are behind the others. With ordering, only
        the first message of a key can run, even if it is not leased.
        """
        if self.turns.strict:
            return self.is_early(offset)
        return self._running.get(self._keys[offset], 0) < self._most_early

    @property
    def _most_early(self) -> int:
        limits = self.turns.limits
        return 1 if self.turns.strict else min(limits.per_key.concurrency or limits.concurrency or _EARLY, _MAX_EARLY)

    def wait_for(self, offsets: Collection[int], until_s: float) -> None:
        """Give no turns until these messages, which other consumers have leased until then, are known."""
        if offsets and self.turns.counts_others:
            self.awaited.update(offsets)
            # Their handlers may renew the leases.
            self.awaited_until_s = until_s + _AWAIT_S
            self.turns.awaiting.append(self)

    def known_to(self, end: int) -> None:
        """Note that all records before this offset were read: awaited ones that are not here are gone."""
        self.awaited = {offset for offset in self.awaited if offset >= end}

    def occupy(self, offset: int) -> None:
        """Note that another consumer has leased a message: it has its turn, unless it seems to wait there."""
        self.awaited.discard(offset)
        if offset not in self.begun and (offset in self._parked or self.may_run(offset)):
            key = self._keys[offset]
            self._unpark(offset, key)
            self._begin(key, offset)

    def is_parked(self, offset: int) -> bool:
        """Return whether a message waits for a delay."""
        return offset in self._parked

    def park(self, offset: int) -> None:
        """Take the turn away from a message that waits for a delay, or for its next turn.

        With ordering, do nothing if an earlier message of its key is open: this one has to wait for it first.
        """
        key = self._keys[offset]
        if self.turns.strict:
            if offset not in self._parked and not self.is_early(offset):
                return
            self._stopped.add(key)
        self._parked.add(offset)
        self._end(offset, key)

    def rejoin(self, offset: int) -> bool:
        """Let a parked message wait for its next turn, and return whether it has it at once.

        Keys take turns between such messages and new ones, or one that fails again and again would hold up its key.
        With ordering, it comes first.
        """
        key = self._keys[offset]
        self._unpark(offset, key)
        is_next = key not in self._again and (self.turns.strict or key not in self._lines)
        if is_next and self._running.get(key, 0) < self._most_at_once:
            self._begin(key, offset)
            return True
        _append(self._again, key, offset)
        self.turns.offer(self, [key])
        return False

    def _unpark(self, offset: int, key: Key) -> None:
        if offset in self._parked:
            self._parked.discard(offset)
            self._stopped.discard(key)

    def busy_keys(self, now_s: float) -> Iterator[BusyKey[L]]:
        keys: Iterator[bytes] = (key for key in chain(self._again, self._lines) if isinstance(key, bytes))
        for key in set(islice(keys, _MAX_BUSY)):
            if (first := self.next_of(key)) is not None:
                waiting = len(_line(self._lines, key)) + len(_line(self._again, key))
                at_limit = self.is_full(key) or self.begins_s(key) > now_s
                yield BusyKey(self.source, key, first, waiting, self._running.get(key, 0), at_limit)

    # --- for Turns ----------------------------------------------------------------------------------------------------

    def next_of(self, key: Key) -> int | None:
        """Return the next message of a key."""
        if not self._again:
            return self._first(self._lines, key)
        again, new = self._first(self._again, key), self._first(self._lines, key)
        if again is None or (new is not None and key in self._repeated and not self.turns.strict):
            return new
        return again

    def _first(self, lines: dict[Key, Line], key: Key) -> int | None:
        """Return the first message of a line; forget those that have ended, have their turns, or wait elsewhere."""
        while (line := lines.get(key)) is not None:
            offset = line if isinstance(line, int) else line[0]
            if offset in self._keys and offset not in self.begun and offset not in self._parked:
                return offset
            _drop_first(lines, key)
        return None

    def is_full(self, key: Key) -> bool:
        """Return whether as many messages of a key run as may."""
        return self._running.get(key, 0) >= self.turns.most_of_key or key in self._stopped

    def begins_s(self, key: Key) -> float:
        """Return when the next message of a key may begin."""
        rate = self.turns.limits.per_key.rate
        if rate is None or isinstance(key, int):
            return -inf
        return _begins_s(rate, self.paces_s.get(key, _first_s(rate, self.began_s)))

    def begin(self, key: Key, offset: int, now_s: float) -> bool:
        """Give the next message of a key its turn; return whether others of the key may wait."""
        if self._again and self._first(self._again, key) == offset:
            _drop_first(self._again, key)
            self._repeated.add(key)
        else:
            _drop_first(self._lines, key)
            self._repeated.discard(key)
        more = key in self._lines or key in self._again
        self._begin(key, offset)
        rate = self.turns.limits.per_key.rate
        if rate is not None and not isinstance(key, int):
            if len(self.paces_s) >= self._most_paces:
                self.paces_s = {other: pace_s for other, pace_s in self.paces_s.items() if pace_s > now_s}
                self._most_paces = max(_MAX_KEYS, 2 * len(self.paces_s))
            pace_s = self.paces_s.get(key, _first_s(rate, self.began_s))
            self.paces_s[key] = max(pace_s, now_s) + rate.interval_s
        return more

    def _begin(self, key: Key, offset: int) -> None:
        self.begun.add(offset)
        self._running[key] = self._running.get(key, 0) + 1
        self.turns.running += 1

    def _end(self, offset: int, key: Key) -> None:
        if offset in self.begun:
            self.begun.remove(offset)
            self.turns.running -= 1
            if left := self._running.pop(key) - 1:
                self._running[key] = left
        if (key in self._lines or key in self._again) and self.next_of(key) is not None:
            self.turns.offer(self, [key])
        elif self._repeated:
            self._repeated.discard(key)


def _append(lines: dict[Key, Line], key: Key, offset: int) -> None:
    line = lines.get(key)
    if line is None:
        lines[key] = offset
    elif isinstance(line, int):
        lines[key] = deque((line, offset))
    else:
        line.append(offset)


def _drop_first(lines: dict[Key, Line], key: Key) -> None:
    line = lines[key]
    if isinstance(line, int) or len(line) == 1:
        del lines[key]
    else:
        line.popleft()


def _line(lines: dict[Key, Line], key: Key) -> Collection[int]:
    line = lines.get(key, ())
    return (line,) if isinstance(line, int) else line


def _begins_s(rate: Rate, pace_s: float, share: float = 1.0) -> float:
    """Return when the next message may begin, given when the rate would let it begin without bursts."""
    return pace_s - (rate.burst(share) - 1) * rate.interval_s / share - _ROUNDING_S


def _first_s(rate: Rate, now_s: float) -> float:
    """Return the pace of a key after another consumer may have used all of its rate up to now."""
    return now_s + rate.burst() * rate.interval_s


def _capped(pace_s: float, rate: Rate | None, now_s: float, share: float = 1.0) -> float:
    """Return a pace of a former rate, as late as this one allows."""
    if rate is None:
        return -inf
    # Before the first take, no message has begun here.
    return pace_s if now_s == -inf else min(pace_s, now_s + rate.burst(share) * rate.interval_s / share)
