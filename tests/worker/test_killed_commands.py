"""Purges and replays that are killed after any of their records, and called again: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count, takewhile
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

import marq
from marq.admin import purge as purging
from marq.admin import replay as replaying
from marq.kafka.inspector import Inspector
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.names import REPLAYED_HEADER
from marq_worker.broker import EmbeddedBroker
from tests.worker.dying import PATIENT, identity_of
from tests.worker.harness import LIMIT_SECONDS, ROOT, Namespace, Worker, eventually, header, take

pytestmark = [pytest.mark.verify, pytest.mark.asyncio(loop_scope="module")]

#: One more than a purge, or a replay, of a queue has records here: the process of the last one is not killed.
PURGES = [f"purged{number}" for number in range(1, 7)]
REWINDS = [f"replayed{number}" for number in range(1, 6)]
#: One is held, one waits for its next delivery; in each partition some wait; some are sent when all is over.
EARLY, WAITING, LATER = 2, 2, 3
FINISHED = 7
START = replaying.Start(time_ms=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    with Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("killed")) as worker:
        yield await worker.ready()


@pytest.fixture(scope="module")
def settings(worker: Worker, broker: EmbeddedBroker) -> ClientSettings:
    return ClientSettings.read(broker.bootstrap_servers, {"prefix": worker.names.prefix, **PATIENT}, environment={})


async def killed(settings: ClientSettings, what: str, queues: list[str]) -> list[int]:
    """Begin it for each queue in a process that dies after one more record than that before; return the exit codes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.worker.dying", settings.bootstrap_servers, settings.names.prefix, what, *queues,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 2 * LIMIT_SECONDS)
    codes: list[int] = json.loads(out)
    return codes


class Traffic:
    """Sends to queues all the time, and counts."""

    def __init__(self, producer: marq.Producer, queues: list[str]) -> None:
        self.values: set[bytes] = set()
        self._producer = producer
        self._queues = queues
        self.sent: Counter[str] = Counter()
        self._going = True
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for number in takewhile(lambda _: self._going, count()):
            value = b"meanwhile %d" % number
            self.values.add(value)
            for queue in self._queues:
                await self._producer.send(queue, value)
                self.sent[queue] += 1
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._going = False
        await self._task


class Held(NamedTuple):
    """A consumer that holds as much as it may, so that it reads no more."""

    consumer: marq.Consumer
    message: marq.Message


async def fill(namespace: Namespace, producer: marq.Producer, queue: str) -> Held:
    """Have one message held and one wait for its next delivery; then some that wait."""
    options: dict[str, Any] = {"prefix": namespace.names.prefix, "max_in_flight": 1, **PATIENT}
    consumer = marq.Consumer(queue, namespace.bootstrap_servers, **options)
    await consumer.start()
    await producer.send_many(queue, [b"early"] * EARLY)
    [released] = await take(consumer, 1)
    await released.release(delay=3600)
    [held] = await take(consumer, 1)
    for partition in (0, 1):
        await namespace.send_many(queue, WAITING, partition=partition)
    return Held(consumer, held)


def options_of(settings: ClientSettings) -> dict[str, Any]:
    return {"bootstrap_servers": settings.bootstrap_servers, "prefix": settings.names.prefix, **PATIENT}


@pytest.mark.timeout(900)
async def test_a_purge_that_is_killed_after_any_of_its_records_is_called_again(
    worker: Worker, settings: ClientSettings
) -> None:
    options = options_of(settings)
    async with (
        marq.Producer(**options) as producer,
        Queues.of(settings) as queues,
        Namespace(settings.bootstrap_servers, settings.names) as namespace,
    ):
        holders = await asyncio.gather(*(fill(namespace, producer, queue) for queue in PURGES))

        codes = await killed(settings, "purge", PURGES)
        traffic = Traffic(producer, PURGES)
        found = await asyncio.gather(*(purging.purge(settings, queue) for queue in PURGES))

        assert codes == [-signal.SIGKILL] * (len(PURGES) - 1) + [0]
        # The first one only made consumers skip messages, and the last one ended them all.
        least = 1 + EARLY - 2 + 2 * WAITING
        assert found[0].total >= least
        await traffic.stop()
        for queue in PURGES:
            await producer.send_many(queue, [b"later"] * LATER)
        came = await asyncio.gather(*map(rest, holders))
        for queue, values in zip(PURGES, came, strict=True):
            assert values[b"later"] == LATER
            assert values.keys() <= traffic.values | {b"later"}, "what waited has come"
            assert max(values[value] for value in traffic.values) <= 1, "messages sent meanwhile come at most once"
            # What was held has been acked, and what was released was ended once.
            acked = 1 + values.total()
            statistics = await eventually(
                lambda queue=queue: worker.queue(queue), lambda found, n=acked: found.get("acked") == n
            )
            assert statistics["cancelled"] == 1, queue
        assert (await Inspector(settings, queues.definitions).waiting(PURGES)).counts.total() == 0


async def rest(held: Held) -> Counter[bytes]:
    """Finish what is held, then all that comes until the last of what was sent later; return what came."""
    came: Counter[bytes] = Counter()
    await held.message.ack()
    while came[b"later"] < LATER:
        [message] = await take(held.consumer, 1)
        came[message.value] += 1
        await message.ack()
    await held.consumer.stop()
    return came


@pytest.mark.timeout(900)
async def test_a_replay_that_is_killed_after_any_of_its_records_is_gone_on_with(
    worker: Worker, settings: ClientSettings
) -> None:
    options = options_of(settings)
    async with (
        marq.Producer(**options) as producer,
        Namespace(settings.bootstrap_servers, worker.names) as namespace,
    ):
        await asyncio.gather(*(finish(producer, queue, options) for queue in REWINDS))

        codes = await killed(settings, "replay", REWINDS)
        found = await asyncio.gather(
            *(replaying.replay(settings, queue, START, identity=identity_of(queue)) for queue in REWINDS)
        )

        assert codes == [-signal.SIGKILL] * (len(REWINDS) - 1) + [0]
        assert [replay.messages for replay in found] == [FINISHED] * len(REWINDS)

        async def copies() -> dict[str, Counter[bytes]]:
            records = await namespace.records(worker.names.messages)
            return {
                queue: Counter(header(record)[REPLAYED_HEADER] for record in records if _is_copy(record, queue))
                for queue in REWINDS
            }

        delivered = await eventually(copies, lambda found: all(counts.total() >= FINISHED for counts in found.values()))
        assert all(set(counts.values()) == {1} for counts in delivered.values()), delivered


async def finish(producer: marq.Producer, queue: str, options: dict[str, Any]) -> None:
    async with marq.Consumer(queue, **options) as consumer:
        await producer.send_many(queue, [b"%d" % number for number in range(FINISHED)])
        await consumer.ack(await take(consumer, FINISHED))


def _is_copy(record: Any, queue: str) -> bool:
    return record.key == queue.encode() and REPLAYED_HEADER in header(record)
