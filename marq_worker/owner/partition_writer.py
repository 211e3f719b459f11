"""The transactional producer of one markers partition: it carries out the writes of marq/owner/engine.py.

Taking over the producer fences a former owner and aborts its open transaction.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.transaction_manager import TransactionState

from marq.core.deliveries import redelivery_records
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage import rows
from marq.kafka.connection import stop_producer
from marq.kafka.paced_clients import paced
from marq.owner.engine import OwnerTransaction, Unreadable
from marq.settings.ordering_keys import partition_of
from marq.wire import dead_letter_notes
from marq.wire.dead_letter_notes import Note
from marq.wire.marker_codec import encode
from marq.wire.markers import Headers, Payload
from marq.wire.record_headers import ordering_key
from marq_worker.owner.owner_context import OwnerContext

log = logging.getLogger("marq.tracker")

#: Time limit of a transaction.
TRANSACTION_SECONDS = 15.0
#: Time limit of a transaction with a TICK: well below marq.core.storage.log_clock.MAX_DRIFT_MS.
TICK_SECONDS = 3.0
STOP_PRODUCER_SECONDS = 1.0
#: No record is larger, because Kafka's sizes have 31 bits. Each topic has its own limit, and the dead-letter topic may
#: accept far more than the messages topic.
MAX_RECORD_BYTES = (1 << 31) - 1


class RecordBatches:
    """Batches of one transaction's records in a topic, by partition."""

    def __init__(self, producer: AIOKafkaProducer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._open: dict[int, Any] = {}
        self._full: list[tuple[int, Any]] = []

    def add(self, partition: int, key: bytes | None, value: bytes | None, headers: Headers, at_ms: int) -> None:
        """Add a record to its partition's batch; an empty batch takes a record of any size."""
        record = {"timestamp": at_ms, "key": key, "value": value, "headers": headers}
        batch = self._open.get(partition)
        if batch is not None and batch.append(**record) is not None:
            return
        if batch is not None:
            self._full.append((partition, batch))
        self._open[partition] = batch = self._producer.create_batch()
        batch.append(**record)

    async def send(self) -> list[Any]:
        """Send all batches; return a future for each."""
        batches = [*self._full, *self._open.items()]
        return [await self._producer.send_batch(batch, self._topic, partition=where) for where, batch in batches]


def _cause(producer: Any, error: Exception) -> KafkaError | None:
    """Return the error that makes aiokafka refuse to continue a transaction; None if there is none.

    The error that it raises may say only that there is no transaction, or that its state is wrong, although another
    producer has taken over the partition, or a permission is missing.
    """
    if str(error) == "Unrecognized partition":
        # The topic has fewer partitions, or aiokafka's metadata is outdated.
        return UnknownTopicOrPartitionError(str(error))
    manager = None if producer is None else producer._txn_manager
    if manager is None or manager.state not in (TransactionState.ABORTABLE_ERROR, TransactionState.FATAL_ERROR):
        return None
    outcome = manager.wait_for_transaction_end()
    # There is no outcome if the producer has failed before its first transaction.
    cause = outcome.exception() if outcome is not None and outcome.done() else producer._message_accumulator._exception
    return cause if isinstance(cause, KafkaError) else KafkaError(f"aiokafka has ended the transaction: {cause!r}")


@dataclass
class PartitionWriter:
    partition: int
    context: OwnerContext
    #: None until the partition is taken over.
    producer: AIOKafkaProducer | None = None
    #: The partition that got the last redelivery of a queue that lives on all partitions.
    _turn: int = 0

    @property
    def _owner(self) -> list[tuple[str, bytes]]:
        return [(rows.OWNER_HEADER, self.context.worker.encode())] if self.context.worker else []

    @property
    def _changelog(self) -> str:
        return self.context.table.changelog_topic_name

    async def fence(self) -> tuple[int, int]:
        """Take the partition's producer over; return its id and epoch, which each takeover increments."""
        producer = paced(
            AIOKafkaProducer(
                transactional_id=self.context.names.transactional_id(self.partition),
                transaction_timeout_ms=int(TRANSACTION_SECONDS * 1000),
                linger_ms=0,
                # Also limits batches. All other topics accept larger batches than the messages topic.
                max_batch_size=min(1 << 20, self.context.max_message_bytes),
                max_request_size=MAX_RECORD_BYTES,
                **self.context.client,
            )
        )
        self.producer = producer
        async with asyncio.timeout(TRANSACTION_SECONDS):
            await producer.start()
        return producer._txn_manager.producer_id, producer._txn_manager.producer_epoch

    async def renew(self) -> tuple[int, int]:
        """Replace the producer after the broker rejected a record; return the new id and epoch as :meth:`fence` does.

        aiokafka counts rejected batches in the partition's sequence numbers, but the broker does not. The broker would
        therefore reject all later batches.
        """
        await self.stop()
        return await self.fence()

    async def recover_table(self) -> int:
        """Bring the table up to the end of its changelog; return the number of records read."""
        assert self.producer is not None
        return await self.context.table.recover(self.partition, self.producer, self.context.client)

    async def stop(self) -> None:
        producer, self.producer = self.producer, None
        if producer is not None:
            await stop_producer(producer, STOP_PRODUCER_SECONDS)

    async def commit(self, write: OwnerTransaction) -> tuple[int, int]:
        """Send a write in one transaction; return its last offsets in the markers partition and the changelog.

        Raises:

        * MessageSizeTooLargeError, RecordListTooLargeError: a record is refused for its size; nothing was written.
        * ChangelogLost: the changelog was recreated, or lost records; the next takeover aborts the transaction.
        * KafkaError: it is not known whether anything was written.
        """
        try:
            return await self._commit(write)
        except (AssertionError, IllegalOperation) as error:
            cause = _cause(self.producer, error)
            if cause is None:
                raise
            raise cause from error

    async def _commit(self, write: OwnerTransaction) -> tuple[int, int]:
        producer = self.producer
        assert producer is not None
        # A late TICK would look as if the broker's clock had jumped, and leases would expire early. After this time
        # limit it is aborted, so no tracker reads it.
        async with asyncio.timeout(TRANSACTION_SECONDS if write.tick is None else TICK_SECONDS):
            await producer.begin_transaction()
            try:
                sends = await self._sends(producer, write)
                # gather awaits all of them: if the first failed, asyncio would report the others as not awaited.
                results = await asyncio.gather(*sends)
                if write.rows is not None:
                    first = min(result.offset for result in results if result.topic == self._changelog)
                    # Before the commit: the next owner would mistake these rows for the whole table.
                    self.context.table.check_changelog(self.partition, first)
            except (MessageSizeTooLargeError, RecordListTooLargeError):
                await producer.abort_transaction()
                raise
            await producer.commit_transaction()
        marked = max([result.offset for result in results if result.topic == self.context.names.markers], default=-1)
        if write.rows is None:
            return marked, -1
        # A batch's result has its first offset. Only this owner writes to the changelog, so the rows are contiguous.
        return marked, first + len(write.rows) - 1

    async def _sends(self, producer: AIOKafkaProducer, write: OwnerTransaction) -> list[Any]:
        sends = await self._send_copies(producer, write)
        for batch in write.markers:
            sends += [await producer.send(self.context.names.markers, encode(batch), partition=self.partition)]
        if write.rows is not None:
            sends += await self._send_rows(producer, write.rows, write.appended_ms)
            sends += await self._send_notes(producer, write.notes, write.appended_ms)
            for record in write.quarantine:
                sends.append(await self._send_quarantine(producer, write.appended_ms, record))
        return sends

    async def _send_copies(self, producer: AIOKafkaProducer, write: OwnerTransaction) -> list[Any]:
        """Send redeliveries to the messages topic in batches, which cost far less than single sends."""
        batches = RecordBatches(producer, self.context.names.messages)
        sends = []
        for fire, payload in write.due:
            if fire.destination is not Destination.NOWHERE:
                sends += await self._send_copy(producer, write, fire, payload, batches)
        return sends + await batches.send()

    async def _send_copy(
        self,
        producer: AIOKafkaProducer,
        write: OwnerTransaction,
        fire: DueAction,
        payload: Payload,
        batches: RecordBatches,
    ) -> list[Any]:
        names, queue = self.context.names, fire.lease.queue
        copy = redelivery_records.redelivery(
            fire,
            payload,
            write.now_ms,
            own_topic=names.is_senders_topic(fire.source.topic),
            ordered=self.context.settings(queue).by_key,
        )
        if copy.destination is Destination.DEAD_LETTERS:
            options = {"headers": copy.headers, "timestamp_ms": write.appended_ms}
            return [await producer.send(names.dead_letters, copy.value, copy.key, **options)]
        partition = await self._partition(producer, queue, ordering_key(copy.headers))
        batches.add(partition, copy.key, copy.value, copy.headers, write.appended_ms)
        return []

    async def _partition(self, producer: AIOKafkaProducer, queue: str, key: bytes | None) -> int:
        """Return the partition of the messages topic for a redelivery, or for a delayed message that is due."""
        sends = self.context.placement(queue).sends
        if key is not None and sends is None:
            # Senders use a key only after the queue's partitions were fixed, so this placement is outdated.
            sends = tuple(range(self.context.messages_partitions))
        if sends is None:
            self._turn = (self._turn + 1) % self.context.messages_partitions
            return self._turn
        # aiokafka fails on a partition that was added after its last metadata request.
        existing = await producer.partitions_for(self.context.names.messages)
        wanted = sends if key is None else [partition_of(key, sends)]
        known = [number for number in wanted if number in existing]
        if not known:
            raise UnknownTopicOrPartitionError(f"{self.context.names.messages}: partitions {sends} of queue {queue!r}")
        # Random, because redeliveries of alternating queues would get the same partition each turn.
        return random.choice(known)

    async def _send_rows(
        self, producer: AIOKafkaProducer, changes: Mapping[bytes, bytes | None], at_ms: int
    ) -> list[Any]:
        batches = RecordBatches(producer, self._changelog)
        for key, value in changes.items():
            batches.add(self.partition, key, value, self._owner if key == rows.APPLIED_KEY else [], at_ms)
        return await batches.send()

    async def _send_notes(self, producer: AIOKafkaProducer, written: Sequence[Note], at_ms: int) -> list[Any]:
        """Record the outcome of dead letters in their topic, in the same transaction as the rows."""
        topic = self.context.names.dead_letters
        # Clients may ask about records that do not exist, and aiokafka fails on an unknown partition.
        existing = await producer.partitions_for(topic) if written else set()
        return [
            await producer.send(
                topic,
                value,
                dead_letter_notes.NOTE_KEY,
                partition=note.source.partition,
                headers=headers,
                timestamp_ms=at_ms,
            )
            for note in written
            if note.source.topic == topic and note.source.partition in existing
            for value, headers in dead_letter_notes.encoded(note)
        ]

    async def _send_quarantine(self, producer: AIOKafkaProducer, at_ms: int, record: Unreadable) -> Any:
        offset, value, why = record
        names = self.context.names
        log.error("unreadable marker %s/%s/%s put into quarantine: %s", names.markers, self.partition, offset, why)
        headers = [
            ("marq-origin", f"{names.markers}/{self.partition}/{offset}".encode()),
            ("marq-reason", why.encode()),
        ]
        # aiokafka refuses a record without key and value.
        return await producer.send(names.quarantine, value or b"", headers=headers, timestamp_ms=at_ms)
