"""One namespace in memory: its topics, its trackers, and the definitions of its queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from marq.core.deliveries import redelivery_records
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import LeaseRow
from marq.core.storage.table_image import Place
from marq.kafka.queue_records import payloads_in
from marq.kafka.records import Records, Row
from marq.kafka.topics import Topics
from marq.queues.definition_log import UnfinishedMessages, unfinished
from marq.queues.following import document_of, encoded
from marq.queues.subscription_start import start_document, starting
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, placement_key, start_key
from marq.settings.ordering_keys import partition_of
from marq.settings.placements import Placement
from marq.settings.topic_configs import room_for_markers
from marq.testing.clock import Timer, VirtualClock
from marq.testing.group import Group
from marq.testing.owner import Acked, Owner, decoded
from marq.testing.topics import Topic
from marq.wire import dead_letter_notes
from marq.wire.dead_letter_notes import Note
from marq.wire.errors import ConfigError
from marq.wire.markers import Delay, Payload, Source
from marq.wire.names import ORIGIN_HEADER, REASON_HEADER, Names, is_scheduled, is_synthetic
from marq.wire.record_headers import ordering_key


class Namespace:
    """The objects of one prefix on an in-memory broker; ``topics`` and ``groups`` are the broker's, by name."""

    def __init__(
        self, settings: ClientSettings, clock: VirtualClock, topics: dict[str, Topic], groups: Mapping[str, Group]
    ) -> None:
        self.names: Names = settings.names
        names = self.names
        self.clock = clock
        self.topics = topics
        self.groups = groups
        self.definitions = Definitions()
        #: Called after each change to the definitions.
        self.followers: set[Callable[[], None]] = set()
        #: Ends the next pause.
        self._resuming = Timer(0, 0, lambda: None, last=False)
        self.acked: list[Acked] = []
        self._turns: Counter[str] = Counter()
        self.messages = self._make(names.messages, settings.partitions)
        self.limit_bytes = self.messages.limit_bytes
        room = room_for_markers(self.limit_bytes)
        self.markers = self._make(names.markers, settings.markers_partitions, room)
        self.dead_letters = self._make(names.dead_letters, settings.partitions, room)
        self.unreadable = self._make(names.quarantine, 1, room)
        self.queues = self._make(names.queues, 1)
        self.owners = [Owner(self, partition) for partition in range(settings.markers_partitions)]
        for owner in self.owners:
            owner.work()

    def _make(self, name: str, partitions: int, limit_bytes: int | None = None) -> Topic:
        topic = Topic(name, partitions) if limit_bytes is None else Topic(name, partitions, limit_bytes)
        return self.topics.setdefault(name, topic)

    @property
    def facts(self) -> Topics:
        """The facts about the topics that clients need."""
        return Topics(self.messages.partitions, self.markers.partitions, self.limit_bytes, self.markers.limit_bytes)

    def settled(self) -> set[tuple[int, int]]:
        """Return the partitions and offsets of dead letters that were redriven or deleted."""
        topic = self.dead_letters
        return {
            (partition, offset)
            for partition, log in enumerate(topic.logs)
            for record in log
            if dead_letter_notes.is_note(record)
            if (note := dead_letter_notes.decode(Source(topic.name, partition), record.value)) is not None
            for offset in note.settled_before(record.offset)
        }

    def define(self, key: bytes, value: bytes | None) -> int:
        """Append a definition and return its offset."""
        self._start(key, value)
        offset = self.queues.append(0, self.clock.wall_ms, key, value)
        # Clients log a definition that can't be read; the former one stays in effect.
        with suppress(ConfigError):
            queue = self.definitions.fold(key, document_of(value), offset)
            if queue is not None:
                self._place(queue)
        self._end_pauses()
        return offset

    def _start(self, key: bytes, value: bytes | None) -> None:
        """Publish where new queues start in their topics, as writers do before a definition."""
        with suppress(ConfigError):
            after = self.definitions.after({key: document_of(value)})
            for queue, topic in starting(self.definitions, after):
                ends = self.topics[topic].ends if topic in self.topics else {}
                former = self.definitions.begin(queue)
                document = start_document(topic, ends, self.clock.wall_ms / 1000, former)
                self.define(start_key(queue), encoded(document))

    def _end_pauses(self) -> None:
        """Apply the definitions as they are now, and again when the next pause ends."""
        self.definitions.end_pauses(self.clock.wall_ms)
        self._resuming.cancel()
        if (end_ms := self.definitions.next_pause_end_ms) is not None:
            self._resuming = self.clock.after((end_ms - self.clock.wall_ms) / 1000, self._end_pauses)
        for owner in self.owners:
            owner.work()
        for follow in list(self.followers):
            follow()

    def _place(self, queue: str) -> None:
        """Publish the placement as workers do, in one step: their later steps only reduce reading."""
        former = self.definitions.placement(queue)
        following = former.following(queue, self.messages.partitions, self.definitions(queue))
        if following is not None:
            placement = Placement(following.sends, fixed=following.fixed)
            self.define(placement_key(queue), encoded(placement.document() or None))

    def open_messages(self, queue: str) -> Iterator[tuple[Source, int, LeaseRow, Payload]]:
        """Return each message of a queue that was received and has not ended."""
        for owner in self.owners:
            for source, offset, lease, payload in owner.open_messages():
                if lease.queue == queue:
                    yield source, offset, lease, payload

    def known_queues(self) -> set[str]:
        """Return the queues that have a definition, or messages that were sent or are open."""
        sent = {record.key.decode("utf-8", "replace") for log in self.messages.logs for record in log if record.key}
        opened = {lease.queue for owner in self.owners for _, _, lease, _ in owner.open_messages()}
        return sent | opened | set(self.definitions.names())

    def position(self, queue: str, source: Source) -> int:
        """Return the position of a queue in a partition."""
        groups = [group for name, group in self.groups.items() if self.names.is_group(name)]
        return max([group.position(queue, source, self.names) for group in groups], default=0)

    def acquired(self, queue: str, source: Source) -> int:
        """Return how far a queue was read in a partition; later messages are waiting."""
        position = self.position(queue, source)
        # The position of a queue with ordering is its lowest open message.
        marks = [owner.tracker.book.acquired.get((queue, source)) for owner in self.owners]
        return max([position, *[ranges.first_free(position) for ranges in marks if ranges is not None]])

    def sources(self, queue: str) -> list[Source]:
        """Return the partitions of the topics in which a queue may have records."""
        own, shared = self.definitions(queue).topic, self.names.messages
        names = [shared, *([own] if own in self.topics else [])]
        return [source for name in names for source in self.topics[name].sources]

    def records(self, queue: str, source: Source, start: int = 0) -> Iterator[Row]:
        """Return the records of a queue in a partition."""
        shared = source.topic == self.names.messages
        for record in self.topics[source.log.topic].logs[source.partition][start:]:
            if not shared or record.key == queue.encode():
                yield record

    def waiting(self, queue: str) -> Iterator[tuple[Source, Row]]:
        """Return the waiting messages of a queue."""
        return self._after(queue, self.acquired)

    def _after(self, queue: str, start: Callable[[str, Source], int]) -> Iterator[tuple[Source, Row]]:
        skipped = self.definitions.skipped(queue)
        for source in self.sources(queue):
            for record in self.records(queue, source, start(queue, source)):
                if skipped is None or skipped.left(source, record.offset, record.timestamp):
                    yield source, record

    def messages_of(self, queue: str) -> UnfinishedMessages:
        """Count the messages of a queue that have not ended."""
        leases = [(source, lease) for source, _, lease, _ in self.open_messages(queue)]
        waiting = sum(1 for _ in self.waiting(queue))
        ordered = self.definitions(queue).by_key
        unread = sum(1 for _ in self._after(queue, self.position)) if ordered else waiting
        return unfinished(waiting, leases, unread - waiting)

    def record_at(self, place: Place, payload: Payload) -> Payload | None:
        """Return the payload that an ACQUIRE left in its record, None if the record was removed."""
        source = place.source
        topic = self.topics.get(source.log.topic)
        if topic is None or source != Source(topic.name, source.partition).of(topic.id):
            return None
        records = Records.of(topic.logs[source.partition][place.offset : place.offset + 1])
        return dict(payloads_in(self.names, source, records, {place: payload})).get(place)

    def sent_as_markers(self, queue: str) -> Iterator[tuple[Source, int, Payload]]:
        """Return each message that was sent with a time or a deduplication id, and so began as a DELAY marker."""
        seen: set[tuple[Source, int]] = set()
        for batch in (decoded(record.value) for log in self.markers.logs for record in log):
            if not isinstance(batch, Delay) or batch.queue != queue:
                continue
            # The other DELAYs redrive dead letters, or come from schedules.
            if not is_synthetic(batch.source.topic) or is_scheduled(batch.source.topic):
                continue
            for offset, payload in zip(batch.offsets, batch.payloads, strict=True):
                # A sender repeats a DELAY whose outcome it does not know.
                if (batch.source, offset) not in seen:
                    seen.add((batch.source, offset))
                    yield batch.source, offset, payload

    # --- records of owners --------------------------------------------------------------------------------------------

    def send(self, record: redelivery_records.Redelivery) -> None:
        if record.destination is Destination.DEAD_LETTERS:
            topic, partition = self.dead_letters, self.dead_letters.next_partition(record.key)
        else:
            topic, partition = self.messages, self._partition(record.key.decode(), ordering_key(record.headers))
        topic.append(partition, self.clock.wall_ms, record.key, record.value, record.headers)

    def _partition(self, queue: str, key: bytes | None) -> int:
        sends = self.definitions.placement(queue).sends
        if key is not None:
            return partition_of(key, sends or range(self.messages.partitions))
        if sends is None:
            return self.messages.next_partition()
        self._turns[queue] += 1
        return sends[self._turns[queue] % len(sends)]

    def note(self, note: Note) -> None:
        topic, partition = self.dead_letters, note.source.partition
        if note.source.topic == topic.name and partition < topic.partitions:
            for value, headers in dead_letter_notes.encoded(note):
                topic.append(partition, self.clock.wall_ms, dead_letter_notes.NOTE_KEY, value, headers)

    def quarantine(self, value: bytes | None, origin: str, reason: str) -> None:
        headers = [(ORIGIN_HEADER, origin.encode()), (REASON_HEADER, reason.encode())]
        self.unreadable.append(0, self.clock.wall_ms, None, value, headers)
