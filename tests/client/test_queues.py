"""The topic with the settings of queues: other writers, records that are not settings, and records that are gone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.errors import PolicyViolationError

import marq
from marq.queues import definition_log
from marq.settings.definitions import sqs_key
from tests.client.waiting import until
from tests.effective import effective
from tests.worker.harness import Namespace, eventually

#: Shorter than the wait of a fetch.
LIMIT_S = 10.0

NOT_DEFINITIONS = [
    (b"", b"{}"),
    (b"change:emails", b"no JSON"),
    (b"change:emails", b"[" * 100_000),
    (b"change:emails", b"[1]"),
    (b"change:emails", b'{"lease": NaN}'),
    (b"change:emails", b'{"lease": 0}'),
    (b"change:", b"{}"),
    (b"\xff", b"{}"),
    (b"other:emails", b"{}"),
    (b"defaults", b'{"handler": "a:b"}'),
]


async def test_concurrent_changes_of_a_queue_are_merged(queues, servers, prefix) -> None:
    async with marq.Queues(servers, prefix=prefix) as other:
        for number in range(1, 11):
            await asyncio.gather(
                queues.change("emails", lease=number), other.change("emails", max_attempts=number, concurrency=number)
            )

            wanted = effective(lease=number, max_attempts=number, concurrency=number)
            await until(lambda: queues["emails"] == other["emails"] == wanted)  # noqa: B023


async def test_records_of_one_definition_are_read_together(queues, servers, prefix) -> None:
    tags = {"tags": {str(number): "x" * 1_000 for number in range(50)}}
    seen = []
    async with marq.Queues(servers, prefix=prefix) as other:
        other.listen(lambda: seen.append((other["emails"].lease, other.definitions.sqs("emails"))))
        await queues.define("emails", {sqs_key("emails"): tags}, lease=7)
        await until(lambda: other["emails"].lease == 7)

    assert seen == [(7, tags)]


async def test_a_client_that_waits_for_new_definitions_can_tell_at_once_that_it_knows_all(
    servers, prefix, monkeypatch
) -> None:
    monkeypatch.setattr(definition_log, "FETCH_WAIT_MS", 30_000)
    async with marq.Queues(servers, prefix=prefix) as queues:
        for number in range(1, 4):
            await queues.change("emails", lease=number)

            # The broker has nothing to return for the next fetch, which must not hold up the question about the end.
            await queues.sync(LIMIT_S)
            await queues.sync(LIMIT_S)


async def test_records_that_are_not_definitions_are_named_and_passed_over(
    queues, servers, prefix, names, caplog
) -> None:
    await queues.change("emails", lease=5)

    async with AIOKafkaProducer(bootstrap_servers=servers) as kafka:
        sent = [await kafka.send_and_wait(names.queues, value, key) for key, value in NOT_DEFINITIONS]
        # A newer version writes keys that this one does not know.
        await kafka.send_and_wait(names.queues, b'{"group": "background", "colour": "blue"}', b"file:emails")
    await queues.change("other", lease=6)

    for record in sent:
        assert f"{names.queues}/0/{record.offset} is not a definition of a queue and is skipped" in caplog.text
    assert queues["emails"] == effective(lease=5, group="background")
    async with marq.Queues(servers, prefix=prefix) as later:
        assert (later["emails"], later["other"].lease) == (queues["emails"], 6)


async def test_a_log_that_ends_with_no_record_is_read_to_its_end(queues, servers, prefix, names) -> None:
    """Control records have offsets and are never seen, like what compaction took away."""
    await queues.change("emails", lease=5)
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{prefix}-test") as producer:
        for _ in range(3):
            await producer.begin_transaction()
            await producer.send(names.queues, b'{"lease": 7}', b"file:other")
            await producer.commit_transaction()

    async with marq.Queues(servers, prefix=prefix) as later:
        assert (later["emails"].lease, later["other"].lease) == (5, 7)
        assert (await later.change("emails", lease=6)).lease == 6


async def test_a_log_whose_records_are_all_gone_is_read_to_its_end(queues, servers, prefix, names) -> None:
    await queues.change("emails", lease=5)
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    everything = {TopicPartition(names.queues, 0): RecordsToDelete(before_offset=-1)}

    async def deleted() -> bool:
        with suppress(PolicyViolationError):
            return bool(await admin.delete_records(everything))
        return False

    async with Namespace(servers, names) as namespace:
        # Kafka deletes records of topics only that are not just compacted. What is not named falls back to a default.
        settings = {"cleanup.policy": "compact,delete", "message.timestamp.type": "LogAppendTime"}
        await namespace.alter(names.queues, settings)
        # Its description changes a moment before its log does.
        await eventually(deleted)
        await namespace.alter(names.queues, {**settings, "cleanup.policy": "compact"})
    await admin.close()

    async with marq.Queues(servers, prefix=prefix) as later:
        assert later["emails"] == effective()
