"""Settings of queues at run time: who changes them, and who sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.records_to_delete import RecordsToDelete

import marq
from broker.embedded import EmbeddedBroker
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from tests.client.waiting import read_all, until
from tests.effective import effective

#: So soon everybody must have seen a change.
SEEN_S = 2.0


@pytest.fixture
async def queues(servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    async with marq.Queues(servers, prefix=prefix) as started:
        yield started


@pytest.fixture
async def other(queues: marq.Queues, servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    """A reader of its own, on the same installation."""
    async with marq.Queues(servers, prefix=prefix) as started:
        yield started


@pytest.fixture
async def producer(servers: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=servers) as started:
        yield started


async def test_a_queue_that_nobody_defined_has_the_defaults(queues) -> None:
    assert queues["anything"] == effective()


async def test_a_change_holds_when_it_returns_and_is_seen_by_all(queues, other) -> None:
    found = await queues.change("emails", lease=5, backoff={"base": 2, "jitter": False}, group="background")

    assert found == effective(lease=5, backoff={"base": 2, "jitter": False}, group="background")
    assert queues["emails"] == found
    await until(lambda: other["emails"] == found, SEEN_S)
    assert other.definitions.queues_of("background") == ["emails"]


async def test_who_starts_later_knows_all_that_was_changed_before(queues, servers, prefix) -> None:
    for number in range(40):
        await queues.change(f"queue-{number % 5}", max_attempts=number + 1)

    async with marq.Queues(servers, prefix=prefix) as later:
        assert [later[f"queue-{number}"].max_attempts for number in range(5)] == [36, 37, 38, 39, 40]
        assert later.definitions.names() == [f"queue-{number}" for number in range(5)]


async def test_none_takes_a_key_back_and_a_reset_all(queues, other) -> None:
    await queues.change("emails", lease=5, max_attempts=2, dead_letter=False)

    assert await queues.change("emails", lease=None) == effective(max_attempts=2, dead_letter=False)
    assert await other.reset("emails") == effective()
    await until(lambda: queues["emails"] == effective(), SEEN_S)
    assert queues.definitions.names() == []


async def test_a_change_that_changes_nothing_writes_nothing(queues, servers, names) -> None:
    await queues.change("emails", lease=5)

    await queues.change("emails", lease=5)
    await queues.change("emails")
    await queues.change("other", lease=None)
    await queues.reset("other")

    assert len(await read_all(servers, names.queues)) == 1


async def test_durations_may_be_timedeltas(queues, servers, names) -> None:
    found = await queues.change("emails", lease=timedelta(minutes=1), backoff={"max": timedelta(hours=1)})

    assert (found.lease, found.backoff["max"]) == (60, 3_600)
    (record,) = await read_all(servers, names.queues)
    assert json.loads(record.value) == {"lease": 60.0, "backoff": {"max": 3600.0}}


async def test_a_listener_is_called_after_each_change_until_it_ends(queues, other) -> None:
    calls: list[int] = []

    def broken() -> None:
        raise ZeroDivisionError

    other.listen(broken)
    end = other.listen(lambda: calls.append(other["emails"].max_attempts))
    await queues.change("emails", max_attempts=2)
    await until(lambda: calls == [2], SEEN_S)
    await queues.change("emails", max_attempts=3)
    await until(lambda: calls == [2, 3], SEEN_S)

    end()
    end()
    await queues.change("emails", max_attempts=4)
    await until(lambda: other["emails"].max_attempts == 4, SEEN_S)
    assert calls == [2, 3]


async def test_two_who_change_a_queue_at_once_lose_nothing_of_each_other(queues, other) -> None:
    for number in range(1, 11):
        await asyncio.gather(
            queues.change("emails", lease=number), other.change("emails", max_attempts=number, concurrency=number)
        )

        wanted = effective(lease=number, max_attempts=number, concurrency=number)
        await until(lambda: queues["emails"] == other["emails"] == wanted, SEEN_S)  # noqa: B023


async def test_callers_of_one_client_take_turns(queues, other) -> None:
    await asyncio.gather(*[queues.change(f"queue-{number % 3}", max_attempts=number + 1) for number in range(12)])

    assert [queues[f"queue-{number}"].max_attempts for number in range(3)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("key", "value"),
    [
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
    ],
)
async def test_what_is_no_definition_is_said_and_passed_over(
    queues, servers, prefix, names, producer, key, value, caplog
):
    await queues.change("emails", lease=5)

    sent = await producer.send_and_wait(names.queues, value, key)
    await queues.change("other", lease=6)

    assert f"{names.queues}/0/{sent.offset} is no definition of a queue and is passed over" in caplog.text
    assert queues["emails"].lease == 5
    async with marq.Queues(servers, prefix=prefix) as later:
        assert (later["emails"].lease, later["other"].lease) == (5, 6)


async def test_keys_of_a_newer_version_are_passed_over(queues, names, producer) -> None:
    await producer.send_and_wait(names.queues, b'{"group": "background", "colour": "blue"}', b"file:emails")

    await until(lambda: queues["emails"].group == "background", SEEN_S)


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
    # Kafka deletes records of topics only that are not just compacted.
    await _alter(admin, names.queues, "compact,delete")
    await admin.delete_records({TopicPartition(names.queues, 0): RecordsToDelete(before_offset=-1)})
    await _alter(admin, names.queues, "compact")
    await admin.close()

    async with marq.Queues(servers, prefix=prefix) as later:
        assert later["emails"] == effective()


async def _alter(admin: AIOKafkaAdminClient, topic: str, policy: str) -> None:
    # What is not named falls back to the broker's default.
    config = {"cleanup.policy": policy, "message.timestamp.type": "LogAppendTime"}
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease": 0}, r"^queue 'emails': lease: expected a number of seconds above 0"),
        ({"max_attempts": "3"}, r"^queue 'emails': max_attempts: expected a whole number"),
        ({"backoff": {"base": -1}}, r"^queue 'emails': backoff.base: "),
        ({"group": ""}, r"^queue 'emails': group: a group's name must not be empty"),
        ({"handler": "send"}, r"^queue 'emails': handler: expected 'module:function'"),
        ({"topic": "a b"}, r"^queue 'emails': topic: expected the name of a topic"),
        ({"topic": "shop-orders"}, r"^queue 'emails': topic 'shop-orders' belongs to queue 'orders'"),
    ],
)
async def test_a_wrong_change_is_named_and_not_made(queues, servers, names, settings, said) -> None:
    await queues.change("orders", topic="shop-orders")

    with pytest.raises(marq.ConfigError, match=said):
        await queues.change("emails", **settings)

    assert queues["emails"] == effective()
    assert len(await read_all(servers, names.queues)) == 1


async def test_marqs_own_topics_are_nobodys(queues, names) -> None:
    with pytest.raises(marq.ConfigError, match=f"topic '{names.markers}' is marq's own"):
        await queues.change("emails", topic=names.markers)


async def test_a_topic_may_go_from_one_queue_to_another(queues) -> None:
    await queues.change("orders", topic="shop-orders")
    await queues.change("orders", topic=None)

    assert (await queues.change("emails", topic="shop-orders")).topic == "shop-orders"


async def test_foreign_words_and_foreign_names_are_refused(queues) -> None:
    with pytest.raises(TypeError, match="max_attempts"):
        await queues.change("emails", max_retries=3)
    with pytest.raises(TypeError, match="'lese'"):
        await queues.change("emails", lese=3)
    with pytest.raises(marq.ConfigError, match="must not be empty"):
        await queues.change("", lease=3)
    with pytest.raises(marq.ConfigError, match="not int"):
        queues[3]


async def test_installations_do_not_see_each_other(queues, servers, prefix) -> None:
    async with marq.Queues(servers, prefix=f"{prefix}b") as elsewhere:
        await queues.change("emails", lease=5)
        await elsewhere.change("emails", max_attempts=2)

        assert elsewhere["emails"] == effective(max_attempts=2)
        assert queues["emails"] == effective(lease=5)


async def test_within_another_client_no_topic_is_made_a_second_time(servers, prefix) -> None:
    settings = ClientSettings.read(servers, {"prefix": prefix}, environment={})
    await ensure_topics(settings)

    queues = marq.Queues.of(settings)
    await queues.start()
    await queues.change("emails", lease=5)
    await queues.stop()

    assert queues.definitions("emails").lease_ms == 5_000


async def test_start_and_stop_may_be_called_twice_and_again(servers, prefix) -> None:
    queues = marq.Queues(servers, prefix=prefix)
    with pytest.raises(marq.MarqError, match="not started"):
        queues["emails"]
    with pytest.raises(marq.MarqError, match="not started"):
        await queues.change("emails", lease=5)

    await queues.start()
    await queues.start()
    await queues.change("emails", lease=5)
    await queues.stop()
    await queues.stop()
    async with marq.Queues(servers, prefix=prefix) as other:
        await other.reset("emails")
    await queues.start()
    assert queues["emails"] == effective()
    await queues.stop()


async def test_without_a_broker_start_says_so() -> None:
    with pytest.raises(marq.BrokerUnavailable, match=r"127\.0\.0\.1:1 .*MARQ_BOOTSTRAP_SERVERS"):
        await marq.Queues("127.0.0.1:1", connect_timeout=1).start()


async def test_a_broker_that_goes_away_takes_nothing_away(prefix) -> None:
    with EmbeddedBroker() as broker:
        servers = broker.bootstrap_servers
        async with marq.Queues(servers, prefix=prefix, request_timeout=2) as queues:
            await queues.change("emails", lease=5)

            await asyncio.to_thread(broker.kill)
            with pytest.raises(marq.BrokerUnavailable):
                await queues.change("emails", lease=6)
            assert queues["emails"].lease == 5

            await asyncio.to_thread(broker.start)
            async with marq.Queues(servers, prefix=prefix) as other:
                await other.change("emails", lease=7)
            await until(lambda: queues["emails"].lease == 7)
            assert (await queues.change("emails", lease=8)).lease == 8
