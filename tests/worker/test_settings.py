"""Settings of queues across restarts, and two prefixes on one cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import marq
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker
from tests.effective import effective
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, admin, eventually

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
LEASE_SECONDS = 20


def queues_of(worker: Worker) -> marq.Queues:
    return marq.Queues(**client_of(worker))


async def test_what_is_due_at_a_workers_start_waits_for_the_definitions(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[queues.q]\nmax_attempts = 5").start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as namespace:
        sent = await namespace.send("q")
        acquired = await namespace.acquire(sent, lease=LEASE_SECONDS)
        due_s = time.monotonic() + LEASE_SECONDS
        await namespace.applied(acquired)
        worker.kill()
        # Behind so many others that a worker which fires before it has read them all has not come to this one yet.
        writes = [
            namespace.producer.send(worker.names.queues, b'{"lease": %d}' % number, b"change:other-%d" % (number % 9))
            for number in range(1, 5_001)
        ]
        await asyncio.gather(*[await write for write in writes])
        async with queues_of(worker) as queues:
            await queues.change("q", max_attempts=1)

        # The lease must have ended, so that the message is due when the worker starts.
        await asyncio.sleep(due_s - time.monotonic())
        await new_worker(like=worker).start().ready()

        await eventually(lambda: namespace.dead_letters_of(sent))
        assert await namespace.copies_of(sent) == []


async def test_a_restart_publishes_what_changed_in_the_file_and_keeps_changes_at_run_time(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker(
        queues="[defaults]\nlease = 20\n[queues.q]\nmax_attempts = 1", environment={"MARQ_PROJECT": "shop"}
    )
    await worker.start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as namespace, queues_of(worker) as queues:
        assert queues["q"] == effective(lease=20, max_attempts=1)
        assert queues["other"] == effective(lease=20)
        await queues.change("other", max_attempts=2)
        written = await namespace.ends(worker.names.queues)
        await worker.stop()

        worker = await new_worker(like=worker).start().ready()

        assert written == {0: 4}
        assert await namespace.ends(worker.names.queues) == written, "without a change nothing is written"
        assert queues["other"] == effective(lease=20, max_attempts=2)
        await worker.stop()
        absent = str(worker.directory / "absent.toml")
        stray = await new_worker(like=worker, MARQ_PROJECT="", MARQ_QUEUES_FILE=absent).start().ready()
        await stray.stop()
        assert await namespace.ends(worker.names.queues) == written, "a worker without a file publishes nothing"
        (worker.directory / "queues.toml").write_text("[queues.other]\nlease = 10\nmax_attempts = 3")

        again = await new_worker(like=worker).start().ready()

        assert "project shop removed definitions" in again.log()
        assert "queue q" in again.log()
        assert queues["q"] == effective()
        assert queues["other"] == effective(lease=10, max_attempts=2), "a change goes over the file"
        assert queues.definitions.names() == ["other"]


# --- namespaces -------------------------------------------------------------------------------------------------------


async def test_namespaces_on_one_cluster_do_not_see_each_other(new_worker: Make, broker: EmbeddedBroker) -> None:
    one = new_worker(queues="[queues.q]\nmax_attempts = 1").start()
    file = one.directory / "other.toml"
    file.write_text("[queues.q]\nmax_attempts = 3")
    other = new_worker(data_directory=one.directory / "other", environment={"MARQ_QUEUES_FILE": str(file)}).start()
    await one.ready()
    await other.ready()
    servers = broker.bootstrap_servers
    received: dict[str, list[bytes]] = {}
    for worker in (one, other):
        prefix = worker.names.prefix
        async with marq.Producer(servers, prefix=prefix) as producer, marq.Consumer("q", servers, prefix=prefix) as q:
            await producer.send("q", prefix.encode())
            [message] = await q.receive(max_messages=10, wait=LIMIT_SECONDS)
            received[prefix] = [message.value]
            await message.release()
    assert received == {worker.names.prefix: [worker.names.prefix.encode()] for worker in (one, other)}

    async with Namespace(servers, one.names) as mine, Namespace(servers, other.names) as theirs:
        await eventually(lambda: mine.records(one.names.dead_letters))
        await eventually(lambda: theirs.copies("q"))
        assert await mine.copies("q") == []
        assert await theirs.records(other.names.dead_letters) == []
        assert {len(await mine.records(one.names.messages)), len(await theirs.records(other.names.messages))} == {1, 2}
        assert await mine.durable() != {}
    # Had they a transactional id in common, the one that fires would have taken the other's partitions away.
    for worker in (one, other):
        assert "waiting" not in {partition["state"] for partition in (await worker.owned_partitions(1)).values()}
    async with admin(servers) as client:
        topics = await client.list_topics()
        groups = {group for group, *_ in await client.list_consumer_groups()}
    for names in (one.names, other.names):
        assert {topic for topic in topics if topic.startswith(names.prefix)} == {
            names.messages,
            names.markers,
            names.dead_letters,
            names.quarantine,
            names.queues,
            names.changelog,
        }
        # The backlog counter's group comes at any time.
        found = {group for group in groups if group.startswith(names.prefix)} - {names.backlog}
        assert found == {names.app_id, names.group("q")}
    assert not _all(one.names) & _all(other.names)


def _all(names: Names) -> set[str]:
    return {names.transactional_id(0), names.named_group("g"), names.group("g"), names.app_id, names.changelog}
