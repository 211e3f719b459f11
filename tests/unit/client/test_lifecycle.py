"""Start and stop of clients."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import marq
from marq.client.lifecycle import Client as AnyClient
from marq.client.lifecycle import Lifecycle
from marq.consumer.session import ConsumerSession, MemberSession
from marq.testing import Broker
from marq.wire.markers import Acquire, MixedAcquire
from tests.unit.client.fakes import LIMIT_S, HeldWrites, spin


class Client(Lifecycle[str]):
    """Opens two parts; the test decides how long the second one takes, and whether it fails."""

    def __init__(self) -> None:
        super().__init__("the client")
        self.events: list[str] = []
        self.opening = asyncio.Event()
        self.closing = asyncio.Event()
        self.closing.set()
        self.error: Exception | None = None

    async def _open(self, opened: AsyncExitStack) -> str:
        for part in ("one", "two"):
            if part == "two":
                await self.opening.wait()
                if self.error is not None:
                    raise self.error
            self.events.append(f"open {part}")
            opened.push_async_callback(self._close, part)
        return "open"

    async def _close(self, part: str) -> None:
        await self.closing.wait()
        self.events.append(f"close {part}")

    def _hurry(self, running: str) -> None:
        self.events.append("hurry")
        self.closing.set()

    def use(self) -> str:
        return self._started()


@pytest.fixture
def client() -> Client:
    return Client()


OPENED, CLOSED = ["open one", "open two"], ["close two", "close one"]


async def test_starts_and_stops_at_the_same_time_happen_once_and_one_after_the_other(client: Client) -> None:
    starting = [asyncio.create_task(client.start()) for _ in range(2)]
    stopping = [asyncio.create_task(client.stop()) for _ in range(2)]
    starting.append(asyncio.create_task(client.start()))
    await asyncio.sleep(0)
    client.opening.set()
    await asyncio.gather(*starting, *stopping)

    assert client.events == [*OPENED, *CLOSED, *OPENED]
    assert client.use() == "open"


async def test_a_client_can_be_used_only_between_start_and_stop(client: Client) -> None:
    client.opening.set()
    with pytest.raises(marq.MarqError, match=r"^the client is not started: call start\(\) or use `async with`$"):
        client.use()
    for _ in range(2):
        async with client as entered:
            assert entered.use() == "open"
        with pytest.raises(marq.MarqError, match=r"^the client is stopped: call start\(\) to use it again$"):
            client.use()
    await client.stop()

    assert client.events == [*OPENED, *CLOSED] * 2


async def test_a_start_that_fails_closes_what_it_has_opened_and_can_be_repeated(client: Client) -> None:
    client.error = marq.BrokerUnavailable("by the test")
    client.opening.set()
    with pytest.raises(marq.BrokerUnavailable):
        await client.start()

    assert client.events == ["open one", "close one"]
    client.error = None
    await client.start()
    assert client.use() == "open"


async def test_a_start_that_is_cancelled_closes_what_it_has_opened(client: Client) -> None:
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert client.events == ["open one", "close one"]


async def test_a_stop_that_is_cancelled_hurries_and_still_closes_everything(client: Client) -> None:
    client.opening.set()
    await client.start()
    client.closing.clear()
    stopping = asyncio.create_task(client.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert client.events == [*OPENED, "hurry", *CLOSED]


async def test_a_stop_that_is_cancelled_twice_ends_only_when_everything_is_closed(client: Client) -> None:
    client.opening.set()
    await client.start()
    client.closing.clear()
    client._hurry = lambda running: None  # type: ignore[method-assign]
    stopping = asyncio.create_task(client.stop())
    for _ in range(2):
        await asyncio.sleep(0)
        stopping.cancel()
    await asyncio.sleep(0)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    client.closing.set()
    await starting

    assert stopping.cancelled()
    assert client.events == [*OPENED, *CLOSED, *OPENED]


async def test_each_public_client_is_one_and_says_its_name() -> None:
    async with Broker() as broker:
        clients = {
            "the producer": broker.producer(),
            "the consumer of queue 'q'": broker.consumer("q"),
            "the Queues client": marq.Queues(broker.address),
            "the Schedules client": marq.Schedules(broker.address),
            "the DeadLetters client": marq.DeadLetters(broker.address),
        }
        for name, client in clients.items():
            assert isinstance(client, AnyClient)
            await client.stop()
            for state in ("not started", "stopped", "stopped"):
                with pytest.raises(marq.MarqError, match=f"^{name} is {state}"):
                    client._started()
                await client.start()
                await client.start()
                assert client._started()
                await client.stop()
                await client.stop()


async def test_schedules_that_share_the_queues_of_a_client_are_started_and_stopped_with_them() -> None:
    async with Broker() as broker:
        queues = marq.Queues(broker.address)
        schedules = marq.Schedules.of(queues)
        with pytest.raises(marq.MarqError, match=r"^the Queues client is not started"):
            schedules.list()
        await schedules.start()
        assert (schedules.list(), queues["emails"].paused) == ([], False)
        await schedules.stop()
        for use in (schedules.list, lambda: queues["emails"]):
            with pytest.raises(marq.MarqError, match=r"^the Queues client is stopped"):
                use()
        await queues.start()
        assert schedules.list() == []
        await schedules.stop()
        await schedules.stop()


# --- consumers --------------------------------------------------------------------------------------------------------


async def test_each_of_two_overlapping_stops_of_a_consumer_keeps_its_own_release_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags, end = [], MemberSession.end

    async def recorded_end(session: MemberSession, shutdown_s: float, *, release: bool) -> None:
        flags.append(release)
        await end(session, shutdown_s, release=release)

    monkeypatch.setattr(MemberSession, "end", recorded_end)
    async with Broker() as broker:
        consumer = broker.consumer("q")
        await consumer.start()
        async with consumer._changing:
            stops = [asyncio.create_task(consumer.stop(release=False)), asyncio.create_task(consumer.stop())]
            await asyncio.sleep(0)
        await asyncio.gather(*stops)

    assert flags == [False]


@pytest.mark.parametrize("step", ["start", "stop"])
async def test_a_consumer_whose_session_fails_to_start_or_stop_leaves_nothing_running(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"no {step}")

    # A client that is left running is a warning of the broker, which is an error in tests.
    async with Broker() as broker:
        consumer = broker.consumer("q")
        if step == "stop":
            await consumer.start()
        monkeypatch.setattr(ConsumerSession, step, fail)
        with pytest.raises(RuntimeError, match=f"no {step}"):
            await getattr(consumer, step)()


async def test_a_stop_releases_prefetched_messages_before_the_cycles_in_progress_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Broker(queues={"q": {"max_attempts": 1}}) as broker:
        consumer = broker.consumer("q")
        await consumer.start()
        session = consumer._started()
        session.buffer.handler_demand = 10
        async with broker.producer() as producer:
            await producer.send_many("q", [b"prefetched"] * 3)
            await broker.settle()
            held = HeldWrites(monkeypatch, Acquire, MixedAcquire)
            await producer.send("q", b"being acquired")
        await held.begun.wait()
        stopping = asyncio.create_task(consumer.stop())
        await spin()
        await session.receiver.writer.settled()
        in_flight = broker.in_flight("q")
        held.go_on.set()
        await stopping

        assert not in_flight
        await broker.advance(3_600)
        assert not broker.dead_letters("q")
        assert [each.attempt for each in broker.messages("q")] == [1] * 4


async def test_a_stop_without_handlers_has_more_time_for_its_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker(queues={"q": {"max_attempts": 1}}) as broker:
        consumer = broker.consumer("q")
        await consumer.start()
        consumer._started().buffer.handler_demand = 10
        async with broker.producer() as producer:
            await producer.send("q", b"prefetched")
            await broker.settle()
        monkeypatch.setattr("marq.consumer.session.STOP_S", LIMIT_S)
        monkeypatch.setattr("marq.consumer.session.STOP_ACKS_S", 0)
        held = HeldWrites(monkeypatch)
        stopping = asyncio.create_task(consumer.stop())
        await held.begun.wait()
        await spin(100)
        held.go_on.set()
        await stopping

        assert not broker.in_flight("q")
        assert [each.attempt for each in broker.messages("q")] == [1]


# --- producers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["send", "send_many", "cancel"])
async def test_a_delayed_message_that_outlives_the_stop_of_its_producer_opens_no_connection(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker() as broker:
        producer = broker.producer()
        await producer.start()
        running = producer._started()
        looking, go_on, find = asyncio.Event(), asyncio.Event(), running.routes.find

        async def slow_find(queue: str) -> Any:
            looking.set()
            await go_on.wait()
            return await find(queue)

        monkeypatch.setattr(running.routes, "find", slow_find)
        if call == "cancel":
            await producer.stop()
            receipt = marq.Receipt("q", "marq.messages", 0, 0)
            with pytest.raises(marq.MarqError, match="the producer was stopped"):
                await running.delay_control.ask([receipt], None)
        else:
            sends: dict[str, Any] = {
                "send": lambda: producer.send("q", b"x", delay=5),
                "send_many": lambda: producer.send_many("q", [b"x"], delay=5),
            }
            sending = asyncio.create_task(sends[call]())
            await looking.wait()
            await producer.stop()
            go_on.set()
            with pytest.raises(marq.MarqError, match="the producer was stopped"):
                await sending

        assert running.delays._writer is None
        assert not broker.delayed("q")
