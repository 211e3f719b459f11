"""The check with workers that are healthy, silent, stalled, or different from each other."""

from __future__ import annotations

import os

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

import marq
from marq.wire.marker_codec import encode
from marq.wire.markers import Tick
from marq.wire.names import Names
from marq_worker.findings import Level
from marq_worker.web.conditions import STALLED_S
from tests.check.checking import Check, NewWorker, lags
from tests.unit.core.batches import NEWER
from tests.worker.harness import LIMIT_SECONDS, Namespace, eventually, make_topic

pytestmark = pytest.mark.verify


async def test_a_healthy_namespace_has_no_findings_and_is_not_changed(
    check: Check, new_worker: NewWorker, servers: str, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    running = await new_worker(prefix=prefix, queues="[queues.emails]\nlease = 60\n").start().ready()
    client = {"bootstrap_servers": servers, "prefix": prefix}
    async with (
        marq.Producer(**client) as producer,
        marq.Consumer("emails", **client) as consumer,
        Namespace(servers, names) as namespace,
    ):
        # The tracker delivers it in a transaction. The last record of its partitions is then a control record.
        await producer.send("emails", b"value", delay=0.1)
        [message] = await consumer.receive(wait=LIMIT_SECONDS)
        await message.ack()
        await eventually(lambda: lags(running), lambda found: not any(found))
        # The worker itself writes to the other topics.
        topics = [names.messages, names.dead_letters, names.quarantine]
        before = await groups_of(admin, names), [len(await namespace.records(topic)) for topic in topics]
        definitions = len(await namespace.records(names.queues))

        found = await check(
            *["worker", "consumer", "sender"],
            MARQ_QUEUES_FILE=str(running.directory / "queues.toml"),
            MARQ_WEB_PORT=str(running.web_port),
        )

        after = await groups_of(admin, names), [len(await namespace.records(topic)) for topic in topics]
        written = (await namespace.records(names.queues))[definitions:]

    assert found.exit_code == 0, str(found)
    assert not found.has(Level.WARNING), str(found)
    assert "1 in group" in found.of(Level.OK, "trackers").found
    assert "groups that read queues: 1;" in found.of(Level.OK, "groups").found
    assert "emails" in found.of(Level.OK, "queues").found
    assert found.has(Level.OK, "clock")
    assert found.of(Level.OK, "web port").found == "in use by a running worker"
    assert after == before
    assert [(record.key, record.value) for record in written] == [(b"check", None)]
    assert all(part["state"] == "owner" for part in (await running.partitions()).values())


async def test_a_record_that_is_too_large_is_named_until_its_dead_letter_is_deleted(
    check: Check, new_worker: NewWorker, servers: str, prefix: str
) -> None:
    topic = f"{prefix}-orders"
    await make_topic(servers, topic, 1)
    running = await new_worker(prefix=prefix, queues=f'[queues.orders]\ntopic = "{topic}"\n').start().ready()
    client = {"bootstrap_servers": servers, "prefix": prefix}
    web = {"MARQ_QUEUES_FILE": str(running.directory / "queues.toml"), "MARQ_WEB_PORT": str(running.web_port)}
    async with (
        AIOKafkaProducer(bootstrap_servers=servers, compression_type="gzip", max_request_size=4 << 20) as producer,
        marq.Consumer("orders", **client) as consumer,
        marq.DeadLetters(**client) as letters,
    ):
        await producer.send_and_wait(topic, b"0" * (3 << 20))
        await producer.send_and_wait(topic, b"after")
        [message] = await consumer.receive(wait=LIMIT_SECONDS)
        await message.ack()
        await eventually(lambda: running.queue("orders"), lambda found: found.get("too_large") == 1)

        found = await check("worker", **web)
        await letters.delete("orders")
        later = await check("worker", **web)

    assert message.value == b"after"
    assert found.exit_code == 0, str(found)
    assert f"{topic}/0/0 has 3145728 bytes" in found.of(Level.WARNING, "queue orders").found
    assert not later.has(Level.WARNING, "queue orders"), str(later)


async def groups_of(admin: AIOKafkaAdminClient, names: Names) -> set[str]:
    """The groups except that of the backlog counter, which the worker creates at any time."""
    listed = {name for name, *_ in await admin.list_consumer_groups()}
    return {name for name in listed if name.startswith(names.prefix)} - {names.backlog}


async def test_two_workers_of_different_versions_with_different_queues_files(
    check: Check, new_worker: NewWorker, prefix: str
) -> None:
    one = await new_worker(prefix=prefix, queues="[queues.emails]\nlease = 60\n").start().ready()
    other_file = one.directory / "other.toml"
    other_file.write_text("[queues.emails]\nlease = 30\n")
    newer = one.directory / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text("import marq.version\nmarq.version.VERSION = '9.9'\n")
    other = new_worker(
        prefix=prefix,
        data_directory=one.directory / "other",
        environment={
            "MARQ_QUEUES_FILE": str(other_file),
            "PYTHONPATH": f"{newer}{os.pathsep}{check.environment['PYTHONPATH']}",
        },
    )
    await other.start().ready(1)
    await one.ready(1)

    found = await check(MARQ_QUEUES_FILE=str(one.directory / "queues.toml"))

    shared = found.of(Level.WARNING, "trackers")
    assert shared.found == "they have different versions and definitions of queues"
    assert f"a rolling deploy is in progress, or two projects share MARQ_PREFIX={prefix}" in shared.advice
    assert "queue emails" in found.of(Level.WARNING, f"{one.directory / 'queues.toml'}").found
    assert found.exit_code == 0, str(found)


async def test_partitions_that_wait_for_a_newer_worker_or_for_the_end_of_a_transaction_and_a_silent_page(
    check: Check, new_worker: NewWorker, prefix: str
) -> None:
    running = await new_worker(prefix=prefix).start().ready()
    async with Namespace(check.environment["MARQ_BOOTSTRAP_SERVERS"], running.names) as namespace:
        await namespace.mark(NEWER, partition=1)

        async def halted() -> bool:
            return (await running.partitions())[1]["state"] == "stopped"

        await eventually(halted)
        servers = namespace.bootstrap_servers
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{prefix}-left-open") as newcomer:
            await newcomer.begin_transaction()
            await newcomer.send_and_wait(running.names.markers, encode(Tick(1, 0)), partition=0)
            await eventually(running.partitions, lambda found: found[0]["stalled_seconds"] >= STALLED_S)

            found = await check()
            running.pause()
            paused = await check()
            running.resume()

            await newcomer.abort_transaction()

    halted_at, held_up = found.problem("markers partition 1"), found.problem("markers partition 0")
    assert halted_at.found.startswith("stalled: ")
    assert "Markers of a newer version" in halted_at.advice
    assert "it is 1 records behind" in held_up.found
    assert "has read none for" in held_up.found
    assert "a transaction is open in the markers topic" in held_up.advice
    silent = paused.of(Level.WARNING, f"worker {running.url}")
    assert "does not answer" in silent.found
    assert "resume it with kill -CONT" in silent.advice
