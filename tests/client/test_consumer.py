"""Consumers as members of real groups."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

import marq
from tests.client.waiting import until
from tests.worker.harness import take


@pytest.fixture
async def make_consumer(servers, prefix):
    consumers: list[marq.Consumer] = []

    def make(queue: str = "q", **options) -> marq.Consumer:
        consumers.append(marq.Consumer(queue, servers, prefix=prefix, connect_timeout=60, **options))
        return consumers[-1]

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


async def test_a_full_consumer_stays_in_its_group_past_max_poll_interval(producer, make_consumer, caplog) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(10)])
    consumer = make_consumer(max_in_flight=2, max_poll_interval=1, session_timeout=30, lease=9)
    await consumer.start()
    held = await take(consumer, 2)
    caplog.set_level(logging.INFO, "aiokafka")

    kafka = consumer._running._reader._consumer
    generation = kafka._coordinator.generation
    # Leases are renewed after a third of their time: three times the interval, in which nothing may be fetched.
    renewals = 0
    receiver = consumer._running.receiver
    renew = receiver.writer.renew

    async def counted() -> bool:
        nonlocal renewals
        renewals += 1
        return await renew()

    receiver.writer.renew = counted
    await until(lambda: renewals)

    assert receiver.prefetch.in_flight == 2
    assert kafka._coordinator.generation == generation
    assert "LeaveGroup" not in caplog.text
    await consumer.ack(held)
    assert len(await take(consumer, 2)) == 2


async def test_a_consumer_warns_that_no_tracker_runs(make_consumer, caplog, monkeypatch) -> None:
    monkeypatch.setattr("marq.queues.tracker_watch.LOOKS_S", (0.1, 0.2))
    caplog.set_level(logging.WARNING, "marq")

    async with make_consumer():
        await until(lambda: "no tracker runs" in caplog.text, 60)

    assert "marq worker" in caplog.text


async def test_a_consumer_with_an_instance_id_comes_back_to_its_partitions_without_a_rebalance(
    producer, make_consumer, servers, prefix
) -> None:
    one = make_consumer(instance_id="pod-1")
    await one.start()
    generation = one._running._reader._consumer._coordinator.generation
    await one.stop()

    two = make_consumer(instance_id="pod-1")
    await two.start()
    await producer.send("q", b"x")

    assert len(await take(two, 1)) == 1
    assert two._running._reader._consumer._coordinator.generation <= generation + 1


async def test_of_two_consumers_with_one_instance_id_the_first_stops_with_an_error_and_the_second_goes_on(
    producer, make_consumer
) -> None:
    # It reads nothing while it holds a message, so no read can tell it.
    one = make_consumer(instance_id="pod-1", max_in_flight=1, session_timeout=15)
    await one.start()
    await producer.send("q", b"held")
    [held] = await take(one, 1)
    generation = one._running._reader._consumer._coordinator.generation

    two = make_consumer(instance_id="pod-1", session_timeout=15)
    await two.start()
    with pytest.raises(marq.ConfigError, match="another client joined the group with the same instance_id 'pod-1'"):
        await one.receive(1, wait=60)
    await held.ack()
    await producer.send_many("q", [b"x"] * 20)

    assert len(await take(two, 20)) == 20
    assert two._running._reader._consumer._coordinator.generation == generation


async def test_a_consumer_with_an_instance_id_that_its_group_has_thrown_out_joins_again(
    producer, make_consumer, servers, names
) -> None:
    consumer = make_consumer(instance_id="pod-1", session_timeout=6)
    await consumer.start()
    coordinator = consumer._running._reader._consumer._coordinator
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    group = names.group("q")
    request = LeaveGroupRequest(group, coordinator.member_id)
    answer = await admin._send_request(request, await admin.find_coordinator(group))
    await admin.close()
    assert answer.error_code == 0
    await producer.send("q", b"x")

    assert len(await take(consumer, 1)) == 1
