"""Handlers that queues.toml names: a real worker imports and runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import marq
from agents.handlers import load_handler
from broker import EmbeddedBroker
from marq.core.markers import Renew
from tests.acceptance.receiving import finished
from tests.worker.handling import Handlers
from tests.worker.harness import Installation, Worker, eventually, header

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = 3.0
BACKOFF = 0.5
QUEUES = f"""
[defaults]
lease = {LEASE}
max_attempts = 3
backoff = {{ base = {BACKOFF}, factor = 1, max = {BACKOFF}, jitter = false }}

[queues]
coroutine = {{ handler = "handlers_of_the_test:coroutine" }}
plain = {{ handler = "handlers_of_the_test:plain", concurrency = 4 }}
obedient = {{ handler = "handlers_of_the_test:obedient" }}
patient = {{ handler = "handlers_of_the_test:patient" }}
plain-patient = {{ handler = "handlers_of_the_test:plain_patient", concurrency = 4 }}
shared = {{ handler = "handlers_of_the_test:coroutine" }}
"""


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    return Handlers(tmp_path_factory.mktemp("handlers"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(
    broker: EmbeddedBroker, handlers: Handlers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    worker = Worker(broker.bootstrap_servers, directory, queues=QUEUES, environment=handlers.environment)
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


def values(noted: list[dict[str, Any]]) -> list[str]:
    return sorted(line["value"] for line in noted)


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
async def test_a_function_of_either_kind_gets_each_message_once(
    producer: marq.Producer, worker: Worker, handlers: Handlers, kind: str
) -> None:
    await producer.send_many(kind, [b"%d" % number for number in range(200)])

    figures = await finished(worker, kind, acked=200)

    noted = await handlers.noted(kind)
    assert values(noted) == sorted(str(number) for number in range(200))
    assert (figures["acquired"], figures["redelivered"], figures["dead"]) == (200, 0, 0)
    threads = {line["thread"] for line in noted}
    assert threads == {"MainThread"} if kind == "coroutine" else "MainThread" not in threads


async def test_a_retry_comes_after_its_delay_with_the_next_attempt(
    producer: marq.Producer, worker: Worker, handlers: Handlers
) -> None:
    acked = (await worker.queue("obedient")).get("acked", 0)
    receipt = await producer.send("obedient", b"retry")

    await finished(worker, "obedient", acked=acked + 1)

    first, second = [line for line in await handlers.noted("obedient") if line["id"] == receipt.id]
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert 1.0 <= second["at"] - first["at"] <= 3.0


async def test_a_rejected_message_is_a_dead_letter_after_one_attempt(
    producer: marq.Producer, worker: Worker, handlers: Handlers, installation: Installation
) -> None:
    receipt = await producer.send("obedient", b"reject", headers={"tenant": b"acme"})

    letter = await dead_letter(installation, receipt)

    assert (letter.key, letter.value) == (b"obedient", b"reject")
    assert header(letter).items() >= {"tenant": b"acme", "marq-reason": b"no such customer"}.items()
    assert [line["attempt"] for line in await handlers.noted("obedient") if line["id"] == receipt.id] == [1]


async def test_a_failing_handler_runs_again_after_the_backoff_until_its_message_is_a_dead_letter_with_the_error(
    producer: marq.Producer, worker: Worker, handlers: Handlers, installation: Installation
) -> None:
    receipt = await producer.send("obedient", b"fail", headers={"tenant": b"acme"})

    letter = await dead_letter(installation, receipt)

    runs = [line for line in await handlers.noted("obedient") if line["id"] == receipt.id]
    assert [line["attempt"] for line in runs] == [1, 2, 3]
    assert all(later["at"] - earlier["at"] >= BACKOFF for earlier, later in pairwise(runs))
    found = header(letter)
    assert found["tenant"] == b"acme"
    assert found["marq-error"] == b"ValueError: broken for good"
    assert found["marq-reason"] == b"3 of 3 attempts used: the last time it was released"


async def dead_letter(installation: Installation, receipt: marq.Receipt) -> Any:
    async def look() -> list[Any]:
        letters = await installation.records(installation.names.dead_letters)
        return [record for record in letters if header(record)["marq-id"] == receipt.id.encode()]

    [letter] = await eventually(look)
    return letter


@pytest.mark.parametrize("queue", ["patient", "plain-patient"])
async def test_a_handler_that_takes_longer_than_its_lease_is_not_run_twice(
    producer: marq.Producer, worker: Worker, handlers: Handlers, installation: Installation, queue: str
) -> None:
    receipt = await producer.send(queue, queue.encode())

    async def renewals() -> int:
        renewed = [b for _, b in await installation.markers() if isinstance(b, Renew) and b.queue == queue]
        return sum(receipt.offset in batch.offsets for batch in renewed)

    # One in each third of the lease: more than two leases.
    await eventually(renewals, lambda count: count >= 7)
    handlers.let_go(queue)
    figures = await finished(worker, queue, acked=1)

    assert [(line["id"], line["attempt"]) for line in await handlers.noted(queue)] == [(receipt.id, 1)]
    assert (figures["expired"], figures["redelivered"], figures["late"]) == (0, 0, 0)


async def test_two_workers_share_the_messages_of_handlers_and_nothing_is_done_twice(
    producer: marq.Producer, worker: Worker, handlers: Handlers, new_worker: Callable[..., Worker]
) -> None:
    second = new_worker(like=worker).start()
    second.web_port += 1
    sent = 0

    async def both_at_work() -> int:
        nonlocal sent
        sent += 10
        await producer.send_many("shared", [b"%d" % number for number in range(sent - 10, sent)])
        return len({line["worker"] for line in await handlers.noted("shared")})

    await eventually(both_at_work, lambda count: count == 2)
    await eventually(lambda: worker.queue("shared"), lambda found: found.get("acked") == sent)
    await second.stop()
    await worker.ready()
    noted = await handlers.noted("shared")

    assert second.exit_code == 0
    assert values(noted) == sorted(str(number) for number in range(sent))
    assert min(Counter(line["worker"] for line in noted).values()) > 0


async def test_a_queue_that_gets_a_handler_later_gets_its_earlier_messages_and_the_others_get_nothing_twice(
    broker: EmbeddedBroker, new_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    handlers = Handlers(tmp_path / "handlers")
    before = '[queues.early]\nhandler = "handlers_of_the_test:coroutine"\n'
    after = before + '[queues.later]\nhandler = "handlers_of_the_test:plain"\n'
    numbers = [b"%d" % number for number in range(40)]

    one = await new_worker(queues=before, environment=handlers.environment).start().ready()
    async with marq.Producer(broker.bootstrap_servers, prefix=one.names.prefix) as producer:
        # Both in both partitions, by turns.
        for start in range(0, 40, 4):
            await producer.send_many("early", numbers[start : start + 4])
            await producer.send_many("later", numbers[start : start + 4])
        await finished(one, "early", acked=40)
        await one.stop()
        nothing_yet = await handlers.noted("later")
        (one.directory / "queues.toml").write_text(after)
        two = await new_worker(like=one).start().ready()
        await finished(two, "later", acked=40)
        # Behind all that was there: what came twice would have come before.
        await producer.send_many("early", [b"last"] * 2)
        figures = await finished(two, "early", acked=42)

    assert nothing_yet == []
    assert values(await handlers.noted("later")) == sorted(map(bytes.decode, numbers))
    assert values(await handlers.noted("early")) == sorted([*map(bytes.decode, numbers), "last", "last"])
    assert (figures["acquired"], figures["reacquired"]) == (42, 0)


async def test_a_worker_that_stops_gives_back_what_its_handlers_have_not_done_without_counting_the_attempt(
    broker: EmbeddedBroker, new_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    handlers = Handlers(tmp_path / "handlers")
    # A lease that can't be what brings them back.
    queues = '[queues.patient]\nhandler = "handlers_of_the_test:patient"\nconcurrency = 5\nlease = 600\n'
    one = await new_worker(queues=queues, environment=handlers.environment).start().ready()
    async with marq.Producer(broker.bootstrap_servers, prefix=one.names.prefix) as producer:
        await producer.send_many("patient", [b"patient"] * 30)
    await handlers.has_noted("patient", 5)
    held = await eventually(lambda: one.queue("patient"), lambda found: found.get("in_flight", 0) > 5)

    await one.stop()
    handlers.let_go("patient")
    two = await new_worker(like=one).start().ready()
    figures = await finished(two, "patient", acked=30)

    noted = await handlers.noted("patient")
    assert held["in_flight"] > 5, "nothing was prefetched"
    assert one.exit_code == 0
    assert {line["attempt"] for line in noted} == {1}
    # Those that ran were cancelled and ran again, the others ran once.
    runs = Counter(line["id"] for line in noted)
    assert sorted(runs.values()) == [1] * 25 + [2] * 5
    assert (figures["expired"], figures["dead"]) == (0, 0)


async def test_a_handler_that_can_not_be_imported_ends_the_worker_with_a_sentence(
    new_worker: Callable[..., Worker], handlers: Handlers
) -> None:
    handler = "nowhere_to_be_found:handle"
    worker = new_worker(queues=f'[queues.emails]\nhandler = "{handler}"', environment=handlers.environment).start()

    code = await worker.ended()

    assert code != 0
    [sentence] = [line for line in worker.log().splitlines() if "can't be imported" in line]
    assert sentence.startswith(f"marq: queue 'emails': its handler '{handler}' can't be imported (")
    assert "No module named 'nowhere_to_be_found'" in sentence
    assert "expected MODULE:FUNCTION" in sentence
    assert "Traceback" not in worker.log()


async def test_a_handler_that_its_module_does_not_have_is_named(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(handlers.directory))

    with pytest.raises(marq.ConfigError, match=r"'handlers_of_the_test:nothing' can't be imported .* 'nothing'"):
        load_handler("emails", "handlers_of_the_test:nothing")
