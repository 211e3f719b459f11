"""What the owner of one markers partition writes: one transactional producer, and what goes into its transactions.

Taking the producer over fences a former owner, and aborts what that one had not committed. Rows are kept here from the
fold until they are known to be in the changelog: they are then written to the table.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    UnknownTopicOrPartitionError,
)

from agents.copy_batches import CopyBatches
from agents.own_topics import OwnTopics
from agents.surroundings import Surroundings
from marq.connection import stop_producer
from marq.core import copies, notes, rows
from marq.core.fires import Destination, Fire
from marq.core.marker_codec import encode
from marq.core.markers import Answer, Batch, Payload, Source, Tick
from marq.core.notes import Note
from marq.core.tracker import Tracker
from marq.reconnects import paced

log = logging.getLogger("marq.tracker")

#: How long a transaction may take before the producer is given up.
TRANSACTION_SECONDS = 15.0
STOP_PRODUCER_SECONDS = 1.0


#: What is due, and its message.
Due = tuple[Fire, Payload]


@dataclass
class Writing:
    """The writes of one markers partition's owner."""

    partition: int
    around: Surroundings
    #: None while the partition is not taken over.
    producer: AIOKafkaProducer | None = None
    #: Rows that were folded and are not known to be written.
    pending: dict[bytes, bytes | None] = field(default_factory=dict)
    #: To RESCHEDULEs and CANCELs, and not known to be written.
    answers: list[Answer] = field(default_factory=list)
    #: What became of dead letters, and not known to be written.
    notes: list[Note] = field(default_factory=list)
    #: The offset of the last marker that is known to be written.
    marked: int = -1
    #: Id and epoch of the producer that was taken over last.
    _epoch: tuple[int, int] = (-1, -1)
    #: The partition of the last copy of a queue that lives on all of them.
    _turn: int = 0
    _own_topics: OwnTopics = field(default_factory=OwnTopics)

    @property
    def _owner(self) -> list[tuple[str, bytes]]:
        return [(rows.OWNER_HEADER, self.around.worker.encode())] if self.around.worker else []

    async def fence(self) -> bool:
        """Take the partition's producer over; return whether nobody else has had it since this was done before."""
        producer = paced(
            AIOKafkaProducer(
                transactional_id=self.around.names.transactional_id(self.partition),
                transaction_timeout_ms=int(TRANSACTION_SECONDS * 1000),
                linger_ms=0,
                max_batch_size=1 << 20,
                max_request_size=self.around.max_message_bytes * 2 + (1 << 20),
                **self.around.client,
            )
        )
        self.producer = producer
        async with asyncio.timeout(TRANSACTION_SECONDS):
            await producer.start()
        former, self._epoch = self._epoch, _epoch(producer)
        return self._epoch == (former[0], former[1] + 1)

    async def recover_table(self) -> int:
        """Bring the table up to the end of its changelog; return how many records that took."""
        assert self.producer is not None
        return await self.around.table.recover(self.partition, self.producer, self.around.client)

    async def stop(self) -> None:
        producer, self.producer = self.producer, None
        if producer is not None:
            await stop_producer(producer, STOP_PRODUCER_SECONDS)

    def forget(self) -> None:
        """Drop what is not written: it will be folded again."""
        self.pending = {}
        self.answers = []
        self.notes = []

    def payloads(self, tracker: Tracker, fires: Sequence[Fire]) -> list[Payload]:
        """Return the messages of copies to send: the table is asked once for all of them."""
        found = [tracker.book.fresh_payload(fire.source, fire.offset) for fire in fires]
        missing = [index for index, payload in enumerate(found) if payload is None]
        keys = [rows.row_key(fires[index].source, fires[index].offset) for index in missing]
        written = self.around.table.get(self.partition, keys) if keys else []
        for index, key, stored in zip(missing, keys, written, strict=True):
            row = self.pending.get(key) or stored
            assert row is not None, f"no row for {copies.record_id(fires[index].source, fires[index].offset)}"
            found[index] = rows.decode_payload(row)
        return found  # type: ignore[return-value]

    def open_payload(self, tracker: Tracker, source: Source, offset: int) -> Payload | None:
        """Return an open message, from the book, the rows to write or the table; None for what is not open."""
        payload = tracker.book.fresh_payload(source, offset)
        if payload is not None:
            return payload
        key = rows.row_key(source, offset)
        row = self.pending.get(key) or self.around.table.get(self.partition, [key])[0]
        return None if row is None else rows.decode_payload(row)

    def close_own_topics(self, fires: Iterable[Fire], error: KafkaError | TimeoutError) -> None:
        """Send none of these copies to topics of their queues' own for a while.

        Nobody says which topic it was that refused. One that is somebody else's (compacted, short of replicas) would
        do so again at each attempt, and hold up all queues of the partition.
        """
        for topic in {self._own_topic(fire) for fire in fires} - {None}:
            self._own_topics.close(topic, error)

    async def commit(
        self,
        tracker: Tracker,
        due: Sequence[Due],
        tick: Tick | None,
        changes: bool,
        limit_seconds: float,
        plan: Sequence[Batch] = (),
    ) -> int:
        """Send all this in one transaction; return the changelog's last offset among it, -1 without changes.

        Raises:
            MessageSizeTooLargeError: a copy or a row is refused for its size; nothing was written.
            RecordListTooLargeError: likewise.
            KafkaError: it is not known whether anything was written.
        """
        if changes:
            # Kept until they are known to be written: a failed transaction writes them again under newer ones.
            self.pending.update(tracker.book.take_changes())
            self.notes += tracker.notes()
        answers = len(self.answers)
        producer = self.producer
        assert producer is not None
        async with asyncio.timeout(limit_seconds):
            await producer.begin_transaction()
            try:
                sends = await self._sends(producer, tracker, due, [*plan, *([] if tick is None else [tick])], changes)
                # Not one by one: if one failed, the others would not be awaited, and asyncio would report each of them.
                results = await asyncio.gather(*sends)
            except (MessageSizeTooLargeError, RecordListTooLargeError):
                await producer.abort_transaction()
                raise
            await producer.commit_transaction()
        del self.answers[:answers]
        markers = self.around.names.markers
        self.marked = max([self.marked, *(result.offset for result in results if result.topic == markers)])
        if not changes:
            return -1
        self.notes = []
        changelog = self.around.table.changelog_topic_name
        return max(result.offset for result in results if result.topic == changelog)

    def write_table(self, changelog_offset: int) -> None:
        """Write the rows, which the changelog has up to this offset.

        Raises:
            LocalTableError: the disk did not take them; they stay pending.
        """
        self.around.table.write(self.partition, self.pending, changelog_offset)
        self.pending = {}

    async def _sends(
        self, producer: AIOKafkaProducer, tracker: Tracker, due: Sequence[Due], more: Sequence[Batch], changes: bool
    ) -> list[Any]:
        names, sends = self.around.names, []
        sends += await self._send_copies(producer, tracker, due)
        for batch in [*self.answers, *tracker.facts([fire for fire, _ in due]), *more]:
            sends += [await producer.send(names.markers, encode(batch), partition=self.partition)]
        if changes:
            at_ms = tracker.book.clock.appended_ms
            sends += await self._send_rows(producer, at_ms)
            sends += await self._send_notes(producer, at_ms)
            for offset, value, why in tracker.unreadable:
                sends.append(await self._send_quarantine(producer, at_ms, offset, value, why))
        return sends

    async def _send_copies(self, producer: AIOKafkaProducer, tracker: Tracker, due: Sequence[Due]) -> list[Any]:
        """Send what goes to the messages topic in batches, which cost far less than as many sends; all else alone."""
        batches = CopyBatches(producer, self.around.names.messages, self.around.max_message_bytes)
        sends = []
        for fire, payload in due:
            if fire.destination is not Destination.NOWHERE:
                sends += await self._send_copy(producer, tracker, fire, payload, batches)
        return sends + await batches.send()

    async def _send_copy(
        self, producer: AIOKafkaProducer, tracker: Tracker, fire: Fire, payload: Payload, batches: CopyBatches
    ) -> list[Any]:
        names, clock = self.around.names, tracker.book.clock
        own_topic = self._own_topic(fire)
        if own_topic is not None and not await self._own_topics.usable(producer, own_topic):
            own_topic = None
        copy = copies.copy(fire, payload, clock.now_ms, own_topic)
        options = {"headers": copy.headers, "timestamp_ms": clock.appended_ms}
        if copy.destination is Destination.DEAD_LETTERS:
            return [await producer.send(names.dead_letters, copy.value, copy.key, **options)]
        if copy.own_topic:
            source = fire.source
            try:
                return [await producer.send(source.topic, copy.value, copy.key, partition=source.partition, **options)]
            except AssertionError:
                # So aiokafka says that the partition is gone: the topic was made anew with fewer.
                self._own_topics.close(source.topic, UnknownTopicOrPartitionError())
                return await self._send_copy(producer, tracker, fire, payload, batches)
        batches.add(await self._partition(producer, fire.lease.queue), copy, clock.appended_ms)
        return []

    async def _partition(self, producer: AIOKafkaProducer, queue: str) -> int:
        """Return the partition of the messages topic for a copy."""
        sends = self.around.placement(queue).sends
        if sends is None:
            self._turn = (self._turn + 1) % self.around.messages_partitions
            return self._turn
        # aiokafka fails at a partition that was added after it last looked.
        there = await producer.partitions_for(self.around.names.messages)
        known = [each for each in sends if each in there]
        if not known:
            raise UnknownTopicOrPartitionError(f"{self.around.names.messages}: partitions {sends} of queue {queue!r}")
        # Not in turn: copies of several queues that come by turns would each be given the same one.
        return random.choice(known)

    def _own_topic(self, fire: Fire) -> str | None:
        """Where a copy goes back to, when that is a topic of its queue's own."""
        topic = self.around.settings(fire.lease.queue).topic
        return topic if topic == fire.source.topic and fire.destination is Destination.QUEUE else None

    async def _send_rows(self, producer: AIOKafkaProducer, at_ms: int) -> list[Any]:
        topic, sends = self.around.table.changelog_topic_name, []
        batch = producer.create_batch()
        for key, value in self.pending.items():
            headers = self._owner if key == rows.APPLIED_KEY else []
            if batch.append(key=key, value=value, timestamp=at_ms, headers=headers) is None:
                if batch.record_count():
                    sends.append(await producer.send_batch(batch, topic, partition=self.partition))
                    batch = producer.create_batch()
                if batch.append(key=key, value=value, timestamp=at_ms, headers=headers) is None:
                    # Larger than a batch: the producer makes one for it alone.
                    sends.append(await producer.send(topic, value, key, self.partition, timestamp_ms=at_ms))
        if batch.record_count():
            sends.append(await producer.send_batch(batch, topic, partition=self.partition))
        return sends

    async def _send_notes(self, producer: AIOKafkaProducer, at_ms: int) -> list[Any]:
        """Say beside the dead letters what became of them: with the rows, never the one without the other."""
        topic = self.around.names.dead_letters
        # Anybody may ask about places that do not exist; aiokafka fails at a partition that does not.
        there = await producer.partitions_for(topic) if self.notes else set()
        return [
            await producer.send(
                topic, value, notes.NOTE_KEY, partition=note.source.partition, headers=headers, timestamp_ms=at_ms
            )
            for note in self.notes
            if note.source.topic == topic and note.source.partition in there
            for value, headers in notes.encoded(note)
        ]

    async def _send_quarantine(
        self, producer: AIOKafkaProducer, at_ms: int, offset: int, value: bytes | None, why: str
    ) -> Any:
        names = self.around.names
        log.error("unreadable marker %s/%s/%s put into quarantine: %s", names.markers, self.partition, offset, why)
        headers = [
            ("marq-origin", f"{names.markers}/{self.partition}/{offset}".encode()),
            ("marq-reason", why.encode()),
        ]
        # aiokafka refuses a record without key and value.
        return await producer.send(names.quarantine, value or b"", headers=headers, timestamp_ms=at_ms)


def _epoch(producer: AIOKafkaProducer) -> tuple[int, int]:
    return producer._txn_manager.producer_id, producer._txn_manager.producer_epoch
