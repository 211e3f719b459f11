"""The five steps of docs/protocol.md on a real broker, with what protocol_client.py has read from the page."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    ConsumerRecord,
    OffsetAndMetadata,
    TopicPartition,
)
from aiokafka.admin import AIOKafkaAdminClient

from tests.docs.protocol_client import Protocol, markers_partition, read_metadata, write_metadata


@dataclass(frozen=True)
class Message:
    source: TopicPartition
    offset: int
    value: bytes | None
    headers: Mapping[str, bytes]

    @property
    def id(self) -> str:
        return self.headers.get("marq-id", b"").decode() or f"{self.source.topic}/{self.source.partition}/{self.offset}"

    @property
    def attempt(self) -> int:
        text = self.headers.get("marq-attempt", b"1")
        return int(text) if text.isdigit() and len(text) <= 20 and 0 < int(text) < 2**32 else 1

    @property
    def due_ms(self) -> int:
        """The time before which it must not be delivered; -1: at once."""
        text = self.headers.get("marq-deliver-at", b"")
        if "marq-attempt" in self.headers or not text.isdigit() or len(text) > 20 or int(text) >= 2**62:
            return -1
        return int(text)


class Receiver(ConsumerRebalanceListener):  # type: ignore[misc]
    """Serves one queue in the group that it belongs to, with the five steps. Minimal: it renews nothing by itself."""

    def __init__(self, protocol: Protocol, servers: str, prefix: str, queue: str, *, lease_ms: int) -> None:
        self._protocol, self._prefix, self._queue, self._lease_ms = protocol, prefix, queue, lease_ms
        self._servers = servers
        self._holder = 0
        self._acquired_to: dict[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, dict[str, int]] = {}

    async def __aenter__(self) -> Self:
        topic = self._protocol.names.topic
        definitions = self._protocol.queue_definitions
        for key, value in await self._definitions(topic("definitions of queues", self._prefix)):
            definitions.fold(key, value)
        self._own_topic = definitions.settings(self._queue)["topic"]
        self._group = self._protocol.names.group(self._prefix, self._queue, definitions.group(self._queue))
        self._markers = topic("marker batches", self._prefix)
        self._producer = AIOKafkaProducer(bootstrap_servers=self._servers, acks="all", enable_idempotence=True)
        await self._producer.start()
        self._count = len(await self._producer.partitions_for(self._markers))
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._servers, group_id=self._group,
            auto_offset_reset="earliest", enable_auto_commit=False,
        )  # fmt: skip
        own = [self._own_topic] if self._own_topic else []
        self._consumer.subscribe([topic("messages", self._prefix), *own], listener=self)
        await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._consumer.stop()
        await self._producer.stop()

    async def _definitions(self, topic: str) -> list[tuple[bytes | None, bytes | None]]:
        partition = TopicPartition(topic, 0)
        async with AIOKafkaConsumer(bootstrap_servers=self._servers, auto_offset_reset="earliest") as consumer:
            consumer.assign([partition])
            end = (await consumer.end_offsets([partition]))[partition]
            found: list[tuple[bytes | None, bytes | None]] = []
            while await consumer.position(partition) < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    found += [(record.key, record.value) for record in records]
            return found

    # --- where to begin ---

    async def on_partitions_revoked(self, revoked: Any) -> None:
        self._acquired_to.clear()

    async def on_partitions_assigned(self, assigned: Sequence[TopicPartition]) -> None:
        self._holder = random.getrandbits(64) or 1
        if not assigned:
            return
        self._consumer.pause(*assigned)
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        try:
            own = await admin.list_consumer_group_offsets(self._group, partitions=list(assigned))
            groups = [group for group, *_ in await admin.list_consumer_groups() if group != self._group]
            others = {
                group: await admin.list_consumer_group_offsets(group, partitions=list(assigned))
                for group in groups
                if self._protocol.names.is_group(self._prefix, group)
            }
        finally:
            await admin.close()
        for partition in assigned:
            positions = self._read(self._group, own.get(partition))
            position = positions.get(self._queue, 0)
            committed = own.get(partition)
            if committed is None or position != committed.offset:
                found = [self._read(group, offsets.get(partition)) for group, offsets in others.items()]
                position = max([position, *(positions.get(self._queue, 0) for positions in found)])
            self._positions[partition] = {**positions, self._queue: position}
            begins = (await self._consumer.beginning_offsets([partition]))[partition]
            self._consumer.seek(partition, max(position, begins))
            self._consumer.resume(partition)

    def _read(self, group: str, committed: Any) -> dict[str, int]:
        if committed is None or committed.offset < 0:
            return {}
        return read_metadata(committed.offset, committed.metadata, self._protocol.names.owner(self._prefix, group))

    # --- the five steps ---

    async def receive(self, *, wait_ms: int = 500) -> list[Message]:
        """Steps 1 to 4: fetch, acquire, commit, deliver."""
        fetched = await self._consumer.getmany(timeout_ms=wait_ms, max_records=500)
        own = {partition: [r for r in read if self._is_ours(partition, r)] for partition, read in fetched.items()}
        for partition, read in fetched.items():
            if own[partition]:
                await self._acquire(partition, own[partition], read[0].offset)
        commits = {}
        for partition, read in fetched.items():
            offset, positions = read[-1].offset + 1, self._positions[partition]
            positions[self._queue] = max(positions[self._queue], offset)
            commits[partition] = OffsetAndMetadata(offset, write_metadata(positions, offset))
        if commits:
            await self._consumer.commit(commits)
        messages = [
            Message(partition, record.offset, record.value, dict(record.headers))
            for partition, records in own.items()
            for record in records
        ]
        return [message for message in messages if message.due_ms == -1]

    def _is_ours(self, partition: TopicPartition, record: ConsumerRecord[bytes, bytes]) -> bool:
        ours = partition.topic == self._own_topic or record.key == self._queue.encode()
        return ours and record.offset >= self._positions[partition][self._queue]

    async def _acquire(
        self, partition: TopicPartition, records: Sequence[ConsumerRecord[bytes, bytes]], first_read: int
    ) -> None:
        from_offset = self._acquired_to.get(partition, first_read)
        messages = [Message(partition, r.offset, r.value, dict(r.headers)) for r in records]
        columns = {
            "timestamps": [record.timestamp for record in records],
            "attempts": [message.attempt for message in messages],
            "dues": [message.due_ms for message in messages],
            "keys": [record.key for record in records],
            "headers": [list(record.headers) for record in records],
            "values": [record.value for record in records],
        }
        await self._write("ACQUIRE", messages, lease=self._lease_ms, from_offset=from_offset, **columns)
        self._acquired_to[partition] = records[-1].offset + 1

    async def ack(self, message: Message) -> None:
        await self._write("ACK", [message])

    async def renew(self, message: Message, lease_ms: int) -> None:
        """Let the lease of a message end then, even if that is earlier than before."""
        await self._write("RENEW", [message], lease=lease_ms, exactly=True)

    async def release(self, message: Message, delay_ms: int, error: str) -> None:
        await self._write("RELEASE", [message], delays=[delay_ms], errors=[error])

    async def reject(self, message: Message, reason: str) -> None:
        await self._write("REJECT", [message], reasons=[reason])

    async def _write(self, kind: str, messages: Sequence[Message], **fields: Any) -> None:
        source = messages[0].source
        about = {
            "holder": self._holder, "queue": self._queue, "topic": source.topic, "partition": source.partition,
            "offsets": [message.offset for message in messages],
        }  # fmt: skip
        where = markers_partition(source.topic, source.partition, self._count)
        data = self._protocol.encode(kind, {**about, **fields})
        await self._producer.send_and_wait(self._markers, data, partition=where)


async def send(
    protocol: Protocol,
    servers: str,
    prefix: str,
    queue: str,
    values: Sequence[bytes],
    headers: Sequence[tuple[str, bytes]] = (),
) -> None:
    """What a sender does."""
    topic = protocol.names.topic("messages", prefix)
    async with AIOKafkaProducer(bootstrap_servers=servers, acks="all", enable_idempotence=True) as producer:
        partitions = sorted(await producer.partitions_for(topic))
        for number, value in enumerate(values):
            partition = partitions[number % len(partitions)]
            await producer.send_and_wait(
                topic, value, key=queue.encode(), partition=partition, headers=list(headers)
            )  # fmt: skip
