from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

import marq
from marq.core.backoff import Backoff
from marq.core.markers import Ack, Acquire, Release, Renew
from marq.topics import ensure_topics
from tests.client.tracking import tracking
from tests.client.waiting import read_all, read_markers, until


@pytest.fixture
async def producer(servers, prefix):
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
async def make_consumer(servers, prefix):
    consumers: list[marq.Consumer] = []

    def make(queue: str = "q", **options) -> marq.Consumer:
        consumers.append(marq.Consumer(queue, servers, prefix=prefix, **options))
        return consumers[-1]

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


async def receive(consumer: marq.Consumer, count: int) -> list[marq.Message]:
    messages: list[marq.Message] = []
    async with asyncio.timeout(60):
        while len(messages) < count:
            messages += await consumer.receive(count - len(messages), wait=1)
    return messages


async def test_iteration_delivers_each_message_once_and_acks_it(producer, make_consumer, servers, names) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(1_000)])
    seen: list[bytes] = []

    async with make_consumer() as consumer:
        async for message in consumer:
            async with message:
                seen.append(message.value)
            if len(seen) == 1_000:
                break

    assert sorted(map(int, seen)) == list(range(1_000))
    markers = await read_markers(servers, names.markers)
    assert sum(len(each.offsets) for each in markers if isinstance(each, Ack)) == 1_000


async def test_each_marker_names_what_the_tracker_needs(producer, make_consumer, servers, names) -> None:
    receipt = await producer.send("q", b"value", headers={"h": b"1"})

    async with make_consumer(lease=7) as consumer:
        (message,) = await receive(consumer, 1)
        await message.ack()

    acquire, ack = await read_markers(servers, names.markers)
    assert isinstance(acquire, Acquire)
    assert isinstance(ack, Ack)
    assert (acquire.source, list(acquire.offsets)) == ((names.messages, receipt.partition), [receipt.offset])
    assert (acquire.lease_ms, acquire.payloads[0].value) == (7_000, b"value")
    assert list(acquire.payloads[0].headers) == [("h", b"1")]
    assert (ack.holder, ack.source, list(ack.offsets)) == (acquire.holder, acquire.source, [receipt.offset])


async def test_receive_returns_nothing_when_nothing_comes(make_consumer) -> None:
    async with make_consumer() as consumer:
        assert await consumer.receive(wait=0.05) == []
        assert await consumer.receive(wait=0) == []


async def test_receive_waits_for_a_message(producer, make_consumer) -> None:
    async with make_consumer() as consumer:
        waiting = asyncio.create_task(consumer.receive(10, wait=20))
        await producer.send("q", b"x")

        assert [message.value for message in await waiting] == [b"x"]


async def test_a_batch_is_acked_with_one_call(producer, make_consumer, servers, names) -> None:
    await producer.send_many("q", [b"x"] * 100)

    async with make_consumer() as consumer:
        messages = await receive(consumer, 100)
        await consumer.ack(messages)
        markers = await read_markers(servers, names.markers)

    assert sum(len(each.offsets) for each in markers if isinstance(each, Ack)) == 100


async def test_a_token_finishes_a_message_from_another_consumer(producer, make_consumer, servers, names) -> None:
    await producer.send("q", b"x")
    one, two = make_consumer(), make_consumer()
    await one.start()
    (message,) = await receive(one, 1)

    await two.start()
    await two.ack(message.token)

    acks = [each for each in await read_markers(servers, names.markers) if isinstance(each, Ack)]
    assert [list(each.offsets) for each in acks] == [[message.offset]]


async def test_run_calls_a_coroutine_function_until_the_consumer_stops(producer, make_consumer) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(500)])
    seen: list[int] = []

    async def handler(message: marq.Message) -> None:
        seen.append(int(message.value))

    consumer = make_consumer()
    await consumer.start()
    running = asyncio.create_task(consumer.run(handler, concurrency=8))
    await until(lambda: len(seen) == 500)
    await consumer.stop()

    await asyncio.wait_for(running, 60)
    assert sorted(seen) == list(range(500))


async def test_run_calls_a_plain_function_in_a_thread(producer, make_consumer) -> None:
    await producer.send_many("q", [b"x"] * 10)
    threads: list[str] = []

    consumer = make_consumer()
    await consumer.start()
    running = asyncio.create_task(consumer.run(lambda message: threads.append(threading.current_thread().name), 2))
    await until(lambda: len(threads) == 10)
    await consumer.stop()
    await running

    assert threading.main_thread().name not in threads


async def test_after_a_cancelled_run_the_consumer_still_receives(producer, make_consumer) -> None:
    async def handler(message: marq.Message) -> None:
        pass

    async with make_consumer() as consumer:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.run(handler), 0.2)
        await producer.send("q", b"x")

        assert len(await receive(consumer, 1)) == 1


async def test_two_consumers_share_a_queue_and_nothing_is_lost_or_doubled(producer, make_consumer) -> None:
    seen: list[bytes] = []
    by_consumer = [0, 0]

    def handler_of(index: int):
        async def handler(message: marq.Message) -> None:
            seen.append(message.value)
            by_consumer[index] += 1

        return handler

    consumers = [make_consumer(), make_consumer()]
    running = []
    for index, consumer in enumerate(consumers):
        await consumer.start()
        running.append(asyncio.create_task(consumer.run(handler_of(index), 4)))
        await producer.send_many("q", [b"%d-%d" % (index, number) for number in range(2_000)])
    await until(lambda: len(set(seen)) == 4_000)
    # Both have partitions by now: what comes goes to both.
    before = list(by_consumer)
    await producer.send_many("q", [b"2-%d" % number for number in range(2_000)])
    await until(lambda: len(set(seen)) == 6_000)
    await asyncio.gather(*[consumer.stop() for consumer in consumers])
    await asyncio.gather(*running)

    assert len(seen) == 6_000
    assert all(after > earlier for after, earlier in zip(by_consumer, before, strict=True))


async def test_a_message_that_is_not_acked_comes_back_with_the_next_attempt(
    producer, make_consumer, servers, names
) -> None:
    receipt = await producer.send("q", b"x", headers={"h": b"1"})

    async with tracking(servers, names) as tracker, make_consumer(lease=1, max_lease=1) as consumer:
        (first,) = await receive(consumer, 1)
        (second,) = await receive(consumer, 1)
        with pytest.raises(marq.LeaseLost):
            await first.ack()
        await second.ack()
        await until(lambda: tracker.open == 0)

    assert (first.attempt, second.attempt) == (1, 2)
    assert first.id == second.id == receipt.id
    assert second.headers == {"h": b"1"}
    assert (second.value, second.sent_at) == (b"x", first.sent_at)
    assert tracker.counts("q")["expired"] == 1


async def test_a_message_that_is_held_is_renewed_and_does_not_come_back(
    producer, make_consumer, servers, names
) -> None:
    await producer.send("q", b"x")

    async with tracking(servers, names) as tracker, make_consumer(lease=1) as consumer:
        (message,) = await receive(consumer, 1)
        await until(lambda: tracker.counts("q").get("renewed", 0) >= 6)
        await message.ack()
        assert await consumer.receive(wait=0.5) == []

    assert tracker.counts("q")["redelivered"] == 0


async def test_a_released_message_comes_back_at_once_and_a_rejected_one_never(
    producer, make_consumer, servers, names
) -> None:
    await producer.send_many("q", [b"release", b"reject"])

    async with tracking(servers, names) as tracker, make_consumer() as consumer:
        for message in await receive(consumer, 2):
            if message.value == b"release":
                await message.release(0)
            else:
                await message.reject("no use")
        (again,) = await receive(consumer, 1)
        await again.ack()
        await until(lambda: tracker.open == 0)
        dead = await read_all(servers, names.dead_letters)

    assert (again.value, again.attempt) == (b"release", 2)
    assert [(record.value, dict(record.headers)["marq-reason"]) for record in dead] == [(b"reject", b"no use")]


async def test_a_failing_handler_is_retried_until_its_attempts_are_used_up(
    producer, make_consumer, servers, names
) -> None:
    await producer.send("q", b"x")
    attempts: list[int] = []

    async def handler(message: marq.Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("broken")

    backoff = Backoff(base_ms=10, jitter=False)
    async with tracking(servers, names, max_attempts=3, backoff=backoff) as tracker, make_consumer() as consumer:
        running = asyncio.create_task(consumer.run(handler))
        await until(lambda: tracker.counts("q").get("dead") == 1)
        await consumer.stop()
        await running
        (dead,) = await read_all(servers, names.dead_letters)

    assert attempts == [1, 2, 3]
    assert dict(dead.headers)["marq-error"] == b"RuntimeError: broken"


async def test_a_stop_gives_prefetched_messages_back_at_once_and_uncounted(
    producer, make_consumer, servers, names
) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(100)])
    holding = asyncio.Event()

    async def stuck(message: marq.Message) -> None:
        holding.set()
        await asyncio.Event().wait()

    async with tracking(servers, names):
        one, two = make_consumer(grace=0.1), make_consumer()
        await one.start()
        running = asyncio.create_task(one.run(stuck, concurrency=5))
        await asyncio.wait_for(holding.wait(), 60)
        await one.stop()
        await running
        await two.start()
        messages = await receive(two, 100)

    assert {message.attempt for message in messages} == {1}
    assert len({message.value for message in messages}) == 100
    releases = [each for each in await read_markers(servers, names.markers) if isinstance(each, Release)]
    assert not any(each.counted for each in releases[: len(releases) // 2])


async def test_a_full_consumer_stays_in_its_group_past_max_poll_interval(producer, make_consumer, caplog) -> None:
    await producer.send_many("q", [b"%d" % number for number in range(10)])
    consumer = make_consumer(max_in_flight=2, max_poll_interval=1, session_timeout=6, lease=1)
    await consumer.start()
    held = await receive(consumer, 2)
    caplog.set_level(logging.INFO, "aiokafka")

    kafka = consumer._running._reader._consumer
    generation = kafka._coordinator.generation
    # Six renewals of a third of a second: twice the interval, in which nothing may be fetched.
    renewals = 0
    flow = consumer._running.flow
    renew = flow.renewal.renew

    async def counted() -> bool:
        nonlocal renewals
        renewals += 1
        return await renew()

    flow.renewal.renew = counted
    await until(lambda: renewals >= 6)

    assert flow.held == 2
    assert kafka._coordinator.generation == generation
    assert "LeaveGroup" not in caplog.text
    await consumer.ack(held)
    assert len(await receive(consumer, 2)) == 2


async def test_a_consumer_warns_that_no_tracker_runs(make_consumer, caplog) -> None:
    caplog.set_level(logging.WARNING, "marq")

    async with make_consumer():
        await until(lambda: "no tracker runs" in caplog.text, 60)

    assert "faust -A app worker" in caplog.text


async def test_start_and_stop_may_be_called_twice_and_a_stopped_consumer_started_again(producer, make_consumer) -> None:
    consumer = make_consumer()
    await consumer.start()
    await consumer.start()
    await consumer.stop()
    await consumer.stop()
    await producer.send("q", b"x")

    await consumer.start()

    assert [message.value for message in await receive(consumer, 1)] == [b"x"]


async def test_iteration_ends_when_the_consumer_stops(make_consumer) -> None:
    consumer = make_consumer()
    await consumer.start()

    async def iterate() -> list[marq.Message]:
        return [message async for message in consumer]

    iterating = asyncio.create_task(iterate())
    await asyncio.sleep(0)
    await consumer.stop()

    assert await asyncio.wait_for(iterating, 60) == []


async def test_records_of_plain_producers_and_of_other_queues_share_the_topic(
    producer, make_consumer, servers, prefix, names
) -> None:
    from aiokafka import AIOKafkaProducer

    plain = AIOKafkaProducer(bootstrap_servers=servers)
    await plain.start()
    await plain.send_and_wait(names.messages, b"plain", key=b"q")
    await plain.send_and_wait(names.messages, None, key=b"q")
    await plain.send_and_wait(names.messages, b"no key")
    await plain.stop()
    await producer.send("other", b"other")

    async with make_consumer("q") as q, make_consumer("other") as other:
        assert sorted(message.value for message in await receive(q, 2)) == [b"", b"plain"]
        assert [message.value for message in await receive(other, 1)] == [b"other"]


async def test_renewals_are_one_marker_for_each_partition(producer, make_consumer, servers, names, monkeypatch) -> None:
    await producer.send_many("q", [b"x"] * 400)

    async with make_consumer(lease=3600, max_lease=7200) as consumer:
        await receive(consumer, 400)
        # Half of the lease later.
        monkeypatch.setattr(consumer._running.flow.renewal, "_clock", lambda: time.monotonic() + 1800)
        await consumer._running.flow.renewal.renew()

    renewals = [each for each in await read_markers(servers, names.markers) if isinstance(each, Renew)]
    assert sorted(len(each.offsets) for each in renewals) == [100, 100, 100, 100]


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

    assert len(await receive(two, 1)) == 1
    assert two._running._reader._consumer._coordinator.generation <= generation + 1


async def test_of_two_consumers_with_one_instance_id_the_first_stops_with_an_error_and_the_second_goes_on(
    producer, make_consumer
) -> None:
    # It reads nothing while it holds a message, so no read can tell it.
    one = make_consumer(instance_id="pod-1", max_in_flight=1, session_timeout=6)
    await one.start()
    await producer.send("q", b"held")
    [held] = await receive(one, 1)
    generation = one._running._reader._consumer._coordinator.generation

    two = make_consumer(instance_id="pod-1", session_timeout=6)
    await two.start()
    with pytest.raises(marq.ConfigError, match="another client joined the group with the same instance_id 'pod-1'"):
        await one.receive(1, wait=60)
    await held.ack()
    await producer.send_many("q", [b"x"] * 20)

    assert len(await receive(two, 20)) == 20
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

    assert len(await receive(consumer, 1)) == 1


async def test_several_clients_that_start_at_once_make_the_topics_once(servers, prefix) -> None:
    settings = marq.Producer(servers, prefix=prefix)._settings

    found = await asyncio.gather(*[ensure_topics(settings) for _ in range(5)])

    assert len(set(found)) == 1


async def test_a_handler_that_stops_its_own_consumer_is_told_how(producer, make_consumer) -> None:
    await producer.send("q", b"x")
    errors: list[marq.MarqError] = []
    stops: list[asyncio.Task[None]] = []

    async with asyncio.timeout(60), make_consumer() as consumer:

        async def handler(message: marq.Message) -> None:
            try:
                await consumer.stop()
            except marq.MarqError as error:
                errors.append(error)
            stops.append(asyncio.create_task(consumer.stop()))

        await consumer.run(handler)
        await asyncio.gather(*stops)

    assert "can't await it" in str(errors[0])


async def test_a_stop_that_is_cancelled_gives_no_grace_and_leaves_the_group_all_the_same(
    producer, make_consumer
) -> None:
    await producer.send("q", b"x")
    entered = asyncio.Event()
    before = asyncio.all_tasks()

    async def handler(message: marq.Message) -> None:
        entered.set()
        await asyncio.Event().wait()

    consumer = make_consumer(grace=3600)
    await consumer.start()
    running = asyncio.create_task(consumer.run(handler))
    async with asyncio.timeout(60):
        await entered.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.1)

    assert running.done()
    assert {task for task in asyncio.all_tasks() - before if task.get_name().startswith("marq-")} == set()
    async with make_consumer() as other:
        await producer.send_many("q", [b"y"] * 100)
        await receive(other, 100)
