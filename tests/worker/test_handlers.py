"""Handlers that queues.toml names, in two workers that share their queues."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession

import marq
from marq.wire.markers import Ack, Release
from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import Namespace, Sent, Worker, eventually

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]


async def test_two_workers_share_a_queue_and_the_one_that_stops_releases_what_it_has_not_done(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    # The end of a lease can not be what brings a message back.
    queues = '[queues.patient]\nhandler = "handlers_of_the_test:patient"\nconcurrency = 5\nlease = 600\n'
    one = await new_worker(queues=queues, environment=handlers.environment).start().ready()
    two = new_worker(like=one).start()
    two.web_port += 1
    sent = 0

    async with marq.Producer(broker.bootstrap_servers, prefix=one.names.prefix) as producer:

        async def at_work() -> set[int]:
            nonlocal sent
            sent += 10
            await producer.send_many("patient", [b"patient"] * 10)
            return {line["worker"] for line in await handlers.noted("patient")}

        await eventually(at_work, lambda processes: len(processes) == 2)
    prefetched = await eventually(lambda: one.queue("patient"), lambda found: found.get("in_flight", 0) > 10)

    async def consumers() -> list[str | None]:
        _, text = await one.page("/api/queues/patient/messages?state=in_flight")
        return [message["consumer"] and message["consumer"]["name"] for message in json.loads(text)["messages"]]

    # Also of those that were received before the second one joined.
    await eventually(consumers, lambda names: None not in names and len(set(names)) == 2)
    [stopped] = [process["pid"] for process in (await two.handlers()).values()]
    await two.stop()
    handlers.let_go("patient")
    await one.ready()
    statistics = await eventually(lambda: one.queue("patient"), lambda found: found.get("acked") == sent)

    noted = await handlers.noted("patient")
    assert prefetched["in_flight"] > 10, "more than the handlers of both at work"
    assert two.exit_code == 0
    assert {line["attempt"] for line in noted} == {1}
    runs = Counter(line["id"] for line in noted)
    assert len(runs) == sent
    # Those that ran in the worker that stopped were cancelled and ran again, the others ran once.
    twice = {identity for identity, count in runs.items() if count == 2}
    assert twice == {line["id"] for line in noted if line["worker"] == stopped}
    assert max(runs.values()) == 2
    assert (statistics["expired"], statistics["dead_lettered"]) == (0, 0)


async def test_a_stop_waits_for_running_handlers_and_acks_what_they_end(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    # given: a coroutine function and a plain one at work, with leases that are short enough to be renewed
    queues = "".join(
        f'[queues.{function}]\nhandler = "handlers_of_the_test:{function}"\nlease = 1\n'
        for function in ("patient", "plain_patient")
    )
    queues += "shutdown_timeout = 105\n"
    environment = {**handlers.environment, "MARQ_STOP_TIMEOUT": "120", "MARQ_SHUTDOWN_TIMEOUT": "110"}
    worker = await new_worker(queues=queues, environment=environment).start().ready()

    async def waiting() -> set[tuple[str, str]]:
        return set(re.findall(r"waiting up to (\d+) s for running handlers: queue=(\w+)", worker.log()))

    sent: list[Sent] = []
    async with Namespace(broker.bootstrap_servers, worker.names) as topics:
        for queue in ("patient", "plain_patient"):
            sent.append(await topics.send(queue, b"go"))
            await handlers.has_noted(queue, 1)

        # when: it stops, and they end while it waits
        worker.terminate()
        await eventually(waiting, lambda found: found == {("110", "patient"), ("105", "plain_patient")})
        handlers.let_go("go")
        exit_code = await worker.ended()
        after = [batch for _, batch in await topics.markers()]

    # then
    assert exit_code == 0
    acked = [(batch.source, offset) for batch in after if isinstance(batch, Ack) for offset in batch.offsets]
    assert sorted(acked) == [(receipt.source, receipt.offset) for receipt in sent]
    assert not [batch for batch in after if isinstance(batch, Release)]


async def test_a_plain_function_that_does_not_end_in_time_is_left_and_runs_again_elsewhere(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    # given: two plain functions at work, of which one will not end
    queues = '[queues.plain_patient]\nhandler = "handlers_of_the_test:plain_patient"\nlease = 600\n'
    environment = {**handlers.environment, "MARQ_STOP_TIMEOUT": "120", "MARQ_SHUTDOWN_TIMEOUT": "5"}
    worker = await new_worker(queues=queues, environment=environment).start().ready()

    async def is_waiting() -> bool:
        return "waiting up to 5 s for running handlers" in worker.log()

    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        left = await producer.send("plain_patient", b"never")
        await producer.send("plain_patient", b"go")
        await handlers.has_noted("plain_patient", 2)

        # when: it stops, and the other one ends in time
        worker.terminate()
        await eventually(is_waiting)
        handlers.let_go("go")
        exit_code = await worker.ended()
        log = worker.log()
        other = await new_worker(like=worker).start().ready()
        noted = await handlers.has_noted("plain_patient", 3)
        handlers.let_go("never")
        await other.stop()

    # then: the process ended by itself, and the log names the message that was left
    assert exit_code == 0
    assert re.search(rf"threads can't be cancelled and continue: .* messages=1 ids={re.escape(left.id)}", log), log
    assert "exiting now without waiting for threads" in log
    assert "has not stopped within" not in log
    # and: only that message runs again, and the attempt did not count
    assert [(line["value"], line["attempt"]) for line in noted].count(("never", 1)) == 2
    assert len(noted) == 3


async def test_a_quiet_worker_takes_nothing_until_it_continues_and_what_ran_is_acked(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    # given: one message at work
    queues = '[queues.patient]\nhandler = "handlers_of_the_test:patient"\nlease = 600\n'
    worker = await new_worker(queues=queues, environment=handlers.environment).start().ready()
    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        await producer.send("patient", b"go")
        await handlers.has_noted("patient", 1)

        async def says_quiet() -> bool:
            return "quiet, taking no more messages until SIGCONT" in worker.log()

        # when
        worker.signal(signal.SIGTSTP)
        await eventually(says_quiet)
        await producer.send_many("patient", [b"go"] * 4)
        handlers.let_go("go")
        await eventually(lambda: worker.queue("patient"), lambda found: found.get("acked") == 1)
        quiet = await handlers.noted("patient")

        # then
        assert len(quiet) == 1
        await eventually(worker.handlers, lambda found: any(process["quiet"] for process in found.values()))
        form = {"worker": worker.url, "confirmed": "yes", "back": "/workers"}
        async with ClientSession() as operator, operator.post(f"{worker.url}/actions/unquiet", data=form) as done:
            assert done.status == 200, await done.text()
        statistics = await eventually(lambda: worker.queue("patient"), lambda found: found.get("acked") == 5)
    assert statistics["expired"] == 0
    assert Counter(line["attempt"] for line in await handlers.noted("patient")) == {1: 5}


async def test_an_operator_sees_what_runs_and_cancels_it(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    # given: a coroutine function and a plain one at work
    queues = "".join(
        f'[queues.{function}]\nhandler = "handlers_of_the_test:{function}"\nlease = 600\n'
        for function in ("patient", "plain_patient")
    )
    worker = await new_worker(queues=queues, environment=handlers.environment).start().ready()
    async with (
        marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer,
        ClientSession(worker.url) as operator,
    ):
        ids = {queue: (await producer.send(queue, b"go")).id for queue in ("patient", "plain_patient")}
        for queue in ids:
            await handlers.has_noted(queue, 1)
        async with operator.get("/api/running") as answer:
            running = (await answer.json())["calls"]

        async def cancel(queue: str) -> int:
            form = {"worker": worker.url, "queue": queue, "id": ids[queue], "confirmed": "yes", "back": "/workers"}
            async with operator.post("/actions/cancel-handler", data=form) as done:
                return done.status

        # when
        statuses = [await cancel(queue) for queue in ids]

        # then
        again = await handlers.has_noted("patient", 2)
        handlers.let_go("go")
        for queue in ids:
            await eventually(lambda queue=queue: worker.queue(queue), lambda found: found.get("acked") == 1)
    assert statuses == [200, 400]
    assert {(call["queue"], call["id"], call["cancellable"]) for call in running} == {
        (queue, identity, queue == "patient") for queue, identity in ids.items()
    }
    # It was delivered again at once, and the attempt did not count.
    assert [(line["id"], line["attempt"]) for line in again] == [(ids["patient"], 1)] * 2
    assert len(await handlers.noted("plain_patient")) == 1


async def test_projects_in_one_namespace_run_their_own_handlers_of_modules_with_the_same_name(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    # given: two projects, each with a handler that the other one can't import, or would take for its own
    shop, billing = Handlers(tmp_path / "shop"), Handlers(tmp_path / "billing")
    queues = '[queues.{}]\nhandler = "handlers_of_the_test:coroutine"\n'
    environment = {**shop.environment, "MARQ_PROJECT": "shop"}
    one = await new_worker(queues=queues.format("orders"), environment=environment).start().ready()
    file = tmp_path / "billing.toml"
    file.write_text(queues.format("bills"))
    environment = {**billing.environment, "MARQ_PROJECT": "billing", "MARQ_QUEUES_FILE": str(file)}
    prefix, data = one.names.prefix, tmp_path / "data of billing"
    two = await new_worker(prefix=prefix, data_directory=data, environment=environment).start().ready(1)

    # when: each queue gets messages in both partitions
    numbers = [b"%d" % number for number in range(20)]
    async with marq.Producer(broker.bootstrap_servers, prefix=prefix) as producer:
        for start in range(0, 20, 2):
            await producer.send_many("orders", numbers[start : start + 2])
            await producer.send_many("bills", numbers[start : start + 2])

    # then
    for handlers, queue in (shop, "orders"), (billing, "bills"):
        noted = await handlers.has_noted(queue, 20)
        assert sorted(line["value"] for line in noted) == sorted(map(bytes.decode, numbers))
    assert await shop.noted("bills") == await billing.noted("orders") == []
    assert "whose messages wait" not in one.log() + two.log()


async def test_a_queue_that_gets_a_handler_later_gets_its_earlier_messages_and_the_others_get_nothing_twice(
    new_worker: Make, broker: EmbeddedBroker, handlers: Handlers
) -> None:
    before = '[queues.early]\nhandler = "handlers_of_the_test:coroutine"\n'
    numbers = [b"%d" % number for number in range(40)]
    one = await new_worker(queues=before, environment=handlers.environment).start().ready()
    async with marq.Producer(broker.bootstrap_servers, prefix=one.names.prefix) as producer:
        # Both in both partitions, by turns.
        for start in range(0, 40, 4):
            await producer.send_many("early", numbers[start : start + 4])
            await producer.send_many("later", numbers[start : start + 4])
        await eventually(lambda: one.queue("early"), lambda found: found.get("acked") == 40)
        await one.stop()
        nothing_yet = await handlers.noted("later")
        (one.directory / "queues.toml").write_text(before + '[queues.later]\nhandler = "handlers_of_the_test:plain"\n')
        two = await new_worker(like=one).start().ready()
        await eventually(lambda: two.queue("later"), lambda found: found.get("acked") == 40)
        # Behind all that was there: what came twice would have come before.
        await producer.send_many("early", [b"last"] * 2)
        statistics = await eventually(lambda: two.queue("early"), lambda found: found.get("acked") == 42)

    assert nothing_yet == []
    assert sorted(line["value"] for line in await handlers.noted("later")) == sorted(map(bytes.decode, numbers))
    assert Counter(line["value"] for line in await handlers.noted("early")) == {
        **{number.decode(): 1 for number in numbers},
        "last": 2,
    }
    assert (statistics["acquired"], statistics["reacquired"]) == (42, 0)
