"""What a test sees of the broker in memory, and how clients find it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest

import marq
from marq.testing import Broker, ClientLeftRunning
from marq.testing.topics import Topic, Unplaced
from tests.effective import effective


async def test_where_messages_are() -> None:
    async with Broker() as broker, broker.producer(codec=marq.JSON) as producer, broker.consumer("q") as consumer:
        await producer.send_many("q", [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}], headers={"a": b"1"})
        assert [message.value["n"] for message in broker.messages("q", codec=marq.JSON)] == [1, 2, 3, 4]

        acked, released, rejected, held = await consumer.receive()
        await acked.ack()
        await released.release(60)
        await rejected.reject("no good")

        assert [message.id for message in broker.sent("q")] == [acked.id, released.id, rejected.id, held.id]
        assert broker.messages("q") == []
        assert [message.id for message in broker.in_flight("q")] == [held.id]
        assert [message.id for message in broker.delayed("q")] == [released.id]
        assert [(message.body, message.headers) for message in broker.acked("q")] == [(b'{"n":1}', {"a": b"1"})]
        [letter] = broker.dead_letters("q", codec=marq.JSON)
        assert (letter.value, letter.reason, letter.attempt) == ({"n": 3}, "no good", 1)
        assert broker.dead_letters("other") == []
        assert broker.dead_letters() == broker.dead_letters("q")

        await broker.advance(timedelta(minutes=1))
        assert [(message.id, message.attempt) for message in broker.messages("q")] == [(released.id, 2)]
        assert [message.id for message in broker.sent("q")] == [acked.id, released.id, rejected.id, held.id]


async def test_delayed_and_deduplicated_messages_are_among_the_sent_ones() -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer("q") as consumer:
        plain = await producer.send("q", b"plain")
        delayed = await producer.send("q", b"delayed", delay=5)
        accepted = await producer.send("q", b"with an id", deduplication_id="i")
        duplicate = await producer.send("q", b"with an id", deduplication_id="i")
        sent = sorted(receipt.id for receipt in (plain, delayed, accepted, duplicate))
        assert sorted(message.id for message in broker.sent("q")) == sent
        assert broker.sent("other") == []

        # Neither their delivery nor a redrive sends them once more.
        await broker.advance(5)
        for message in await consumer.receive():
            await message.reject("no good")
        await broker.settle()
        async with marq.DeadLetters(bootstrap_servers=broker.address) as dead_letters:
            await dead_letters.redrive("q")
        await broker.settle()
        assert sorted(message.id for message in broker.sent("q")) == sent


async def test_of_two_consumers_with_one_instance_id_the_first_stops_with_an_error_and_the_second_goes_on() -> None:
    async with Broker() as broker, broker.producer() as producer:
        one, two = (broker.consumer("q", instance_id="pod-1") for _ in range(2))
        async with one:
            await producer.send("q", b"held")
            [held] = await one.receive()
            waiting = asyncio.create_task(one.receive(wait=60))
            async with two, broker.consumer("q", instance_id="pod-2") as other:
                with pytest.raises(marq.ConfigError, match="joined the group with the same instance_id 'pod-1'"):
                    await waiting
                await held.ack()
                await producer.send_many("q", [b"x"] * 20)
                await broker.settle()

                received = [*await two.receive(20), *await other.receive(20)]
                assert len(received) == 20
                assert [message.body for message in broker.acked("q")] == [b"held"]


async def test_queues_are_defined_as_in_queues_toml() -> None:
    broker = Broker(queues={"q": {"lease": 5, "group": "g"}}, defaults={"max_attempts": 2})
    broker.define("other", lease=timedelta(minutes=1), backoff={"base": 3})
    async with broker:
        assert broker.queues["q"] == effective(lease=5, max_attempts=2, group="g")
        assert (broker.queues["other"].lease, broker.queues["other"].backoff["base"]) == (60, 3)

        broker.define("q", lease=7)
        await broker.settle()
        assert broker.queues["q"] == effective(lease=7, max_attempts=2)
        await broker.queues.change("q", lease=9)
        assert broker.queues["q"].lease == 9

    with pytest.raises(marq.ConfigError, match="queue 'q': lease: expected a number"):
        broker.define("q", lease=0)
    with pytest.raises(marq.ConfigError, match="unknown key"):
        Broker(queues={"q": {"leese": 3}})
    with pytest.raises(marq.ConfigError, match=r"\[defaults\] can't name 'group'"):
        Broker(defaults={"group": "g"})


async def test_other_programs_write_to_topics() -> None:
    async with Broker() as broker:
        broker.create_topic("orders", 2)
        broker.define("orders", topic="orders")
        async with broker.consumer("orders") as consumer:
            for key in (b"customer", b"orders"):
                at = broker.produce("orders", b"x", key=key, headers=[("a", "1")], partition=1)
                [waiting] = broker.messages("orders")
                [message] = await consumer.receive()
                [in_flight] = broker.in_flight("orders")
                assert (message.id, message.headers) == (at, {"a": b"1"})
                assert [seen.key for seen in (waiting, in_flight, message)] == [key] * 3
                await message.ack()
        with pytest.raises(marq.ConfigError, match=r"topic 'no' does not exist: there are .*orders"):
            broker.produce("no", b"x")
        with pytest.raises(marq.ConfigError, match="already exists"):
            broker.create_topic("orders")
        for other in ("sales", "marq.messages"):
            with pytest.raises(marq.ConfigError, match=f"topic {other} was not created with create_topic"):
                broker.delete_topic(other)
        broker.delete_topic("orders")
        broker.create_topic("orders")


async def test_each_broker_has_a_name_of_its_own_and_a_given_one_is_shared() -> None:
    one, other = Broker(), Broker()
    assert one.address != other.address
    assert one.address.startswith("memory://")
    shared = Broker("shared")
    async with marq.Producer("memory://shared") as producer:
        await producer.send("q", b"x")

    assert [message.body for message in shared.messages("q")] == [b"x"]
    assert one.messages("q") == other.messages("q") == []
    shared.close()
    assert Broker("shared").messages("q") == []
    with pytest.raises(marq.ConfigError, match="expected a name after memory://"):
        marq.Producer("memory://")


def test_what_one_event_loop_left_is_there_for_the_next_one_when_that_is_closed() -> None:
    broker = Broker()

    async def send_and_hold() -> None:
        async with broker.producer() as producer:
            await producer.send_many("q", [b"1", b"2"])
        # Never stopped: its loop ends, and it with it.
        consumer = broker.consumer("q", lease=30)
        await consumer.start()
        assert len(await consumer.receive(1)) == 1

    async def receive() -> list[int]:
        async with broker.consumer("q") as consumer:
            first, second = [(await consumer.receive(1, wait=60))[0] for _ in range(2)]
            await consumer.ack([first, second])
            return sorted([first.attempt, second.attempt])

    asyncio.run(send_and_hold())
    assert len(broker.messages("q")) == 1

    assert asyncio.run(receive()) == [1, 1]
    assert len(broker.acked("q")) == 2


def test_a_pause_that_began_in_one_event_loop_ends_in_the_next_one() -> None:
    with contextlib.closing(Broker()) as broker:

        async def pause() -> None:
            async with marq.Queues(broker.address) as queues:
                await broker.settle()
                await queues.pause("emails", duration=600)

        async def receive() -> tuple[list[bytes], bool, list[bytes]]:
            async with broker.producer() as producer, broker.consumer("emails") as consumer:
                await producer.send("emails", b"x", delay=30)
                before = [message.value for message in await consumer.receive(wait=60)]
                # The end of a pause is rounded up to a second.
                await broker.advance(541)
                async with marq.Queues(broker.address) as queues:
                    return (
                        before,
                        queues["emails"].paused,
                        [message.value for message in await consumer.receive(wait=1)],
                    )

        asyncio.run(pause())

        assert asyncio.run(receive()) == ([], False, [b"x"])


async def test_a_pause_that_began_before_the_first_consumer_ends_for_all_clients() -> None:
    with contextlib.closing(Broker()) as broker:
        async with marq.Queues(broker.address) as queues, broker.producer() as producer:
            await queues.pause("emails", duration=60)
            async with broker.consumer("emails") as consumer:
                await producer.send("emails", b"x", delay=30)
                await broker.advance(59)
                assert queues["emails"].paused
                assert len(broker.delayed("emails")) == 1
                await broker.advance(2)

                assert not queues["emails"].paused
                [message] = await consumer.receive(wait=1)
                await message.ack()


async def test_consumers_and_time_belong_in_one_event_loop() -> None:
    async with Broker() as broker, broker.consumer("q"):

        def elsewhere(call: object) -> None:
            with pytest.raises(marq.ConfigError, match=r"memory://.* thread 'MainThread'.*thread 'elsewhere'.*NAME"):
                asyncio.run(call())  # type: ignore[operator]

        for call in (lambda: broker.consumer("q").start(), lambda: broker.settle(), lambda: broker.advance(1)):
            thread = threading.Thread(target=elsewhere, args=[call], name="elsewhere")
            thread.start()
            await asyncio.to_thread(thread.join)


async def test_a_synchronous_producer_wakes_consumers_of_another_thread() -> None:
    async with Broker() as broker, broker.consumer("q") as consumer:
        seen: list[bytes] = []

        async def handle(message: marq.Message) -> None:
            seen.append(message.value)

        running = asyncio.create_task(consumer.run(handle))
        await broker.settle()

        # Called where the service calls it: here in the thread of the event loop, which it blocks.
        with marq.SyncProducer(broker.address) as producer:
            producer.send("q", b"x")
        await broker.settle()

        assert seen == [b"x"]
        await consumer.stop()
        await running


async def test_batches_of_two_threads_have_their_own_offsets() -> None:
    topic, begun, go_on = Topic("t", 1), threading.Event(), threading.Event()

    def slow() -> Iterator[Unplaced]:
        yield None, b"1", ()
        begun.set()
        go_on.wait(60)
        yield None, b"2", ()

    first = asyncio.create_task(asyncio.to_thread(topic.extend, 0, 0, slow()))
    await asyncio.to_thread(begun.wait, 60)
    second = asyncio.create_task(asyncio.to_thread(topic.append, 0, 0, None, b"3"))
    go_on.set()

    assert (await first, await second) == (0, 2)
    assert [record.value for record in topic.logs[0]] == [b"1", b"2", b"3"]


async def test_clients_that_are_left_running_are_named_at_the_end() -> None:
    broker = Broker()
    producer, consumer = broker.producer(), broker.consumer("emails")
    await producer.start()
    await consumer.start()

    with pytest.warns(ClientLeftRunning, match=r"a Consumer \(Kafka group marq\.queue\.emails\), a Producer.*stop\(\)"):
        broker.close()

    await producer.stop()
    await consumer.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        broker.close()


async def test_a_marker_that_cannot_be_read_goes_into_quarantine() -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer("q") as consumer:
        await producer.send("q", b"x")
        [message] = await consumer.receive()
        namespace = broker._namespace

        namespace.owners[0].append(b"garbage")

        [record] = namespace.unreadable.logs[0]
        assert record.value == b"garbage"
        assert dict(record.headers)["marq-origin"].startswith(b"marq.markers/0/")
        await message.ack()
        assert len(broker.acked("q")) == 1


async def test_settings_are_read_in_the_units_in_which_they_are_written() -> None:
    async with Broker(queues={"q": {"lease": 2.5, "backoff": [1, 5], "max_attempts": "unlimited"}}) as broker:
        settings = broker.queues["q"]

        assert (settings.lease, settings.delay, settings.max_attempts) == (2.5, 0, "unlimited")
        assert settings.backoff == {"delays": [1, 5], "jitter": False}
        assert not [name for name in dir(settings) if name.endswith("_ms")]


async def test_records_that_a_test_produces_to_the_markers_topic_do_not_stop_the_tracker() -> None:
    async with Broker() as broker, broker.producer() as producer, broker.consumer("q") as consumer:
        markers = broker._memory.namespace(broker._settings).markers
        for partition in range(markers.partitions):
            broker.produce(markers.name, b"not a marker", partition=partition)

        for number in range(2 * markers.partitions):
            await producer.send("q", b"%d" % number)
            await consumer.ack(await consumer.receive(1))

        assert len(broker.acked("q")) == 2 * markers.partitions
