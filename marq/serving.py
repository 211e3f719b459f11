"""Which queues a reader serves, and where their records are.

A queue's messages are the records of the installation's messages topic that have its name as key, and, if it has a
topic of its own, all records of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from marq.core.markers import Source
from marq.message import Record

#: Up to so many queues one pass for each is quicker than one pass that sorts.
_FEW = 4


@dataclass(frozen=True)
class Serving:
    """``messages`` is the shared topic; ``own_topics`` has the topic of each queue that has one of its own."""

    messages: str
    queues: tuple[str, ...]
    own_topics: Mapping[str, str] = field(default_factory=dict)
    _keys: Mapping[bytes, str] = field(init=False, repr=False, compare=False)
    _owners: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keys", {queue.encode(): queue for queue in self.queues})
        object.__setattr__(self, "_owners", {topic: queue for queue, topic in self.own_topics.items()})

    @property
    def topics(self) -> list[str]:
        """All topics to read."""
        return [self.messages, *sorted(self._owners)]

    def is_own(self, topic: str) -> bool:
        """Whether a topic is a queue's own."""
        return topic in self._owners

    def queues_in(self, topic: str) -> Sequence[str]:
        """Return the queues that may have records in a topic."""
        owner = self._owners.get(topic)
        return self.queues if owner is None else (owner,)

    def own(self, source: Source, read: Sequence[Record]) -> Iterator[tuple[str, Sequence[Record]]]:
        """Return what belongs to each queue that has something among the records of one partition."""
        owner = self._owners.get(source.topic)
        if owner is not None:
            yield owner, read
            return
        if len(self._keys) > _FEW:
            yield from self._sorted(read)
            return
        for key, queue in self._keys.items():
            records = [record for record in read if record.key == key]
            if records:
                yield queue, records

    def _sorted(self, read: Sequence[Record]) -> Iterator[tuple[str, Sequence[Record]]]:
        keys = self._keys
        found: dict[str, list[Record]] = {}
        for record in read:
            queue = keys.get(record.key)  # type: ignore[arg-type]
            if queue is not None:
                found.setdefault(queue, []).append(record)
        yield from found.items()

    def count(self, source: Source, read: Sequence[Record]) -> int:
        """Return how many records of one partition belong to queues that are served."""
        if source.topic in self._owners:
            return len(read)
        keys = self._keys
        return sum([record.key in keys for record in read])

    def end(self, source: Source, read: Sequence[Record], room: int) -> int:
        """Return the place of the first record of ours for which there is no room."""
        if source.topic in self._owners:
            return min(room, len(read))
        keys = self._keys
        for place, record in enumerate(read):
            if record.key in keys:
                if room == 0:
                    return place
                room -= 1
        return len(read)

    def queue_of(self, topic: str, key: bytes | None) -> str | None:
        """Return whose record it is, None for nobody's that is served."""
        owner = self._owners.get(topic)
        return owner if owner is not None or key is None else self._keys.get(key)


def serving(messages: str, queues: Iterable[str], own_topics: Mapping[str, str | None]) -> Serving:
    """Return the serving of queues; ``own_topics`` may name None for a queue without a topic of its own."""
    names = tuple(sorted(queues))
    return Serving(messages, names, {queue: topic for queue in names if (topic := own_topics.get(queue))})
