"""Records of senders that are not Marq's, in the shared topic that all queues read."""

from __future__ import annotations

from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

import marq
from marq.wire.names import Names
from tests.unit.client.test_lenient_names import Raw
from tests.worker.harness import take


async def test_a_header_name_that_is_not_utf8_stops_no_consumer(servers: str, prefix: str, names: Names) -> None:
    client = {"bootstrap_servers": servers, "prefix": prefix, "partitions": 1}
    async with (
        marq.Consumer("emails", **client) as consumer,
        marq.Producer(**client) as producer,
        AIOKafkaProducer(bootstrap_servers=servers) as plain,
    ):
        batch = plain.create_batch()
        batch._builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 1 << 20)
        batch.append(key=b"emails", value=b"odd", timestamp=None, headers=[(Raw("name"), b"value")])
        await (await plain.send_batch(batch, names.messages, partition=0))
        await producer.send("emails", b"after")

        messages = await take(consumer, 2)

        await consumer.ack(messages)
    assert [message.value for message in messages] == [b"odd", b"after"]
    assert messages[0].headers == {"\ufffd caf\ufffd": b"value"}
