"""The Kafka side of writing a history: one producer that knows each record's offset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from confluent_kafka import Consumer, Producer, TopicPartition

from marq.wire.markers import Headers

#: Records, and KiB, that a producer buffers while it waits for the broker.
_WAITING, _WAITING_KIB = 200_000, 128 * 1024
_FLUSH_SECONDS = 300.0


class Log:
    """Appends records to topics; it must be their only writer."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "batch.size": 1_000_000,
                "message.max.bytes": 1_100_000,
                "queue.buffering.max.messages": _WAITING,
                "queue.buffering.max.kbytes": _WAITING_KIB,
                "log_level": 3,  # no warnings about a broker that has just started
            }
        )
        self.ends: Counter[tuple[str, int]] = Counter()

    def write(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        at_ms: int = 0,
    ) -> int:
        """Write a record and return its offset."""
        while True:
            try:
                self._producer.produce(topic, value, key, partition, timestamp=at_ms, headers=list(headers))
                break
            except BufferError:
                self._producer.poll(0.05)
        self.ends[topic, partition] += 1
        return self.ends[topic, partition] - 1

    def write_all(self, topic: str, partition: int, records: Sequence[tuple[bytes, bytes]], at_ms: int) -> int:
        """Write records without headers, keys and values; return the offset of the first."""
        produce = self._producer.produce
        for key, value in records:
            while True:
                try:
                    produce(topic, value, key, partition, timestamp=at_ms)
                    break
                except BufferError:
                    self._producer.poll(0.05)
        self.ends[topic, partition] += len(records)
        return self.ends[topic, partition] - len(records)

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            SystemExit: records were not written, or the topics' end offsets are wrong.
        """
        left = self._producer.flush(_FLUSH_SECONDS)
        reader = Consumer({"bootstrap.servers": self._servers, "group.id": "bench-history"})
        found = {place: reader.get_watermark_offsets(TopicPartition(*place), 60.0)[1] for place in self.ends}
        reader.close()
        if left or found != dict(self.ends):
            raise SystemExit(f"bench: {left} records were not written; ends are {found}, expected {dict(self.ends)}")
