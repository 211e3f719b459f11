"""The waiting records of a partition: those that no consumer has acquired.

A record is identified by its offset and the queue that its key names. The lease book of its markers partition knows the
acquired ranges (:mod:`marq.core.storage.acquired_ranges`). So a record stops waiting with its ACQUIRE, not with a
commit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.kafka.records import Records
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name

#: Queue names to track per partition; senders can write any key.
MAX_QUEUES = 50_000
#: Size of an array of offsets; it becomes a range if its offsets are consecutive.
_FULL = 4_096
#: Shorter runs do not get a range of their own.
_LEAST_OF_RUN = 64
#: Precision of send times.
_TIME_STEP_MS = 1_000
#: Send times to keep per partition: one a second for a day.
_MAX_TIMES = 100_000


class Offsets:
    """Ascending offsets that are removed from the front: 8 bytes each, and almost nothing for consecutive ones."""

    __slots__ = ("_count", "_front", "_pieces")

    def __init__(self) -> None:
        self._pieces: deque[range | array[int]] = deque()
        #: Dropped offsets of the first piece.
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
        """Append ascending offsets above all others."""
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
        pieces = self._pieces
        while pieces and pieces[0][-1] < offset:
            self._count -= len(pieces.popleft()) - self._front
            self._front = 0
        if pieces:
            front = bisect_left(pieces[0], offset, lo=self._front)
            self._count -= front - self._front
            self._front = front

    def between(self, start: int, end: int) -> int:
        """Return the number of offsets in a range."""
        return sum(
            max(0, bisect_left(piece, end) - max(bisect_left(piece, start), self._front if number == 0 else 0))
            for number, piece in enumerate(self._pieces)
        )


class _Times:
    """Send times of a partition's records, to a second.

    If senders' clocks differ by more, each change is kept; if there are too many, every second one.
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


class WaitingRecords:
    """The waiting records of one source; ``owners``: the queues that name its topic, none for the messages topic.

    ``purged_to`` returns the offset up to which a queue's records that were sent until a time are purged, 0 if none
    are; ``defined`` tells whether a queue is defined.
    """

    def __init__(
        self,
        marks: Callable[[str], AcquiredRanges | None],
        owners: Sequence[str] = (),
        purged_to: Callable[[str, int], int] = lambda _queue, _sent_ms: 0,
        defined: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._marks = marks
        self._owners = owners
        self._purged_to = purged_to
        self._defined = defined
        self._queues: dict[str, Offsets] = {}
        self._times = _Times()
        self._names: dict[bytes, str] = {}
        #: Records whose key names no queue, or an unknown one beyond MAX_QUEUES.
        self.unknown = 0
        #: True if there are too many names: some unknown queues are not counted.
        self.crowded = False

    def __len__(self) -> int:
        """Return the number of queues that have waiting records, or had at their last count."""
        return len(self._queues)

    def add(self, records: Records) -> dict[str, int]:
        """Add the next records of the source; return how many each queue has."""
        self._times.note(records)
        by_queue = self._of_queues(records)
        for queue, offsets in by_queue.items():
            self._keep(queue, offsets)
        return {queue: len(offsets) for queue, offsets in by_queue.items()}

    def count(self, queue: str) -> int:
        """Return how many records of a queue wait, and forget those acquired meanwhile."""
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
        """Return when the first waiting record of a queue was sent, in ms since the epoch; None if none waits."""
        offsets = self._queues.get(queue)
        return self._times.of(offsets.first) if offsets else None

    def queues(self) -> list[str]:
        """Return the queues that have waiting records, or had at their last count."""
        return list(self._queues)

    def first(self, position: int) -> int:
        """Return the offset of the first waiting record, else ``position``, the next offset to read."""
        first = min((offsets.first for offsets in self._queues.values()), default=position)
        self._times.drop_before(first)
        return first

    def forget(self) -> None:
        """Forget all records, because the topic was recreated."""
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
        if self._owners:
            return dict.fromkeys(self._owners, offsets)
        first = keys[0]
        by_key: dict[bytes | None, Sequence[int]] = {}
        if keys.count(first) == len(keys):
            by_key[first] = offsets
        else:
            lists: defaultdict[bytes | None, list[int]] = defaultdict(list)
            for offset, key in zip(offsets, keys, strict=True):
                lists[key].append(offset)
            by_key.update(lists)
        by_queue: dict[str, Sequence[int]] = {}
        for key, matching in by_key.items():
            queue = self._name(key)
            if queue is None:
                self.unknown += len(matching)
            else:
                by_queue[queue] = matching
        return by_queue

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
        """Drop acquired records before the first waiting one, and purged records.

        Each consumer that starts leaves a gap between its ranges and those of the previous one, with records of other
        queues. Nothing in it is ever acquired, so acquired records after it would be kept forever.
        """
        marks = self._marks(queue)
        while marks is not None and offsets and (free := marks.first_free(offsets.first)) > offsets.first:
            offsets.drop_before(free)
        # Consumers skip purged records, even if their markers are missing.
        if offsets and (end := self._purged_to(queue, self._times.of(offsets.first))) > offsets.first:
            offsets.drop_before(end)

    def _name(self, key: bytes | None) -> str | None:
        if not key:
            return None
        queue = self._names.get(key)
        if queue is not None or (queue := _queue_of(key)) is None:
            return queue
        if len(self._names) >= MAX_QUEUES and not self._defined(queue) and self._marks(queue) is None:
            self.crowded = True
            return None
        self._names[key] = queue
        return queue


def _queue_of(key: bytes) -> str | None:
    try:
        queue = key.decode()
        check_queue_name(queue)
    except (UnicodeDecodeError, ConfigError):
        return None
    return queue
