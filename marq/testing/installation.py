"""One installation in memory: its topics, its trackers, and the definitions of its queues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from marq.core import copies, notes
from marq.core.definitions import Definitions, placement_key
from marq.core.errors import ConfigError
from marq.core.fires import Destination
from marq.core.markers import Payload, Source
from marq.core.names import ORIGIN_HEADER, REASON_HEADER, Names
from marq.core.notes import Note
from marq.core.rows import Lease
from marq.core.schedules import ScheduleLayers
from marq.core.spread import Placement, subset
from marq.core.topic_rules import room_for_markers
from marq.settings import ClientSettings
from marq.testing.clock import Clock
from marq.testing.owner import Acked, Owner
from marq.testing.topics import Topic
from marq.topics import Topics


class Installation:
    """What one prefix has on a broker in memory; ``topics`` are the broker's, by name."""

    def __init__(self, settings: ClientSettings, clock: Clock, topics: dict[str, Topic]) -> None:
        names = settings.names
        self.names: Names = names
        self.clock = clock
        self.topics = topics
        #: What is known of queues by now: a document that can't be read is passed over.
        self.definitions = Definitions()
        #: Called after each change of the definitions.
        self.followers: set[Callable[[], None]] = set()
        self.acked: list[Acked] = []
        self._turns: Counter[str] = Counter()
        self.messages = self._make(names.messages, settings.partitions)
        self.limit_bytes = self.messages.limit_bytes
        room = room_for_markers(self.limit_bytes)
        self.markers = self._make(names.markers, settings.markers_partitions, room)
        self.dead_letters = self._make(names.dead_letters, settings.partitions, room)
        self.unreadable = self._make(names.quarantine, 1, room)
        self.queues = self._make(names.queues, 1)
        self.owners = [
            Owner(self.markers, partition, clock, self.definitions, self, self.acked.append, self._schedules)
            for partition in range(settings.markers_partitions)
        ]
        for owner in self.owners:
            owner.work()

    def _make(self, name: str, partitions: int, limit_bytes: int | None = None) -> Topic:
        topic = Topic(name, partitions) if limit_bytes is None else Topic(name, partitions, limit_bytes)
        return self.topics.setdefault(name, topic)

    @property
    def facts(self) -> Topics:
        """What clients must know of the topics."""
        return Topics(self.messages.partitions, self.markers.partitions, self.limit_bytes, self.markers.limit_bytes)

    def settled(self) -> set[tuple[int, int]]:
        """Return the places of dead letters that were redriven or deleted."""
        topic = self.dead_letters
        found = [
            notes.decode(Source(topic.name, partition), record.value)
            for partition, log in enumerate(topic.logs)
            for record in log
            if notes.is_note(record.headers)
        ]
        return {(note.source.partition, offset) for note in found if note is not None for offset in note.offsets}

    def define(self, key: bytes, value: bytes | None) -> int:
        """Append a definition and return its offset."""
        offset = self.queues.append(0, self.clock.wall_ms, key, value)
        # What can't be read the clients log; the former one stays.
        with suppress(ConfigError, ValueError):
            queue = self.definitions.fold(key, None if value is None else json.loads(value))
            if queue is not None:
                self._place(queue)
        for owner in self.owners:
            owner.work()
        for follow in list(self.followers):
            follow()
        return offset

    def _place(self, queue: str) -> None:
        """Take the step that workers take first; the others only spare reading, which costs nothing here."""
        wanted = subset(queue, self.messages.partitions, self.definitions(queue).spread)
        if self.definitions.placement(queue).sends != wanted:
            placement = Placement(wanted)
            self.define(placement_key(queue), encoded(placement.document() or None))

    def _schedules(self) -> ScheduleLayers:
        return self.definitions.schedules

    def open_messages(self, queue: str) -> Iterator[tuple[Source, int, Lease, Payload]]:
        """Each message of a queue that was received and has not ended."""
        for owner in self.owners:
            for source, offset, lease, payload in owner.open_messages():
                if lease.queue == queue:
                    yield source, offset, lease, payload

    # --- what owners send ---------------------------------------------------------------------------------------------

    def send(self, copy: copies.Copy, source: Source) -> None:
        if copy.destination is Destination.DEAD_LETTERS:
            topic, partition = self.dead_letters, self.dead_letters.next_partition(copy.key)
        elif copy.own_topic:
            topic, partition = self.topics[source.topic], source.partition
        else:
            assert copy.key is not None, "it is known by its queue's name"
            topic, partition = self.messages, self._partition(copy.key.decode())
        topic.append(partition, self.clock.wall_ms, copy.key, copy.value, copy.headers)

    def _partition(self, queue: str) -> int:
        sends = self.definitions.placement(queue).sends
        return self.messages.next_partition() if sends is None else sends[self._turn(queue) % len(sends)]

    def _turn(self, queue: str) -> int:
        self._turns[queue] += 1
        return self._turns[queue]

    def note(self, note: Note) -> None:
        topic, partition = self.dead_letters, note.source.partition
        if note.source.topic == topic.name and partition < topic.partitions:
            for value, headers in notes.encoded(note):
                topic.append(partition, self.clock.wall_ms, notes.NOTE_KEY, value, headers)

    def quarantine(self, value: bytes | None, origin: str, why: str) -> None:
        headers = [(ORIGIN_HEADER, origin.encode()), (REASON_HEADER, why.encode())]
        self.unreadable.append(0, self.clock.wall_ms, None, value, headers)


def encoded(document: Mapping[str, Any] | None) -> bytes | None:
    """Return a definition as it stands in its topic."""
    return None if document is None else json.dumps(document).encode()
