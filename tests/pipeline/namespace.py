"""Marq's topics on a real Kafka without a worker: tests write all records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from marq.wire.marker_codec import encode
from marq.wire.markers import Batch
from marq.wire.names import Names
from pipeline.ingest import Ingest
from pipeline.kafka import Connection, TopicAdmin
from pipeline.lake import Lake
from tests.client.waiting import wait_until

PARTITIONS = 2
Headers = Sequence[tuple[str, bytes | None]]
#: Topic, partition and offset.
Place = tuple[str, int, int]


@dataclass
class Namespace:
    """Topics of one prefix."""

    servers: str
    names: Names
    written: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        self._producer = Producer({"bootstrap.servers": self.servers})

    def make(self, *topics: str, config: Mapping[str, str] = MappingProxyType({})) -> Self:
        """Create topics, by default all that a worker creates."""
        all_ = (self.names.messages, self.names.markers, self.names.dead_letters, self.names.queues)
        log_time = {"message.timestamp.type": "LogAppendTime"}
        new = [
            NewTopic(topic, PARTITIONS, 1, config=log_time if topic == self.names.markers else {**config})
            for topic in topics or all_
        ]
        for made in self.admin.create_topics(new).values():
            made.result(30)
        wait_until(lambda: {topic.topic for topic in new} <= self.admin.list_topics(timeout=30).topics.keys())
        return self

    def write(
        self,
        topic: str,
        value: bytes | None = b"value",
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int = 0,
        timestamp_ms: int = 0,
        producer: Producer | None = None,
    ) -> Place:
        """Write a record and return its place."""
        found: list[Place] = []

        def delivered(error: object, message: Any) -> None:
            assert error is None, error
            found.append((topic, partition, message.offset()))

        chosen = producer or self._producer
        settings: dict[str, Any] = {"timestamp": timestamp_ms} if timestamp_ms else {}
        chosen.produce(topic, value, key, partition, headers=list(headers), on_delivery=delivered, **settings)
        chosen.flush(30)
        return found[0]

    def mark(self, *batches: Batch, partition: int = 0, producer: Producer | None = None) -> None:
        """Write markers."""
        for batch in batches:
            self.write(self.names.markers, encode(batch), partition=partition, producer=producer)

    def send(self, count: int) -> None:
        """Write messages to all partitions in turn."""
        for number in range(count):
            self._producer.produce(self.names.messages, b"v", b"emails", number % PARTITIONS)
            self._producer.poll(0)
        self._producer.flush(30)

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete the records before an offset, as retention does."""
        [deleted] = self.admin.delete_records([TopicPartition(topic, partition, before)]).values()
        deleted.result(30)

    @contextmanager
    def transaction(self, *, commit: bool) -> Iterator[Producer]:
        """A producer in a transaction."""
        settings = {"bootstrap.servers": self.servers, "transactional.id": f"{self.names.prefix}-t"}
        producer = Producer(settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        yield producer
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
        # The broker confirms the end before each partition has it; a successor has to wait for that.
        Producer(settings).init_transactions(30)


def ingest(
    spark: SparkSession,
    connection: Connection,
    lake: Lake,
    *,
    payload: bool = False,
    limits: tuple[int, int] = (1_000, 1_000),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """One round, as the job makes it."""
    return Ingest(
        spark, connection, TopicAdmin(spark, connection), lake, payload=payload, limits=limits, say=say
    ).round()
