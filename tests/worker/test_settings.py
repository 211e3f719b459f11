"""Settings of queues and of installations, as real workers follow them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import marq
from broker import EmbeddedBroker
from marq.core.markers import BACKOFF
from marq.core.names import Names
from tests.effective import effective
from tests.worker.harness import Installation, Sent, Worker, admin, eventually, faust

Make = Callable[..., Worker]

#: Longer than any test takes.
LONG = 120.0
#: So soon a worker must have seen a change.
SEEN_SECONDS = 2.0
NO_WAIT = {"base": 0, "factor": 1, "max": 0, "jitter": False}


def queues_of(worker: Worker, broker: EmbeddedBroker) -> marq.Queues:
    return marq.Queues(broker.bootstrap_servers, prefix=worker.names.prefix)


async def counts_soon(
    installation: Installation, act: Callable[[Sent], Awaitable[object]], effect: Callable[[Sent], Awaitable[object]]
) -> None:
    """Do something to new messages of queue "q", one after the other, until one shows the effect of a change."""

    async def tried() -> object:
        sent = await installation.send("q", b"probe")
        await installation.acquire(sent, lease=LONG)
        await act(sent)
        await eventually(lambda: installation.fact_of(sent))
        return await effect(sent)

    await eventually(tried, limit=SEEN_SECONDS)


async def test_max_attempts_can_change_while_a_message_is_in_flight(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(queues="[queues.q]\nmax_attempts = 5").start().ready()
    async with (
        Installation(broker.bootstrap_servers, worker.names) as installation,
        queues_of(worker, broker) as queues,
    ):
        held = await installation.send("q")
        await installation.acquire(held, lease=LONG)

        await queues.change("q", max_attempts=1)
        await counts_soon(installation, installation.release, installation.dead_letters_of)

        await installation.renew(held, lease=0.1)
        await eventually(lambda: installation.dead_letters_of(held))
        assert await installation.copies_of(held) == []


async def test_backoff_can_change_while_a_message_is_in_flight(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(queues="[queues.q]\nbackoff = { base = 1000, max = 1000 }").start().ready()
    async with (
        Installation(broker.bootstrap_servers, worker.names) as installation,
        queues_of(worker, broker) as queues,
    ):
        before, after = await installation.send("q"), await installation.send("q")
        await installation.acquire(before, after, lease=LONG)
        await installation.release(before, delay_ms=BACKOFF)
        await eventually(lambda: worker.queue("q"), lambda found: found.get("released") == 1)

        await queues.change("q", backoff=NO_WAIT)
        async with asyncio.timeout(SEEN_SECONDS):
            while not await installation.copies("q"):
                probe = await installation.send("q", b"probe")
                await installation.acquire(probe, lease=LONG)
                await installation.release(probe, delay_ms=BACKOFF)

        await installation.release(after, delay_ms=BACKOFF)
        await eventually(lambda: installation.copies_of(after))
        # What is waiting already has its time.
        assert await installation.copies_of(before) == []


async def test_dead_letter_can_change_while_a_message_is_in_flight(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(queues="[queues.q]").start().ready()
    async with (
        Installation(broker.bootstrap_servers, worker.names) as installation,
        queues_of(worker, broker) as queues,
    ):
        held = await installation.send("q")
        await installation.acquire(held, lease=LONG)

        async def dropped(sent: Sent) -> bool:
            return not await installation.dead_letters_of(sent)

        await queues.change("q", dead_letter=False)
        await counts_soon(installation, installation.reject, dropped)

        await installation.reject(held)
        await eventually(lambda: installation.fact_of(held))
        assert await installation.dead_letters_of(held) == []


async def test_what_is_due_at_a_workers_start_waits_for_the_definitions(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[queues.q]\nmax_attempts = 5").start().ready()
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        sent = await installation.send("q")
        acquired = await installation.acquire(sent, lease=1.5)
        await installation.applied(acquired)
        worker.kill()
        # Behind so many others that a worker which fires before it has read them all has not come to this one yet.
        writes = [
            installation.producer.send(
                worker.names.queues, b'{"lease": %d}' % number, b"change:other-%d" % (number % 9)
            )
            for number in range(1, 5_001)
        ]
        await asyncio.gather(*[await write for write in writes])
        async with queues_of(worker, broker) as queues:
            await queues.change("q", max_attempts=1)

        await new_worker(like=worker).start().ready()

        await eventually(lambda: installation.dead_letters_of(sent))
        assert await installation.copies_of(sent) == []


async def test_a_queue_that_the_file_has_no_more_has_the_defaults_again(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[defaults]\nlease = 20\n[queues.q]\nmax_attempts = 1").start().ready()
    async with queues_of(worker, broker) as queues:
        assert queues["q"] == effective(lease=20, max_attempts=1)
        assert queues["other"] == effective(lease=20)
        await worker.stop()

        (worker.directory / "queues.toml").write_text("[queues.other]\nlease = 10")
        again = await new_worker(like=worker).start().ready()

        assert "file:q" in again.log()
        assert queues["q"] == effective()
        assert queues["other"] == effective(lease=10)
        assert queues.definitions.names() == ["other"]


async def test_a_restart_without_a_change_writes_no_definitions(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(queues="[defaults]\nlease = 20\n[queues.q]\nmax_attempts = 1").start().ready()
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        written = await installation.ends(worker.names.queues)
        await worker.stop()

        await new_worker(like=worker).start().ready()

        assert written == {0: 2}
        assert await installation.ends(worker.names.queues) == written


async def test_a_change_goes_over_the_file_also_after_a_restart(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(queues="[queues.q]\nmax_attempts = 3\nlease = 5").start().ready()
    async with queues_of(worker, broker) as queues:
        await queues.change("q", max_attempts=1)
        await worker.stop()
        await new_worker(like=worker).start().ready()

        assert queues["q"] == effective(lease=5, max_attempts=1)


async def test_a_topic_that_a_change_gave_to_another_queue_keeps_a_worker_from_starting(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker(queues='[queues.orders]\ntopic = "shop"')
    async with queues_of(worker, broker) as queues:
        await queues.change("emails", topic="shop")

    code = await worker.start().ended()

    assert code != 0
    assert "queues 'emails' and 'orders' would have the same topic 'shop'" in worker.log()
    assert "Traceback" not in worker.log()


# --- the command ------------------------------------------------------------------------------------------------------


async def test_the_command_shows_and_changes_the_settings_of_a_running_worker(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[defaults]\nlease = 20\n[queues.q]\nmax_attempts = 3").start().ready()

    code, shown, _ = await faust(
        worker, "queue", "q", "--set", "max_attempts=1", "--set", "backoff={base=1,factor=2,max=10,jitter=true}"
    )

    assert code == 0
    assert "queue q: a group of its own" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:3]] == ["lease", "max_attempts"]
    assert shown.splitlines()[1].endswith("[defaults] of queues.toml")
    assert shown.splitlines()[2].endswith("changed at run time")
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        await counts_soon(installation, installation.release, installation.dead_letters_of)

    code, shown, _ = await faust(worker, "queue", "q", "--unset", "max_attempts", "--json")
    assert code == 0
    found = json.loads(shown)
    assert found["settings"]["max_attempts"] == {"value": 3, "from": "file"}
    assert found["settings"]["backoff"]["from"] == "change"
    assert found["consumer_group"] == worker.names.group("q")


async def test_the_command_asks_before_another_group_reads_and_before_all_is_taken_back(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker()
    async with queues_of(worker, broker) as queues:
        for arguments in (["--set", "group=background"], ["--reset"], ["--forget"]):
            code, shown, said = await faust(worker, "queue", "q", *arguments)
            assert (code, shown) == (1, "")
            assert "nothing was changed; to answer yes without a prompt, pass --yes" in said

        await faust(worker, "queue", "q", "--set", "group=background", "--yes")
        await eventually(_group(queues, "q"), lambda group: group == "background", limit=SEEN_SECONDS)
        await faust(worker, "queue", "q", "--forget", "--yes")
        await eventually(_group(queues, "q"), lambda group: group is None, limit=SEEN_SECONDS)


def _group(queues: marq.Queues, queue: str) -> Callable[[], Awaitable[str | None]]:
    async def look() -> str | None:
        return queues.definitions.group(queue)

    return look


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "lese=60"], "lese: unknown key; expected one of lease,"),
        (["--set", "lease=0"], "lease: expected a number of seconds above 0"),
        (["--set", "lease"], "--set lease: expected KEY=VALUE"),
        (["--set", "lease=1", "--reset"], "give one"),
    ],
)
async def test_the_command_says_in_one_sentence_what_is_wrong(new_worker: Make, arguments: Any, said: str) -> None:
    code, shown, error = await faust(new_worker(), "queue", "q", *arguments)

    assert (code, shown) == (1, "")
    assert error.startswith("marq: ")
    assert said in error
    assert len(error.splitlines()) == 1


# --- installations ----------------------------------------------------------------------------------------------------


async def test_a_worker_and_the_commands_read_the_file_env_for_all_settings(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    worker = new_worker()
    del worker._environment["MARQ_WEB_PORT"]
    (worker.directory / ".env").write_text(
        f"MARQ_WEB_PORT={worker.web_port}\nMARQ_MARKERS_PARTITIONS=3\nMARQ_PARTITIONS=7\n"
    )
    assert "MARQ_MARKERS_PARTITIONS" not in os.environ

    code, _, said = await faust(worker, "queue", "q")
    assert code == 0, said
    await worker.start().ready(3)

    async with admin(broker.bootstrap_servers) as client:
        topics = await client.describe_topics([worker.names.messages, worker.names.markers])
    # What the environment says goes over it.
    assert {each["topic"]: len(each["partitions"]) for each in topics} == {
        worker.names.messages: 2,
        worker.names.markers: 3,
    }


async def test_installations_on_one_cluster_do_not_see_each_other(new_worker: Make, broker: EmbeddedBroker) -> None:
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
            [message] = await q.receive(max_messages=10, wait=20)
            received[prefix] = [message.value]
            await message.release()
    assert received == {worker.names.prefix: [worker.names.prefix.encode()] for worker in (one, other)}

    async with Installation(servers, one.names) as mine, Installation(servers, other.names) as theirs:
        await eventually(lambda: mine.records(one.names.dead_letters))
        await eventually(lambda: theirs.copies("q"))
        assert await mine.copies("q") == []
        assert await theirs.records(other.names.dead_letters) == []
        assert {len(await mine.records(one.names.messages)), len(await theirs.records(other.names.messages))} == {1, 2}
        assert await mine.durable() != {}
    # Had they a transactional id in common, the one that fires would have taken the other's partitions away.
    for worker in (one, other):
        assert {each["state"] for each in (await worker.partitions()).values()} == {"owner"}
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
        assert {group for group in groups if group.startswith(names.prefix)} == {names.app_id, names.group("q")}
    assert not _all(one.names) & _all(other.names)


def _all(names: Names) -> set[str]:
    return {names.transactional_id(0), names.named_group("g"), names.group("g"), names.app_id, names.changelog}
