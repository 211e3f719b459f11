"""Delayed messages on real workers: listed, moved and cancelled by commands, and kept over kill -9 and take-overs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import marq
from broker import EmbeddedBroker
from tests.worker.harness import Installation, Worker, eventually, faust

Make = Callable[..., Worker]
HOUR_S = 3600.0
FAR_S = 100 * 365 * 24 * HOUR_S


def clients_of(worker: Worker, broker: EmbeddedBroker) -> dict[str, Any]:
    return {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}


async def all_known(worker: Worker, queue: str, count: int) -> None:
    await eventually(lambda: worker.queue(queue), lambda found: found.get("waiting_for_delivery") == count)


async def receive(consumer: marq.Consumer, count: int) -> list[marq.Message]:
    messages: list[marq.Message] = []
    while len(messages) < count:
        more = await consumer.receive(count - len(messages), wait=30)
        assert more, f"{len(messages)} of {count} came"
        messages += more
    await consumer.ack(messages)
    return messages


async def test_commands_list_cancel_and_deliver_what_waits(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker().start().ready()
    async with marq.Producer(**clients_of(worker, broker)) as producer:
        soon = await producer.send("q", b"soon", headers={"tenant": b"acme"}, delay=HOUR_S)
        later, never = await producer.send_many("q", [b"later", b"\xff\x00"], delay=[2 * HOUR_S, FAR_S])
        await producer.send("other", b"x", delay=HOUR_S)
    await all_known(worker, "q", 3)

    code, out, _ = await faust(worker, "delayed", "q", "--json")
    found = json.loads(out)
    assert (code, found["complete"]) == (0, True)
    assert [each["id"] for each in found["messages"]] == [soon.id, later.id, never.id]
    first = found["messages"][0]
    assert (first["value"], first["headers"], first["bytes"]) == ("soon", {"tenant": "acme"}, 4)
    assert (first["state"], first["attempt"], first["queue"]) == ("delayed", 1, "q")
    assert HOUR_S - 120 < first["due_in_seconds"] <= HOUR_S
    assert found["messages"][2]["due"].startswith("21")

    code, out, _ = await faust(worker, "delayed", "q", "--limit", "1")
    assert code == 0
    assert "the first 1 of queue 'q'" in out
    code, out, _ = await faust(worker, "delayed", "q", "--until", "2000-01-01T00:00:00+00:00")
    assert (code, out) == (0, "no message of queue 'q' waits for its time\n")

    code, out, _ = await faust(worker, "cancel", soon.id, answer="n\n")
    assert code == 1
    code, out, _ = await faust(worker, "cancel", soon.id, "--yes", "--json")
    assert (code, json.loads(out)) == (0, [{"id": soon.id, "cancelled": True}])
    code, out, _ = await faust(worker, "cancel", "--yes", soon.id, never.id)
    assert (code, out.splitlines()[1]) == (1, f"{never.id}: cancelled")
    assert "not waiting" in out.splitlines()[0]
    code, out, _ = await faust(worker, "deliver-now", later.id)
    assert (code, out) == (0, f"{later.id}: delivered\n")

    async with marq.Consumer("q", **clients_of(worker, broker)) as consumer:
        [message] = await receive(consumer, 1)
        assert (message.value, message.id, message.attempt) == (b"later", later.id, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel", "--yes", "nonsense"], "expected the id of a message"),
        (["cancel", "--yes", "a/b/c"], "expected the id of a message"),
        (["deliver-now", "t/1/99999999999999999999999"], "expected the id of a message"),
        (["delayed", ""], "a queue's name must not be empty"),
        (["delayed", "q", "--until", "tomorrow"], "until=tomorrow: expected a moment with a time zone"),
        (["delayed", "q", "--until", "2030-01-01T00:00:00"], "with a time zone"),
    ],
)
async def test_what_the_commands_can_not_read_is_named(
    new_worker: Make, broker: EmbeddedBroker, arguments: list[str], said: str
) -> None:
    code, out, err = await faust(new_worker(), *arguments)

    assert (code, out) == (1, "")
    assert said in err
    assert "Traceback" not in err


async def test_without_a_worker_nothing_is_said_to_be_cancelled(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = new_worker()
    async with marq.Producer(**clients_of(worker, broker), request_timeout=2) as producer:
        receipt = await producer.send("q", b"x", delay=HOUR_S)
        with pytest.raises(marq.BrokerUnavailable, match=r"unknown whether .* was cancelled: no tracker answered"):
            await producer.cancel(receipt)
    code, _, err = await faust(worker, "delayed", "q")
    assert code == 1
    assert "start one with faust -A app worker" in err


async def test_the_page_refuses_what_it_does_not_know(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker().start().ready()

    for query, said in [("state=lost", "in_flight, delayed"), ("limit=0", "from 1 to 1000"), ("limit=x", "from 1 to")]:
        status, text = await worker.page(f"/api/queues/q/messages?{query}")
        assert status == 400
        assert said in json.loads(text)["error"]
    status, text = await worker.page("/api/queues/a%2Fb/messages?state=in_flight")
    assert (status, "'a/b' is unknown" in json.loads(text)["error"]) == (404, True)


async def test_what_waits_is_delivered_once_after_kill_9_with_data_and_without(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with marq.Producer(**clients_of(worker, broker)) as producer:
        receipts = await producer.send_many("q", [b"%d" % number for number in range(500)], delay=3)
        gone = await producer.send_many("q", [b"gone"] * 20, delay=3)
        assert await producer.cancel(gone) == [True] * 20
        moved = await producer.send_many("q", [b"moved"] * 20, delay=1)
        assert await producer.reschedule(moved, delay=4) == [True] * 20
    worker.kill()
    worker = await new_worker(like=worker).start().ready()
    worker.kill()
    worker = await new_worker(like=worker, MARQ_DATA_DIR=str(worker.directory / "empty")).start().ready()

    async with marq.Consumer("q", **clients_of(worker, broker)) as consumer:
        messages = await receive(consumer, 520)
        assert sorted(message.id for message in messages) == sorted(each.id for each in [*receipts, *moved])
        assert {message.attempt for message in messages} == {1}
        assert await consumer.receive(wait=2) == []


async def test_every_worker_tells_of_all_that_waits_and_another_takes_it_over(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    first = await new_worker().start().ready()
    other = await new_worker(like=first, MARQ_DATA_DIR=str(first.directory / "other")).start().ready(1)
    await first.ready(1)
    async with marq.Producer(**clients_of(first, broker)) as producer:
        receipts = await producer.send_many("q", [b"%d" % number for number in range(5_000)], delay=HOUR_S)
        last = await producer.send("q", b"last", delay=2 * HOUR_S)
        await all_known(first, "q", 5_001)
        for worker in (first, other):
            status, text = await worker.page("/api/queues/q/messages?state=delayed&limit=1000")
            found = json.loads(text)
            assert (status, found["complete"], len(found["messages"])) == (200, True, 1_000)
            assert {each["id"] for each in found["messages"]} <= {each.id for each in receipts}
        first.kill()
        await other.ready()
        assert await producer.reschedule([*receipts[:100], last], delay=0) == [True] * 101

    async with marq.Consumer("q", **clients_of(first, broker)) as consumer:
        messages = await receive(consumer, 101)
        assert {message.id for message in messages} == {each.id for each in [*receipts[:100], last]}


async def test_a_delivery_time_that_can_not_be_read_is_logged_counted_and_marked_on_the_page(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with (
        Installation(broker.bootstrap_servers, worker.names) as installation,
        marq.Consumer("q", **clients_of(worker, broker)) as consumer,
    ):
        header = ("marq-deliver-at", b"tomorrow")
        record = await installation.producer.send_and_wait(worker.names.messages, b"x", b"q", 0, headers=[header])
        other = await installation.send("q")
        assert sorted(each.value for each in await receive(consumer, 2)) == sorted([b"x", other.payload.value])

    place = f"{worker.names.messages}/0/{record.offset}"
    await eventually(lambda: worker.queue("q"), lambda found: found.get("invalid_deliver_at") == 1)
    series = 'marq_messages_invalid_deliver_at_total{queue="q"} 1.0'
    await eventually(lambda: worker.page("/metrics"), lambda page: series in page[1])
    line = f"queue=q messages=1 first={place}: marq-deliver-at can't be read as a time"
    await eventually(logged(worker), lambda log: line in log)
    mark = "can't be read as a time"
    assert mark in (await worker.page(f"/message?id={place}"))[1]
    assert mark not in (await worker.page(f"/message?id={other.id}"))[1]


def logged(worker: Worker) -> Callable[[], Any]:
    async def log() -> str:
        return worker.log()

    return log
