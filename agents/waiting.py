"""Which records of a partition wait: those of a queue that no consumer has acquired yet.

A record is known by its offset and the queue that its key names. Acquired is what the lease book of its markers
partition has marks of (:mod:`marq.core.marks`), so a record stops waiting with its ACQUIRE, not with a commit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from marq.core.errors import ConfigError
from marq.core.marks import Marks
from marq.core.names import check_queue_name
from marq.records import Records

#: Names of queues that are kept apart in a partition; anybody who may send can write any key.
MAX_QUEUES = 50_000
#: Offsets of an array; it becomes a range when they turn out to be one.
_FULL = 4_096
#: A shorter run is no range of its own.
_LEAST_OF_RUN = 64
#: How exactly it is known when a record was sent.
_TIME_STEP_MS = 1_000
#: Times that are kept of a partition: those of a day, one a second.
_MAX_TIMES = 100_000


class Offsets:
    """Ascending offsets, of which those at the front can be dropped: 8 bytes each, and runs of them nothing."""

    __slots__ = ("_count", "_front", "_pieces")

    def __init__(self) -> None:
        self._pieces: deque[range | array[int]] = deque()
        #: How many of the first piece are dropped.
        self._front = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for number, piece in enumerate(self._pieces):
            yield from piece[self._front :] if number == 0 else piece

    @property
    def first(self) -> int:
        """The lowest offset; there must be one."""
        return self._pieces[0][self._front]

    @property
    def last(self) -> int:
        """The highest offset; there must be one."""
        return self._pieces[-1][-1]

    def extend(self, offsets: Sequence[int]) -> None:
        """Add offsets, ascending and above all that are there."""
        first, count = offsets[0], len(offsets)
        run = offsets[-1] - first == count - 1
        self._count += count
        pieces = self._pieces
        last = pieces[-1] if pieces else range(0)
        if not isinstance(last, range) and len(last) >= _FULL and last[-1] - last[0] == len(last) - 1:
            pieces[-1] = last = range(last[0], last[-1] + 1)
        if run and isinstance(last, range) and last and first == last.stop:
            pieces[-1] = range(last.start, first + count)
        elif run and count >= _LEAST_OF_RUN:
            pieces.append(range(first, first + count))
        elif isinstance(last, range) or len(last) >= _FULL:
            pieces.append(array("Q", offsets))
        else:
            last.extend(offsets)

    def drop_before(self, offset: int) -> None:
        """Drop what is below an offset."""
        pieces = self._pieces
        while pieces and pieces[0][-1] < offset:
            self._count -= len(pieces.popleft()) - self._front
            self._front = 0
        if pieces:
            front = bisect_left(pieces[0], offset, lo=self._front)
            self._count -= front - self._front
            self._front = front

    def between(self, start: int, end: int) -> int:
        """Return how many are in a range."""
        return sum(
            max(0, bisect_left(piece, end) - max(bisect_left(piece, start), self._front if number == 0 else 0))
            for number, piece in enumerate(self._pieces)
        )


class _Times:
    """When the records of a partition were sent, to a second.

    Where clocks of senders differ by more, each change is kept; of very many, every second one.
    """

    def __init__(self) -> None:
        self._offsets, self._times_ms = array("Q"), array("q")

    def note(self, records: Records) -> None:
        last_ms = self._times_ms[-1] if self._times_ms else None
        times = records.timestamps
        if last_ms is not None and abs(times[0] - last_ms) < _TIME_STEP_MS and abs(times[-1] - last_ms) < _TIME_STEP_MS:
            return
        for offset, sent_ms in zip(records.offsets, times, strict=True):
            if last_ms is None or abs(sent_ms - last_ms) >= _TIME_STEP_MS:
                self._offsets.append(offset)
                self._times_ms.append(sent_ms)
                last_ms = sent_ms
        if len(self._offsets) > _MAX_TIMES:
            del self._offsets[1::2], self._times_ms[1::2]

    def drop_before(self, offset: int) -> None:
        gone = bisect_right(self._offsets, offset) - 1
        if gone > 0:
            del self._offsets[:gone], self._times_ms[:gone]

    def of(self, offset: int) -> int:
        return self._times_ms[max(0, bisect_right(self._offsets, offset) - 1)]


class Waiting:
    """The records of one source that wait; ``owner``: the queue of all of them, where the topic is a queue's own.

    ``purged_to`` says of a queue up to where its records that were sent until a time are purged, 0 for none;
    ``defined``: whether somebody has said that there is such a queue.
    """

    def __init__(
        self,
        marks: Callable[[str], Marks | None],
        owner: str | None = None,
        purged_to: Callable[[str, int], int] = lambda _queue, _sent_ms: 0,
        defined: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._marks = marks
        self._owner = owner
        self._purged_to = purged_to
        self._defined = defined
        self._queues: dict[str, Offsets] = {}
        self._times = _Times()
        self._names: dict[bytes, str] = {}
        #: Records whose key names no queue, or one too many.
        self.strangers = 0
        #: Whether names were too many: of those that nobody defined or read, not all are counted.
        self.crowded = False

    def __len__(self) -> int:
        """How many queues have something here, or had when they were last looked at."""
        return len(self._queues)

    def add(self, records: Records) -> dict[str, int]:
        """Take the next records of the source; return how many of them each queue has."""
        self._times.note(records)
        found = self._of_queues(records)
        for queue, offsets in found.items():
            self._keep(queue, offsets)
        return {queue: len(offsets) for queue, offsets in found.items()}

    def count(self, queue: str) -> int:
        """Return how many records of a queue wait; what has been acquired meanwhile is forgotten."""
        offsets = self._queues.get(queue)
        if offsets is None:
            return 0
        self._drop_acquired(queue, offsets)
        if not offsets:
            del self._queues[queue]
            return 0
        marks = self._marks(queue)
        if marks is None:
            return len(offsets)
        return len(offsets) - sum(
            offsets.between(start, end) for start, end in marks.within(offsets.first, offsets.last + 1)
        )

    def oldest_ms(self, queue: str) -> int | None:
        """Return when the first record of a queue that waits was sent, in ms since the epoch; None: none does."""
        offsets = self._queues.get(queue)
        return self._times.of(offsets.first) if offsets else None

    def queues(self) -> list[str]:
        """Return the queues of which something waits, or did when they were last counted."""
        return list(self._queues)

    def first(self, position: int) -> int:
        """Return from where on all that waits stands; ``position``: nothing more has been read."""
        found = min((offsets.first for offsets in self._queues.values()), default=position)
        self._times.drop_before(found)
        return found

    def forget(self) -> None:
        """Forget all records, as of a topic that was made anew."""
        self._queues.clear()
        self._times = _Times()

    def drop_before(self, offset: int) -> None:
        """Forget records that the broker no longer has."""
        for queue, offsets in list(self._queues.items()):
            offsets.drop_before(offset)
            if not offsets:
                del self._queues[queue]

    def _of_queues(self, records: Records) -> dict[str, Sequence[int]]:
        keys, offsets = records.keys, records.offsets
        if self._owner is not None:
            return {self._owner: offsets}
        first = keys[0]
        by_key: dict[bytes | None, Sequence[int]] = {}
        if keys.count(first) == len(keys):
            by_key[first] = offsets
        else:
            lists: defaultdict[bytes | None, list[int]] = defaultdict(list)
            for offset, key in zip(offsets, keys, strict=True):
                lists[key].append(offset)
            by_key.update(lists)
        found: dict[str, Sequence[int]] = {}
        for key, read in by_key.items():
            queue = self._name(key)
            if queue is None:
                self.strangers += len(read)
            else:
                found[queue] = read
        return found

    def _keep(self, queue: str, offsets: Sequence[int]) -> None:
        marks = self._marks(queue)
        if marks is not None and offsets[0] < marks.end:
            offsets = offsets[bisect_left(offsets, marks.first_free(offsets[0])) :]
            for start, end in marks.within(offsets[0], offsets[-1] + 1) if offsets else ():
                low, high = bisect_left(offsets, start), bisect_left(offsets, end)
                offsets = [*offsets[:low], *offsets[high:]]
            if not offsets:
                return
        kept = self._queues.get(queue)
        if kept is None:
            kept = self._queues[queue] = Offsets()
        kept.extend(offsets)

    def _drop_acquired(self, queue: str, offsets: Offsets) -> None:
        """Drop what was acquired before the first that waits, and what is purged.

        Each consumer that starts leaves a gap between its marks and those of the one before it, where records of other
        queues stand. Nothing in them is ever acquired, and what was acquired behind them would be kept for ever.
        """
        marks = self._marks(queue)
        while marks is not None and offsets and (free := marks.first_free(offsets.first)) > offsets.first:
            offsets.drop_before(free)
        # Consumers pass over what is purged, also where its markers are missing.
        if offsets and (end := self._purged_to(queue, self._times.of(offsets.first))) > offsets.first:
            offsets.drop_before(end)

    def _name(self, key: bytes | None) -> str | None:
        if not key:
            return None
        found = self._names.get(key)
        if found is not None or (found := _queue_of(key)) is None:
            return found
        if len(self._names) >= MAX_QUEUES and not self._defined(found) and self._marks(found) is None:
            self.crowded = True
            return None
        self._names[key] = found
        return found


def _queue_of(key: bytes) -> str | None:
    try:
        queue = key.decode()
        check_queue_name(queue)
    except (UnicodeDecodeError, ConfigError):
        return None
    return queue
