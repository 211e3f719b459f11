"""Background tasks of a consumer that end although nothing has stopped them: the consumer ends with an error."""

from __future__ import annotations

import asyncio
import gc

import pytest

from marq.consumer.handler_pool import HandlerTasks
from marq.testing import Broker
from marq.wire.errors import BrokerUnavailable, MarqError
from tests.unit.client.fakes import LIMIT_S, P1, Hanging, Rig, spin

TASKS = ["marq-receiver", "marq-writer", "marq-alarm"]


def task(name: str) -> asyncio.Task[object]:
    [task] = [each for each in asyncio.all_tasks() if each.get_name() == name]
    return task


async def ended(rig: Rig) -> str:
    """Return the error with which the receiver has ended."""
    async with asyncio.timeout(LIMIT_S):
        while not rig.buffer.closed:
            await rig.buffer.wait()
    assert isinstance(rig.receiver.error, MarqError)
    return str(rig.receiver.error)


@pytest.mark.parametrize("name", TASKS)
async def test_a_receiver_ends_with_an_error_when_user_code_cancels_one_of_its_tasks(make_rig, name) -> None:
    rig = make_rig()
    rig.add(1)
    await rig.take(1)

    task(name).cancel()

    assert await ended(rig) == f"code in this process has cancelled Marq's task {name!r}: cancel only your own tasks"


async def test_a_call_that_waits_for_its_outcome_learns_that_the_outcome_is_not_written(make_rig) -> None:
    rig = make_rig()
    rig.add(1)
    [message] = await rig.take(1)
    rig.settler.gate.clear()
    acking = asyncio.create_task(message.ack())
    await spin()

    task("marq-writer").cancel()

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(BrokerUnavailable):
            await acking


@pytest.mark.parametrize(("defective", "name"), [("renewing", "marq-renewal"), ("lost", "marq-writer")])
async def test_a_receiver_ends_with_an_error_when_the_renewal_of_leases_fails(
    make_rig, monkeypatch, caplog, defective, name
) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    rig = make_rig()
    rig.add(1)
    await rig.take(1)
    monkeypatch.setattr(rig.receiver, defective, defect)
    if defective == "lost":
        rig.settler.gate.clear()
    await rig.clock.advance(30)

    assert await ended(rig) == "receiving stopped: ZeroDivisionError()"
    assert f"task stopped after an unexpected error: {name}" in caplog.text


async def test_neither_a_stop_nor_a_lease_that_ends_earlier_is_an_error(make_rig) -> None:
    leases_ms = {"q": 30_000}
    rig = make_rig(leases_ms=leases_ms)
    rig.add(1)
    await rig.take(1)
    writing = task("marq-writer")
    leases_ms["q"] = 10_000
    rig.add(1, P1)
    await rig.take(1)
    await spin()

    await rig.receiver.stop_reading(1)
    await rig.receiver.stop(1)
    await spin()

    assert writing.done()
    assert rig.receiver.error is None


async def test_a_consumer_that_can_no_longer_follow_its_queues_ends_with_an_error() -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    async with Broker() as broker, broker.consumer("q") as consumer:
        session = consumer._started()
        session.checks.append(defect)
        session.changed.set()

        with pytest.raises(MarqError, match="ZeroDivisionError"):
            await consumer.receive(wait=LIMIT_S)


@pytest.mark.parametrize("worker", [False, True])
async def test_an_error_of_the_receiver_does_not_wait_for_a_handler_that_hangs(caplog, worker) -> None:
    """Else a process stays alive without receiving anything."""
    hanging = Hanging()
    async with (
        Broker() as broker,
        broker.producer() as producer,
        broker.consumer("emails", shutdown_timeout=0) as consumer,
    ):
        await producer.send("emails", b"")
        session = consumer._running
        if worker:
            session.add(HandlerTasks(session.buffer, session.receiver, hanging, 1))
            running = asyncio.create_task(session.done())
        else:
            running = asyncio.create_task(consumer.run(hanging))
        async with asyncio.timeout(LIMIT_S):
            await hanging.begun.wait()
            session.receiver.fail(MarqError("no permission"))
            with pytest.raises(MarqError, match="no permission"):
                await running

    assert "consumer can no longer receive: queue=emails error=no permission" in caplog.text


async def test_a_handler_may_finish_after_an_error_of_the_receiver() -> None:
    hanging = Hanging()
    async with (
        Broker() as broker,
        broker.producer() as producer,
        broker.consumer("emails", shutdown_timeout=LIMIT_S) as consumer,
    ):
        await producer.send("emails", b"")
        session = consumer._running
        running = asyncio.create_task(consumer.run(hanging))
        async with asyncio.timeout(LIMIT_S):
            await hanging.begun.wait()
            session.receiver.fail(MarqError("no permission"))
            await spin()
            assert not running.done()
            hanging.go_on.set()
            with pytest.raises(MarqError, match="no permission"):
                await running
    assert hanging.finished


async def test_a_call_of_run_that_is_cancelled_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with Broker() as broker, broker.consumer("q") as consumer:
        running = asyncio.create_task(consumer.run(lambda message: None))
        await broker.advance(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        del running
        gc.collect()

    assert [record for record in caplog.records if record.name == "asyncio"] == []
