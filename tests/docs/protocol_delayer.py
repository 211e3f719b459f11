"""What docs/protocol.md says of delaying, cancelling and moving, on a real broker."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, NamedTuple, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.docs.protocol_client import Protocol, Values, drawn_topic, markers_partition

#: After which a question is asked again, and given up.
AGAIN_S, GIVE_UP_S = 2.0, 60.0


class Identity(NamedTuple):
    """Of a message."""

    topic: str
    partition: int
    offset: int

    @property
    def id(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Delayer:
    """Delays messages of one queue, and asks for them to be cancelled or moved."""

    def __init__(self, protocol: Protocol, servers: str, prefix: str, queue: str) -> None:
        self._protocol, self._queue, self._servers = protocol, queue, servers
        self._markers = protocol.names.topic("marker batches", prefix)
        self._topic = drawn_topic(random.getrandbits(128))
        self._number = 0

    async def __aenter__(self) -> Self:
        self._producer = AIOKafkaProducer(bootstrap_servers=self._servers, acks="all", enable_idempotence=True)
        await self._producer.start()
        self._count = len(await self._producer.partitions_for(self._markers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._producer.stop()

    async def delay(
        self, values: list[bytes], times_ms: list[int], *, relative: bool, times_written: int = 1
    ) -> list[Identity]:
        """Steps 1 to 4; what is written again says from where on all is known."""
        offsets = list(range(self._number, self._number + len(values)))
        self._number += len(values)
        fields: Values = {
            "offsets": offsets, "times": times_ms, "relative": relative, "values": values,
            "timestamps": [int(time.time() * 1000)] * len(values),
            "from_offset": -1 if times_written == 1 else offsets[0],
        }  # fmt: skip
        # Its own number for the partition, too: any will do.
        identities = [Identity(self._topic, 7, offset) for offset in offsets]
        for _ in range(times_written):
            await self._write("DELAY", identities[0], self._draw(), fields)
        return identities

    async def cancel(self, identity: Identity) -> bool:
        """Return whether it will not be delivered."""
        return await self._ask("CANCEL", identity, {})

    async def move(self, identity: Identity, time_ms: int, *, relative: bool) -> bool:
        """Return whether it will be delivered at another time."""
        return await self._ask("RESCHEDULE", identity, {"times": [time_ms], "relative": relative})

    async def _ask(self, kind: str, identity: Identity, fields: Values) -> bool:
        partition = TopicPartition(self._markers, markers_partition(identity.topic, identity.partition, self._count))
        consumer = AIOKafkaConsumer(bootstrap_servers=self._servers, isolation_level="read_committed")
        await consumer.start()
        try:
            consumer.assign([partition])
            consumer.seek(partition, (await consumer.end_offsets([partition]))[partition])
            holder = self._draw()
            async with asyncio.timeout(GIVE_UP_S):
                while True:
                    await self._write(kind, identity, holder, {**fields, "offsets": [identity.offset]})
                    decided = await self._listen(consumer, kind, identity, holder)
                    if decided is not None:
                        return decided
        finally:
            await consumer.stop()

    async def _listen(self, consumer: Any, kind: str, identity: Identity, holder: int) -> bool | None:
        until = time.monotonic() + AGAIN_S
        while time.monotonic() < until:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    decided = self._decide(kind, identity, holder, *self._protocol.decode(record.value))
                    if decided is not None:
                        return decided
        return None

    def _decide(self, question: str, identity: Identity, holder: int, kind: str, values: Values) -> bool | None:
        """By the table of the page."""
        about = (values.get("topic"), values.get("partition"))
        if about != identity[:2] or identity.offset not in values["offsets"]:
            return None
        said = kind
        if kind == "ANSWERED":
            if values["holder"] != holder:
                return None
            outcome = values["outcomes"][values["offsets"].index(identity.offset)]
            said = f"ANSWERED with this request's holder, outcome {outcome}"
        for row in self._protocol.deciding:
            told = row["marker about the identity"]
            if said == told or said in told.split(", "):
                return None if row[question] == "undecided: keep reading" else not row[question].startswith("too late")
        return None

    async def _write(self, kind: str, identity: Identity, holder: int, fields: Values) -> None:
        about = {"holder": holder, "queue": self._queue, "topic": identity.topic, "partition": identity.partition}
        where = markers_partition(identity.topic, identity.partition, self._count)
        data = self._protocol.encode(kind, {**about, **fields})
        await self._producer.send_and_wait(self._markers, data, partition=where)

    def _draw(self) -> int:
        return random.getrandbits(64) or 1
