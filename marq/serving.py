"""Which queues a reader serves, and where their records are.

A queue's messages are the records of the installation's messages topic that have its name as key, and, if it has a
topic of its own, all records of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from marq.core.markers import Source
from marq.core.spread import Partitions, union
from marq.records import Records

#: Up to so many queues one pass for each is quicker than one pass that sorts.
_FEW = 4


@dataclass(frozen=True)
class Serving:
    """``messages`` is the shared topic; ``own_topics`` has the topic of each queue that has one of its own.

    ``partitions``: of the shared topic, those in which some of the queues may have records.
    """

    messages: str
    queues: tuple[str, ...]
    own_topics: Mapping[str, str] = field(default_factory=dict)
    partitions: Partitions = None
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
        """Of each topic of which not all partitions are to be read, those that are."""
        return {} if self.partitions is None else {self.messages: self.partitions}

    def is_own(self, topic: str) -> bool:
        """Whether a topic is a queue's own."""
        return topic in self._owners

    def queues_in(self, topic: str) -> Sequence[str]:
        """Return the queues that may have records in a topic."""
        owner = self._owners.get(topic)
        return self.queues if owner is None else (owner,)

    def own(self, source: Source, read: Records) -> Iterator[tuple[str, Records]]:
        """Return what belongs to each queue that has something among the records of one partition."""
        owner = self._owners.get(source.topic)
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
                yield queue, read.at([place for place, each in enumerate(read.keys) if each == key])

    def _sorted(self, read: Records) -> Iterator[tuple[str, Records]]:
        found: dict[bytes | None, list[int]] = {}
        for place, key in enumerate(read.keys):
            found.setdefault(key, []).append(place)
        for key, places in found.items():
            queue = self._keys.get(key)  # type: ignore[arg-type]
            if queue is not None:
                yield queue, read.at(places)

    def count(self, source: Source, read: Records) -> int:
        """Return how many records of one partition belong to queues that are served."""
        if source.topic in self._owners:
            return len(read)
        return sum(map(self._keys.__contains__, read.keys))

    def end(self, source: Source, read: Records, room: int) -> int:
        """Return the place of the first record of ours for which there is no room."""
        if source.topic in self._owners:
            return min(room, len(read))
        keys = self._keys
        ours = [place for place, key in enumerate(read.keys) if key in keys]
        return ours[room] if room < len(ours) else len(read)

    def queue_of(self, topic: str, key: bytes | None) -> str | None:
        """Return whose record it is, None for nobody's that is served."""
        owner = self._owners.get(topic)
        return owner if owner is not None or key is None else self._keys.get(key)


def serving(
    messages: str,
    queues: Iterable[str],
    own_topics: Mapping[str, str | None],
    reads: Mapping[str, Partitions] | None = None,
) -> Serving:
    """Return the serving of queues; ``own_topics`` may name None for a queue without a topic of its own.

    ``reads`` are the partitions of the shared topic that each queue is read in; a queue that is missing is in all.
    """
    names = tuple(sorted(queues))
    own = {queue: topic for queue in names if (topic := own_topics.get(queue))}
    return Serving(messages, names, own, union((reads or {}).get(queue) for queue in names) if names else None)
