"""Handlers on the broker in memory, as a worker runs them."""

from __future__ import annotations

import asyncio
import threading
import types
from datetime import timedelta
from math import inf

import pytest

import marq
from marq.consumer.session import HandlersSession
from marq.testing import Broker
from marq.testing.group import Member
from tests.unit.testing.handling import handling


def handle_by_name(message: marq.Message) -> None:
    """Named in the settings of a queue."""
    if message.value == b"bad":
        raise marq.Reject("bad")


async def test_a_handler_runs_until_its_queue_is_empty_with_retries_backoff_and_dead_letters() -> None:
    calls = []

    @marq.handler("emails", codec=marq.JSON)
    async def send_email(message: marq.Message) -> None:
        calls.append((message.value, message.attempt))
        await asyncio.sleep(0.001)
        if message.value == "twice" and message.attempt == 1:
            raise ConnectionError("no answer")
        if message.value == "never":
            raise marq.Reject("no such address")
        if message.value == "always":
            raise ValueError("cannot be sent")

    async with Broker(queues={"emails": {"max_attempts": 3}}) as broker, broker.producer(codec=marq.JSON) as producer:
        await producer.send_many("emails", ["once", "twice", "never", "always"])

        await broker.run(send_email)

        assert sorted(calls) == [
            ("always", 1), ("always", 2), ("always", 3), ("never", 1), ("once", 1), ("twice", 1), ("twice", 2),
        ]  # fmt: skip
        assert [message.value for message in broker.acked("emails", codec=marq.JSON)] == ["once", "twice"]
        letters = {
            letter.value: (letter.reason, letter.error) for letter in broker.dead_letters("emails", codec=marq.JSON)
        }
        assert letters["never"] == ("no such address", "")
        assert letters["always"][1] == "ValueError: cannot be sent"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("response")

    __repr__ = __str__


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
async def test_an_error_without_a_text_ends_no_consumer(delivery: str) -> None:
    calls = []

    @marq.handler("q", concurrency=1)
    async def handle(message: marq.Message) -> None:
        calls.append((message.value, message.attempt))
        if message.value == b"bad":
            raise Unprintable

    async with Broker(queues={"q": {"max_attempts": 2, "delivery": delivery}}) as broker, broker.producer() as producer:
        await producer.send_many("q", [b"bad", b"good"])
        await broker.run(handle)

        assert set(calls) >= {(b"bad", 1), (b"good", 1)}
        assert ((b"bad", 2) in calls) == (delivery == "at-least-once")
        [letter] = broker.dead_letters("q")
        assert "Unprintable: <unprintable>" in (letter.error, letter.reason)


async def test_a_run_stops_at_the_first_error_that_a_handler_did_not_mean_and_handles_nothing_more() -> None:
    calls: list[bytes] = []

    @marq.handler("q", concurrency=1)
    async def handle(message: marq.Message) -> None:
        calls.append(message.value)
        if message.value == b"rejected":
            raise marq.Reject("meant")
        if message.value == b"1":
            raise KeyError("a bug")

    async with Broker() as broker, broker.producer(partitions=1) as producer:
        await producer.send_many("q", [b"rejected", b"0", b"1", b"2", b"3"])
        with pytest.raises(KeyError, match="a bug"):
            await broker.run(handle, raise_errors=True)

        # then: the failed message is released for its next attempt, and the attempts of the others do not count
        assert calls == [b"rejected", b"0", b"1"]
        left = [*broker.delayed("q"), *broker.messages("q")]
        assert sorted(message.value for message in left) == [b"1", b"2", b"3"]
        calls.clear()
        await broker.run(marq.handler("q")(lambda message: calls.append(message.attempt)))

    assert sorted(calls) == [1, 1, 2]


async def test_a_worker_runs_in_the_background_all_handlers_of_a_module() -> None:
    module, threads = types.ModuleType("handlers"), []

    @marq.handler("pictures")
    def shrink(message: marq.Message) -> None:
        threads.append(threading.current_thread())

    @marq.handler("emails", group="mail")
    async def send_email(message: marq.Message) -> None:
        async with Broker("nested").producer() as _:
            await producer.send("pictures", message.value)

    module.shrink, module.send_email = shrink, send_email  # type: ignore[attr-defined]
    async with Broker() as broker, broker.producer() as producer:
        async with broker.worker(module) as worker:
            assert worker.queues == ["emails", "pictures"]
            await producer.send("emails", b"x")
            await broker.drain()

            assert broker.queues["emails"].group == "mail"
            assert len(broker.acked("emails")) == len(broker.acked("pictures")) == 1
            with pytest.raises(marq.ConfigError, match="has the handler"):
                await broker.consumer("emails").start()
        await producer.send("emails", b"later")
        await broker.settle()
        assert len(broker.messages("emails")) == 1
    assert threading.main_thread() not in threads


async def test_the_settings_of_a_decorator_apply_unless_those_of_marq_toml_differ() -> None:
    attempts: list[tuple[str, int]] = []

    @marq.handler("orders", max_attempts=2, backoff=[timedelta(seconds=5)])
    async def bill(message: marq.Message) -> None:
        attempts.append((message.queue, message.attempt))
        raise ValueError("no")

    @marq.handler("refunds", max_attempts=2)
    async def refund(message: marq.Message) -> None:
        await bill(message)

    queues = {"refunds": {"max_attempts": 3}}
    async with Broker(queues=queues, defaults={"max_attempts": 4}) as broker, broker.producer() as producer:
        await producer.send(["orders", "refunds"], b"x")
        before = broker.now
        await broker.run(bill, refund)

        assert sorted(attempts) == [("orders", 1), ("orders", 2), ("refunds", 1), ("refunds", 2), ("refunds", 3)]
        assert broker.dead_letters("orders")[0].dead_lettered_at - before < timedelta(seconds=6)
        assert broker.queues["orders"].backoff["delays"] == [5]


async def test_settings_of_a_decorator_that_contradict_the_queue_are_refused() -> None:
    @marq.handler("orders", lease=60)
    async def bill(message: marq.Message) -> None: ...

    async with Broker(queues={"orders": {"max_lease": 30}}) as broker:
        with pytest.raises(marq.ConfigError, match=r"max_lease = 30 .* is shorter than lease = 60"):
            await broker.run(bill)


async def test_a_consumer_warns_of_settings_that_only_a_worker_would_publish(caplog: pytest.LogCaptureFixture) -> None:
    @marq.handler("orders", max_attempts=3, lease=30, concurrency=2)
    async def bill(message: marq.Message) -> None: ...

    async with Broker() as broker, handling(broker.consumer("orders"), bill):
        await broker.settle()

    [warning] = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    # then: the lease is that of the queue anyway
    assert "queue 'orders': max_attempts = 3 of @marq.handler" in warning
    assert "the queue has max_attempts = 5:" in warning


async def test_without_handlers_those_run_that_the_settings_name() -> None:
    name = f"{__name__}:handle_by_name"
    async with Broker(queues={"q": {"handler": name, "concurrency": 2}}) as broker, broker.producer() as producer:
        await producer.send_many("q", [b"good", b"bad"])

        await broker.run()

        assert [message.body for message in broker.acked("q")] == [b"good"]
        assert [letter.reason for letter in broker.dead_letters("q")] == ["bad"]


async def test_what_cannot_be_run_is_refused() -> None:
    @marq.handler("one", group="g")
    async def one(message: marq.Message) -> None: ...

    async def plain(message: marq.Message) -> None: ...

    async with Broker(queues={"two": {"group": "g"}}) as broker:
        with pytest.raises(marq.ConfigError, match=r"plain.*expected a function with @marq\.handler"):
            await broker.run(plain)
        with pytest.raises(marq.ConfigError, match="no handlers to run"):
            await broker.run()
        with pytest.raises(marq.ConfigError, match="group 'g': 'two' has no handler here"):
            await broker.run(one)
        broker.define("q", handler="no.such.module:handle")
        with pytest.raises(marq.ConfigError, match=r"queue 'q': .*'no\.such\.module:handle' can't be imported"):
            await broker.run()


async def test_run_raises_the_error_because_of_which_a_worker_no_longer_receives(monkeypatch) -> None:
    @marq.handler("orders")
    async def handle(message: marq.Message) -> None:
        pass

    def defect(*_: object) -> object:
        raise RuntimeError("a defect of this test")

    async with Broker() as broker, broker.producer() as producer:
        await producer.send("orders", b"x")
        monkeypatch.setattr(Member, "fetch", defect)

        with pytest.raises(marq.MarqError, match="a defect of this test"):
            await broker.run(handle, limit=5)


@pytest.mark.parametrize(
    ("queue", "limit_s", "waits_s"), [("own", inf, 7.5), ("own", 2.0, 2.0), ("others", inf, 1.0), ("others", 0.5, 0.5)]
)
async def test_a_stop_waits_for_handlers_as_the_setting_of_their_queue_says(
    queue: str, limit_s: float, waits_s: float
) -> None:
    waited: dict[str, float] = {}

    async def handle(message: marq.Message) -> None:
        pass

    broker = Broker(queues={"own": {"shutdown_timeout": 7.5}})
    async with broker, broker.worker(marq.handler(queue)(handle)) as worker:
        [group] = worker._groups
        session = group._session
        assert session is not None
        session._shutdown_limit_s = limit_s
        [pool] = session.pools
        waited[pool.queue] = session.shutdown_s_of(pool, 1.0)

    assert waited == {queue: waits_s}


async def in_flight(session: HandlersSession, count: int) -> None:
    async with asyncio.timeout(60):
        while session.prefetch.in_flight != count:  # noqa: ASYNC110 - no signal says so
            await asyncio.sleep(0)


async def test_a_quiet_worker_releases_prefetched_messages_finishes_running_ones_and_takes_no_more() -> None:
    begun, gate, calls = asyncio.Event(), asyncio.Event(), []

    @marq.handler("q", concurrency=1)
    async def handle(message: marq.Message) -> None:
        calls.append((message.value, message.attempt))
        begun.set()
        await gate.wait()

    broker = Broker()
    async with broker, broker.producer() as producer, broker.worker(handle) as worker:
        [group] = worker._groups
        session = group._session
        assert session is not None
        await producer.send_many("q", [b"1", b"2"])
        await asyncio.wait_for(begun.wait(), 60)
        await in_flight(session, 2)

        # when
        session.set_quiet(True)
        await in_flight(session, 1)
        await producer.send("q", b"3")
        gate.set()
        await broker.settle()

        # then: also after a change of definitions
        session.receiver.apply_settings()
        await broker.settle()
        assert (calls, session.prefetch.in_flight) == ([(b"1", 1)], 0)
        assert [message.value for message in broker.acked("q")] == [b"1"]

        session.set_quiet(False)
        await broker.drain("q")
        assert sorted(calls) == [(b"1", 1), (b"2", 1), (b"3", 1)]
