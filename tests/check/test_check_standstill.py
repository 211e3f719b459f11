"""``faust -A app check`` on workers, partitions and groups that are not there, stand still, or do not fit."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

import marq
from app.checkup.findings import Level
from app.checkup.members import STALLED_S
from marq.core.kafka_tools import Tools
from marq.core.marker_codec import encode
from marq.core.markers import Tick
from marq.core.names import Names
from tests.check.checking import Check, NewWorker, make_topics, obey
from tests.embedded import kafka_tools
from tests.unit.core.batches import NEWER
from tests.worker.harness import Installation, eventually


async def test_no_tracker_runs(check: Check, servers: str, prefix: str, names: Names) -> None:
    await make_topics(servers, prefix)

    found = (await check()).problem("trackers")

    assert found.found == f"none runs: group {names.app_id} has no members"
    assert found.commands == ("faust -A app worker",)


async def test_two_workers_of_different_versions_with_different_queues_files(
    check: Check, new_worker: NewWorker, prefix: str
) -> None:
    one = await new_worker(prefix=prefix, queues="[queues.emails]\nlease = 60\n").start().ready()
    other_file = one.directory / "other.toml"
    other_file.write_text("[queues.emails]\nlease = 30\n")
    newer = one.directory / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text("import marq.core.version\nmarq.core.version.VERSION = '9.9'\n")
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
    assert f"two installations share MARQ_PREFIX={prefix}, or a rolling deploy is under way" in shared.advice
    assert "file:emails" in found.of(Level.WARNING, f"{one.directory / 'queues.toml'}").found
    assert found.exit_code == 0, str(found)


async def test_partitions_that_wait_for_a_newer_worker_or_for_the_end_of_a_transaction(
    check: Check, new_worker: NewWorker, prefix: str
) -> None:
    running = await new_worker(prefix=prefix).start().ready()
    async with Installation(check.environment["MARQ_BOOTSTRAP_SERVERS"], running.names) as installation:
        await installation.mark(NEWER, partition=1)

        async def halted() -> bool:
            return (await running.partitions())[1]["state"] == "stopped"

        await eventually(halted)
        servers = installation.bootstrap_servers
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{prefix}-left-open") as stranger:
            await stranger.begin_transaction()
            await stranger.send_and_wait(running.names.markers, encode(Tick(1, 0)), partition=0)
            await eventually(running.partitions, lambda found: found[0]["stalled_seconds"] >= STALLED_S)

            found = await check()

            await stranger.abort_transaction()

    halted_at, held_up = found.problem("markers partition 1"), found.problem("markers partition 0")
    assert halted_at.found.startswith("stands still: ")
    assert "A marker of a newer version" in halted_at.advice
    assert "it is 1 records behind" in held_up.found
    assert "has read none for" in held_up.found
    assert "a transaction is open in the markers topic" in held_up.advice


async def test_a_worker_whose_page_does_not_answer(check: Check, new_worker: NewWorker, prefix: str) -> None:
    running = await new_worker(prefix=prefix).start().ready()
    running.pause()

    found = (await check()).of(Level.WARNING, f"worker {running.canonical_url}")

    running.resume()
    assert "does not answer" in found.found
    assert "MARQ_WEB_BIND" in found.advice


async def test_a_clock_that_is_off(check: Check, servers: str, prefix: str, tmp_path: Path) -> None:
    await make_topics(servers, prefix)
    (tmp_path / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() + 60\n")
    shifted = f"{tmp_path}{os.pathsep}{check.environment['PYTHONPATH']}"

    found = (await check(PYTHONPATH=shifted)).of(Level.WARNING, "clock")

    assert found.found == "this machine's is 60 s ahead of the broker's"
    assert "NTP" in found.advice
    assert "Leases, redelivery and delays in seconds do not depend on it" in found.advice


async def test_queues_without_consumers_and_settings_that_the_topics_do_not_fit(
    check: Check, servers: str, prefix: str, names: Names, admin: AIOKafkaAdminClient
) -> None:
    await make_topics(servers, prefix)
    await kafka_tools.run(Tools(servers).alter_topic(names.messages, "retention.ms", "20000"), servers)
    client = {"bootstrap_servers": servers, "prefix": prefix}
    minute_ago_ms = int((time.time() - 60) * 1000)
    async with (
        marq.Queues(**client) as queues,
        marq.Producer(**client) as producer,
        AIOKafkaProducer(bootstrap_servers=servers) as plain,
    ):
        await queues.change("emails", handler="shop:send")
        await queues.change("reports", spread=9)
        async with marq.Consumer("left-alone", **client) as consumer:
            await producer.send("left-alone", b"read")
            [message] = await consumer.receive(wait=30)
            await message.ack()
        for queue in ("left-alone", "left-alone", "never-read", "paused"):
            await plain.send_and_wait(names.messages, b"old", queue.encode(), timestamp_ms=minute_ago_ms)
        await queues.pause("paused")
        # Their consumers may be about to start.
        await queues.change("just-sent", lease=60)
        await producer.send("just-sent", b"new")
        # A handler that takes its time: nothing is committed meanwhile.
        async with marq.Consumer("slow", max_in_flight=1, **client) as consumer:
            await producer.send_many("slow", [b"held", b"waits", b"waits"])
            await consumer.receive(wait=30)
            found = await check(MARQ_PARTITIONS="4", MARQ_ROLES="tracker,web")

    handlers = found.problem(f"group {names.named_group('handlers')}")
    assert "nobody runs the handlers of emails" in handlers.found
    assert handlers.commands == ("faust -A app worker",)
    assert re.fullmatch(
        r"has no consumer; 2 messages wait, the oldest for 1 m.*", found.problem("queue left-alone").found
    )
    assert found.problem("queue never-read").found.startswith("has no consumer; 1 message waits")
    for queue in ("paused", "just-sent", "slow"):
        assert not found.has(Level.PROBLEM, f"queue {queue}"), str(found)
        assert not found.has(Level.WARNING, f"queue {queue}"), str(found)
    assert "its spread is 9" in found.of(Level.WARNING, "queue reports").found
    few, kept = found.of(Level.WARNING, f"topic {names.messages}"), found.problem(f"topic {names.messages}")
    assert few.found == "it has 2 partitions, and MARQ_PARTITIONS is 4"
    assert "retention.ms is 20000" in kept.found
    for finding in (few, kept):
        await obey(finding, servers)
    # As retention does.
    ends = {TopicPartition(names.messages, partition): RecordsToDelete(before_offset=-1) for partition in range(2)}
    await admin.delete_records(ends)
    again = await check(MARQ_PARTITIONS="4", MARQ_ROLES="tracker,web")
    assert f"the retention of {names.messages} has removed" in again.problem(f"group {names.group('left-alone')}").found
    assert not again.has(Level.WARNING, f"topic {names.messages}")
    assert not again.has(Level.PROBLEM, f"topic {names.messages}")
