"""The queues that a reader serves, their records, and the payloads that ACQUIREs left in records.

A queue's messages are the records of the shared messages topic with its name as key, and all records of the queue's own
topic, if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from marq.core.storage.table_image import Place
from marq.kafka.records import Records
from marq.settings.placements import Partitions, union
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Payload, Source
from marq.wire.names import Names, log_name
from marq.wire.record_headers import origin

#: Up to this many queues, one pass for each is faster than one pass that sorts.
_FEW = 4


@dataclass(frozen=True)
class Serving:
    """``messages`` is the shared topic, ``partitions`` its partitions in which these queues may have records.

    ``own_topics`` has the topics that queues name. None of the queues has changed its group after the record at
    ``changed_at`` of the queues topic. ``skipped`` returns which records of a queue are not delivered. ``ordered`` says
    that one of the queues has ordering or limits, so only committed records are read.
    """

    messages: str
    queues: tuple[str, ...]
    own_topics: Mapping[str, str] = field(default_factory=dict)
    partitions: Partitions = None
    changed_at: int = field(default=-1, compare=False)
    skipped: Callable[[str], SkippedRecords | None] = field(default=lambda _: None, repr=False, compare=False)
    ordered: bool = False
    _keys: Mapping[bytes, str] = field(init=False, repr=False, compare=False)
    _owners: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keys", {queue.encode(): queue for queue in self.queues})
        object.__setattr__(self, "_owners", {topic: queue for queue, topic in self.own_topics.items()})

    @property
    def topics(self) -> list[str]:
        """All topics to read."""
        return [self.messages, *sorted(self._owners)]

    @property
    def reads(self) -> Mapping[str, tuple[int, ...]]:
        """The partitions to read, for each topic of which only some are read."""
        return {} if self.partitions is None else {self.messages: self.partitions}

    def is_own(self, topic: str) -> bool:
        """Return whether a topic belongs to a queue."""
        return log_name(topic) in self._owners

    def queues_in(self, topic: str) -> Sequence[str]:
        """Return the queues that may have records in a topic."""
        owner = self._owners.get(log_name(topic))
        return self.queues if owner is None else (owner,)

    def own(self, source: Source, read: Records) -> Iterator[tuple[str, Records]]:
        """Yield the records of each queue among those of one partition, without the headers of copied records."""
        owner = self._owners.get(log_name(source.topic))
        # Here, because all that follows reads them: attempts, markers, and the redeliveries made from these.
        read = read.without_copied_headers(own_topic=owner is not None)
        if owner is not None:
            yield owner, read
            return
        if len(self._keys) > _FEW:
            yield from self._sorted(read)
            return
        for key, queue in self._keys.items():
            count = read.keys.count(key)
            if count == len(read):
                yield queue, read
            elif count:
                yield queue, read.at([index for index, other in enumerate(read.keys) if other == key])

    def _sorted(self, read: Records) -> Iterator[tuple[str, Records]]:
        by_key: dict[bytes | None, list[int]] = {}
        for index, key in enumerate(read.keys):
            by_key.setdefault(key, []).append(index)
        for key, indexes in by_key.items():
            queue = self._keys.get(key)  # type: ignore[arg-type]
            if queue is not None:
                yield queue, read.at(indexes)

    def count(self, source: Source, read: Records) -> int:
        """Return the number of records that belong to served queues."""
        if self.is_own(source.topic):
            return len(read)
        return sum(map(self._keys.__contains__, read.keys))

    def end(self, source: Source, read: Records, room: int) -> int:
        """Return the index of the first record of served queues beyond ``room`` of them."""
        if self.is_own(source.topic):
            return min(room, len(read))
        keys = self._keys
        ours = [index for index, key in enumerate(read.keys) if key in keys]
        return ours[room] if room < len(ours) else len(read)

    def queue_of(self, topic: str, key: bytes | None) -> str | None:
        """Return the served queue that a record belongs to, or None."""
        owner = self._owners.get(log_name(topic))
        return owner if owner is not None or key is None else self._keys.get(key)


def serving(
    messages: str,
    queues: Iterable[str],
    own_topics: Mapping[str, str | None],
    reads: Mapping[str, Partitions] | None = None,
    changed_at: int = -1,
    skipped: Callable[[str], SkippedRecords | None] = lambda _: None,
    *,
    ordered: bool = False,
) -> Serving:
    """Return the serving of queues; ``own_topics`` may have None for a queue without a topic.

    ``reads`` has the partitions of the shared topic for each queue; a queue missing there is read in all.
    """
    names = tuple(sorted(queues))
    own = {queue: topic for queue in names if (topic := own_topics.get(queue))}
    partitions = union((reads or {}).get(queue) for queue in names) if names else None
    return Serving(messages, names, own, partitions, changed_at, skipped, ordered)


def payloads_in(
    names: Names, source: Source, read: Records, left: Mapping[Place, Payload]
) -> Iterable[tuple[Place, Payload]]:
    """Yield the messages in ``left`` whose records are among those in ``read``, with their payloads, for a tracker.

    All messages in ``left`` are from this source. A record with another key or timestamp belongs to another topic of
    this name, which was deleted.
    """
    own_topic = names.is_senders_topic(source.topic)
    offsets: dict[int, list[Place]] = {}
    for place in left:
        offsets.setdefault(place.offset, []).append(place)
    wanted = [index for index, offset in enumerate(read.offsets) if offset in offsets]
    read = read.at(wanted).without_copied_headers(own_topic=own_topic).with_fitting_headers()
    for record in read:
        for place in offsets[record.offset]:
            if record.timestamp == left[place].timestamp_ms and (own_topic or record.key == place.queue.encode()):
                attempt = origin(source, record.offset, record.timestamp, record.headers).attempt
                yield place, Payload(record.timestamp, attempt, record.key, record.headers, record.value)
