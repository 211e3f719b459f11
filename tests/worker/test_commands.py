"""The commands that show and change queues, in one process, with the shared worker."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

import marq
from marq.admin import purge as purging
from marq.admin.purge import Extent
from marq.settings.client import ClientSettings
from marq_worker.broker import EmbeddedBroker
from tests.terminal import Terminal
from tests.worker.conftest import client_of
from tests.worker.dead_letters import yard_of
from tests.worker.harness import LIMIT_SECONDS, Worker, eventually, take
from tests.worker.shell import Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOUR_S = 3600.0
FAR_S = 100 * 365 * 24 * HOUR_S


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shell(shared_worker: Worker) -> AsyncIterator[Shell]:
    async with Shell(shared_worker) as shell:
        yield shell


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def producer(shared_worker: Worker) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(**client_of(shared_worker)) as producer:
        yield producer


async def test_a_queue_from_the_first_message_to_the_last(shared_worker: Worker, shell: Shell) -> None:
    worker, queue, unknown = shared_worker, "first-to-last", "unheard-of"

    # Sent, and seen where it waits.
    first = await shell.json("send", queue, "hello", "--header", "tenant=acme")
    assert await shell.json("send", queue, "--lines", answer="a\nb\nc\n") == {"queue": queue, "sent": 3}
    await shell.json("send", queue, "later", "--delay", "2h")
    both = await shell("send", queue, "x", "--delay", "2h", "--at", "2030-01-31T08:00:00Z", code=1)
    assert "--delay 2h and --at 2030-01-31T08:00:00Z: pass only one of them" in both.err
    peeked = await shell.json("peek", queue, "--limit", "2")
    assert peeked["complete"]
    assert peeked["messages"][0]["value"] == "hello"
    assert peeked["messages"][0]["id"] == first["id"]
    assert peeked["messages"][0]["headers"] == {"tenant": "acme"}
    fits_80_columns((await shell("peek", queue)).out)

    # The table of all queues, one of them undefined.
    await shell.json("send", unknown, "x")

    async def statistics() -> dict[str, dict[str, Any]]:
        return {row["queue"]: row for row in (await shell.json("queues"))["queues"]}

    def counted(found: dict[str, dict[str, Any]]) -> bool:
        one, other = found.get(queue, {}), found.get(unknown, {})
        return (one.get("waiting"), one.get("waiting_for_delivery"), other.get("waiting")) == (4, 1, 1)

    rows = await eventually(statistics, counted)
    assert rows[queue]["oldest_waiting_seconds"] > 0
    assert not rows[unknown]["defined"]

    # Watched on a terminal, until Ctrl-C.
    lines = await asyncio.to_thread(watch, worker, unknown)
    # If a message has waited for long, the state is "no consumer".
    assert any(re.match(rf"{queue}\s+(busy|idle|waiting|no consumer)\s", line) for line in lines)
    fits_80_columns("\n".join(lines))
    assert "Traceback" not in "".join(lines)

    # Not drained while something is left.
    left = await shell.json("drain", queue, "--timeout", "0", code=1)
    assert (left["drained"], left["waiting"], left["waiting_for_delivery"]) == (False, 4, 1)

    # Paused: a consumer receives nothing, and says so.
    switched = {"queue": queue, "paused": True, "paused_until": None, "changed": True}
    assert await shell.json("pause", queue) == [switched]
    [for_a_day] = await shell.json("pause", queue, "--for", "1d")
    assert datetime.fromisoformat(for_a_day["paused_until"]) - datetime.now(UTC) > timedelta(hours=23)
    assert for_a_day["changed"]
    async with marq.Consumer(queue, **client_of(worker)) as consumer:
        assert await consumer.receive(wait=0.5) == []
        assert await shell.json("resume", queue) == [{**switched, "paused": False}]
        await consumer.ack(await take(consumer, 4))

        # Owners of partitions.
        state = await shell.json("state")
        assert {partition["partition"] for partition in state["markers"]} == {0, 1}
        assert all(str(worker.web_port) in partition["last_owner"] for partition in state["markers"])
        [group] = [row for row in state["groups"] if row["group"] == worker.names.group(queue)]
        assert {partition["partition"] for partition in group["partitions"]} == {0, 1}
        [member] = group["members"]
        assert (member["client_id"], member["pid"], member["instance_id"]) == ("marq", os.getpid(), None)
        assert {partition["owner_id"] for partition in group["partitions"]} == {member["id"]}
        assert all(f"process {os.getpid()}" in partition["owner"] for partition in group["partitions"])
        assert {partition["earliest"] for partition in group["partitions"]} == {0}
    delayed = await shell.json("delayed", queue)
    fits_80_columns((await shell("delayed", queue)).out)
    await shell.json("cancel", "--yes", delayed["messages"][0]["id"])
    assert (await shell.json("drain", queue))["drained"]


def fits_80_columns(text: str) -> None:
    assert all(len(line) <= 80 for line in text.splitlines()), text


def watch(worker: Worker, shown: str) -> list[str]:
    command = [sys.executable, "-m", "faust", "-A", "app", "queues", "--watch", "0.1"]
    with Terminal(command, {**worker.environment, "NO_COLOR": "1"}, worker.directory) as terminal:
        for _ in range(2):
            terminal.shows(shown)
        assert terminal.interrupted() == 130
        return terminal.lines


# --- dead letters -----------------------------------------------------------------------------------------------------


async def test_dead_letters_are_shown_counted_deleted_and_redriven(
    shared_worker: Worker, broker: EmbeddedBroker, shell: Shell
) -> None:
    queue, other, hospital = "dying", "dying-too", "hospital"
    async with yard_of(shared_worker, broker) as yard:
        await yard.bury(queue, 3)
        await yard.bury(queue, 2, partition=1, reason="[red]odd[/red]")
        await yard.bury(other, 1)

        counted = {(count["queue"], count["kind"]): count["dead_letters"] for count in await shell.json("dead")}
        assert {key: count for key, count in counted.items() if key[0].startswith("dying")} == {
            (queue, "LookupError: [/x]"): 5,
            (other, "LookupError: [/x]"): 1,
        }
        [counted_odd] = (await shell("dead", queue, "--count", "--reason", "ODD")).out.splitlines()[2:]
        assert counted_odd.split(maxsplit=2) == [queue, "2", "LookupError: [/x]"]
        shown = await shell.json("dead", queue, "--limit", "2", "--header", "tenant=acme")
        assert [letter["value"] for letter in shown] == ["0", "0"]
        assert "the 1 oldest" in (await shell("dead", queue, "--limit", "1")).out
        assert (await shell("dead", "nobody")).out == "queue 'nobody' has no such dead letters\n"

        odd = ("dead", queue, "--delete", "--reason", "odd")
        refused = await shell(*odd, answer="n\n", code=1)
        assert f"Delete 2 dead letters of queue '{queue}' permanently? (" in refused.err
        assert "nothing was changed" in refused.err
        assert (await shell(*odd, "--dry-run")).out == "2 dead letters would be deleted; nothing was changed\n"
        assert (await shell(*odd, "--yes")).out == "2 of 2 dead letters deleted\n"

        meant = await shell.json("redrive", queue, "--dry-run", "--limit", "2")
        assert (meant["chosen"], meant["redriven"]) == (2, 0)
        refused = await shell("redrive", queue, "--to", hospital, answer="n\n", code=1)
        assert f"queue '{hospital}' is unknown" in refused.err
        assert f"Send 3 dead letters of queue '{queue}' to queue '{hospital}'? (" in refused.err
        assert await shell.json("redrive", queue, "--to", hospital, "--allow-unknown", "--yes") == {
            "queue": queue, "to": hospital, "chosen": 3, "requested": 3, "redriven": 3, "already_settled": 0,
            "dry_run": False, "interrupted": False,
        }  # fmt: skip
        assert (await shell("redrive", queue)).out == "0 of 0 dead letters redriven\n"
        await eventually(lambda: yard.delivered(hospital), lambda found: len(found) == 3)


# --- delayed messages -------------------------------------------------------------------------------------------------


async def test_delayed_messages_are_listed_cancelled_and_delivered(
    shared_worker: Worker, producer: marq.Producer, shell: Shell
) -> None:
    queue = "delayed"
    soon = await producer.send(queue, b"soon", headers={"tenant": b"acme"}, delay=HOUR_S)
    later, never = await producer.send_many(queue, [b"later", b"\xff\x00"], delay=[2 * HOUR_S, FAR_S])
    await producer.send("delayed-too", b"x", delay=HOUR_S)
    await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("waiting_for_delivery") == 3)

    found = await shell.json("delayed", queue)
    assert found["complete"]
    assert [message["id"] for message in found["messages"]] == [soon.id, later.id, never.id]
    first = found["messages"][0]
    assert (first["value"], first["headers"], first["bytes"]) == ("soon", {"tenant": "acme"}, 4)
    assert (first["state"], first["attempt"], first["queue"]) == ("delayed", 1, queue)
    assert HOUR_S - 2 * LIMIT_SECONDS < first["due_in_seconds"] <= HOUR_S
    assert found["messages"][2]["due"].startswith("21")
    assert f"the first 1 of queue '{queue}'" in (await shell("delayed", queue, "--limit", "1")).out
    none = (await shell("delayed", queue, "--until", "2000-01-01T00:00:00+00:00")).out
    assert none == f"no delayed messages in queue '{queue}'\n"

    await shell("cancel", soon.id, answer="n\n", code=1)
    assert await shell.json("cancel", soon.id, "--yes") == [{"id": soon.id, "cancelled": True}]
    first_line, second_line = (await shell("cancel", "--yes", soon.id, never.id, code=1)).out.splitlines()[:2]
    assert "not waiting" in first_line
    assert second_line == f"{never.id}: cancelled"
    assert (await shell("delayed", queue)).out.split()[0] == "place"
    assert (await shell("deliver-now", later.id)).out == f"{later.id}: due now\n"

    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        [message] = await take(consumer, 1)
        assert (message.value, message.id, message.attempt) == (b"later", later.id, 1)
        await message.ack()


async def test_a_message_that_waits_for_a_retry_is_cancelled_by_its_place(
    shared_worker: Worker, producer: marq.Producer, shell: Shell
) -> None:
    queue = "retried"
    sent = await producer.send(queue, b"x", delay=0.1)
    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        [message] = await take(consumer, 1)
        await message.release(HOUR_S)
    found = await eventually(
        lambda: shell.json("delayed", queue),
        lambda found: [message["state"] for message in found["messages"]] == ["released"],
    )
    [waiting] = found["messages"]
    assert waiting["id"] == message.id == sent.id != waiting["place"]

    refused = (await shell("cancel", waiting["id"], "--yes", code=1)).out
    assert "marq delayed NAME shows the place of a message that waits for a retry" in refused
    assert waiting["place"] in (await shell("delayed", queue)).out
    assert (await shell("cancel", waiting["place"], "--yes")).out == f"{waiting['place']}: cancelled\n"


async def test_a_message_of_a_paused_queue_is_said_to_be_due_but_not_to_be_delivered(
    producer: marq.Producer, shell: Shell, queues: marq.Queues
) -> None:
    queue = "paused-and-due"
    await queues.pause(queue)
    message = await producer.send(queue, b"x", delay=HOUR_S)

    told = await shell("deliver-now", message.id, "--queue", queue)

    assert told.out == f"{message.id}: due now\n"
    assert f"paused queues deliver due messages after marq resume: {queue}" in told.err
    assert await producer.cancel(message)


# --- settings ---------------------------------------------------------------------------------------------------------


async def test_the_settings_of_a_queue_are_shown_and_changed(
    shared_worker: Worker, shell: Shell, queues: marq.Queues
) -> None:
    queue = "set"
    await queues.publish({f"file:{queue}".encode(): {"max_attempts": 3}})

    assignments = ["--set", "max_attempts=1", "--set", "backoff={base=1,factor=2,max=10,jitter=true}"]
    shown = (await shell("queue", queue, *assignments)).out.splitlines()

    assert f"queue {queue}: a group of its own" in shown[0]
    assert [line.split()[0] for line in shown[1:4]] == ["lease", "max_lease", "max_attempts"]
    assert shown[1].endswith("default")
    assert shown[3].endswith("changed at run time")
    await queues.sync(LIMIT_SECONDS)
    assert queues[queue].max_attempts == 1
    found = await shell.json("queue", queue, "--unset", "max_attempts")
    assert found["settings"]["max_attempts"] == {"value": 3, "from": "file"}
    assert found["settings"]["backoff"]["from"] == "change"
    assert found["consumer_group"] == shared_worker.names.group(queue)


async def test_a_key_is_sent_to_an_ordered_queue(shell: Shell) -> None:
    queue = "in-order"
    shown = await shell.json("queue", queue, "--set", "ordering=key", "--set", "on_dead_letter=block")
    assert shown["settings"]["ordering"] == {"value": "key", "from": "change"}

    one = await shell.json("send", queue, "1", "--ordering-key", "Zürich")
    await shell.json("send", queue, "--lines", "--ordering-key", "Zürich", answer="2\n3\n")

    waiting = (await shell.json("peek", queue))["messages"]
    assert sorted(message["value"] for message in waiting) == ["1", "2", "3"]
    assert {message["id"].rpartition("/")[0] for message in waiting} == {one["id"].rpartition("/")[0]}
    refused = await shell("send", "unordered", "x", "--ordering-key", "k", code=1)
    assert "queue 'unordered': ordering_key needs the setting ordering = \"key\"" in refused.err
    kept = await shell("queue", queue, "--set", "partitions=1", code=1)
    assert "partitions can't change while the queue has messages (3 waiting, 0 in flight and 0 delayed)" in kept.err


async def test_a_message_is_sent_with_a_type(shell: Shell) -> None:
    await shell.json("send", "with-types", "1", "--type", "welcome")
    await shell.json("send", "with-types", "2")

    waiting = (await shell.json("peek", "with-types"))["messages"]
    assert {message["value"]: message["type"] for message in waiting} == {"1": "welcome", "2": None}
    refused = await shell("send", "with-types", "1", "--type", "", code=1)
    assert "a type's name must not be empty" in refused.err


async def test_a_message_is_sent_with_a_deduplication_id(shell: Shell, shared_worker: Worker) -> None:
    queue = "once"
    for value in "12":
        await shell.json("send", queue, value, "--deduplication-id", "a")

    await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("deduplicated") == 1)
    refused = await shell("send", queue, "--lines", "--deduplication-id", "a", code=1)
    assert "--deduplication-id is for a single VALUE" in refused.err


async def test_a_message_is_sent_that_expires(shell: Shell, shared_worker: Worker) -> None:
    queue = "stale"
    await shell("queue", queue, "--set", "expired=dead-letter", "--set", "expires_after=1h30m")
    shown = (await shell.json("queue", queue))["settings"]
    assert (shown["expires_after"]["value"], shown["expired"]["value"]) == (5_400, "dead-letter")
    await shell.json("send", queue, "1", "--expires-in", "1h30m")
    await shell.json("send", queue, "2", "--expires-in", "0.01")

    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        [message] = await take(consumer)
        assert message.value == b"1"
        await message.ack()
        assert await consumer.receive(wait=0.5) == []
    await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("messages_expired") == 1)
    [letter] = await shell.json("dead", queue, "--limit", "2", "--reason", "expired")
    assert letter["reason"].startswith("expired ")
    assert (await shell.json("queue", queue))["messages"]["expired"] == 1
    assert " 0 delayed; 1 have expired" in (await shell("queue", queue)).out
    log = shared_worker.log()
    assert f"messages expired, dead-lettered: queue={queue} messages=1" in log


async def test_a_change_of_the_group_and_a_reset_are_confirmed_first(shell: Shell, queues: marq.Queues) -> None:
    queue = "asked"
    for arguments in (["--set", "group=background"], ["--reset"], ["--forget"]):
        refused = await shell("queue", queue, *arguments, code=1)
        assert refused.out == ""
        assert "nothing was changed; pass --yes to confirm without a prompt" in refused.err

    await shell("queue", queue, "--set", "group=background", "--yes")
    await queues.sync(LIMIT_SECONDS)
    assert queues.definitions.group(queue) == "background"
    await shell("queue", queue, "--forget", "--yes")
    await queues.sync(LIMIT_SECONDS)
    assert queues.definitions.group(queue) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["queue", "q", "--set", "lese=60"], "lese: unknown key; did you mean 'lease'?"),
        (["queue", "q", "--set", "lease=1", "--reset"], "pass only one of them"),
        (["queue", "q", "--set", "expires_after=0"], "--set: expires_after: expected a number of seconds above 0"),
        (["queue", "q", "--set", "expired=x"], "--set: expired: expected 'drop' or 'dead-letter', not 'x'"),
        (["send", "q", "x", "--expires-in", "soon"], "--expires-in soon: expected"),
        (["send", "q", "x", "--expires-in", "0"], "--expires-in 0: expected a duration above 0"),
        (["delayed", ""], "a queue's name must not be empty"),
        (["delayed", "q", "--until", "tomorrow"], "until=tomorrow: expected a time with a time zone"),
        (["redrive", "q", "--rate", "0"], "rate=0"),
    ],
)
async def test_a_wrong_argument_is_named_in_one_sentence(shell: Shell, arguments: list[str], said: str) -> None:
    outcome = await shell(*arguments, code=1)

    assert outcome.out == ""
    assert outcome.err.startswith("marq: ")
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1


# --- purge and replay -------------------------------------------------------------------------------------------------


async def test_a_purge_ends_what_waits_and_nothing_that_comes_later(
    shared_worker: Worker, producer: marq.Producer, shell: Shell, queues: marq.Queues
) -> None:
    queue, other = "purged", "not-purged"
    await queues.change(queue, backoff=[3600])
    async with marq.Consumer(queue, max_in_flight=2, **client_of(shared_worker)) as consumer:
        # One waits for its redelivery, two are in flight, which is the maximum; one is delayed.
        await producer.send_many(queue, [b"early"] * 3)
        released, first = await take(consumer, 2)
        await released.release(delay=3600)
        held = [first, *await take(consumer, 1)]
        await producer.send_many(queue, [b"waits"] * 20)
        await producer.send_many(other, [b"other"] * 5)
        delayed = await producer.send(queue, b"delayed", delay=3600)

        # Standard input is not a terminal, so nothing is changed without --yes.
        assert "pass --yes" in (await shell("purge", queue, code=1)).err
        meant = await shell.json("purge", queue, "--dry-run")
        counts = {"waiting": 20, "redelivery": 1, "delayed": 0, "dead_letters": 0}
        assert {name: meant[name] for name in counts} == counts

        found = await shell.json("purge", queue, "--yes")

        assert {name: found[name] for name in counts} == counts
        assert consumer._running is not None
        await consumer._running._queues.sync(LIMIT_SECONDS)
        # What comes afterwards is delivered, and of what was there nothing.
        await producer.send(queue, b"afterwards")
        await consumer.ack(held)
        [message] = await take(consumer, 1)
        assert message.value == b"afterwards"
        await message.ack()
        assert await producer.reschedule(delayed, delay=0)
        [message] = await take(consumer, 1)
        assert message.value == b"delayed"
        await message.ack()
        assert (await shell.json("drain", queue))["drained"]
        statistics = await shared_worker.queue(queue)
        # Trackers do not count messages that no consumer had acquired.
        assert (statistics["cancelled"], statistics["acked"]) == (1, 4)
        assert len((await shell.json("peek", other))["messages"]) == 5


async def test_a_purge_ends_only_what_existed_when_it_was_asked_about(
    shared_worker: Worker, producer: marq.Producer
) -> None:
    queue, settings = "purged-as-asked", settings_of(shared_worker)
    await producer.send_many(queue, [b"waits"] * 30)
    await producer.send_many(queue, [b"delayed"] * 5, delay=HOUR_S)
    meant, extent, complete = await purging.preview(settings, queue, delayed=True)
    await producer.send_many(queue, [b"later"] * 4)
    await producer.send_many(queue, [b"delayed later"] * 3, delay=HOUR_S)

    # As a form of the dashboard carries it.
    purged = await purging.purge(settings, queue, delayed=True, extent=Extent.parse(str(extent)))

    left, _, _ = await purging.preview(settings, queue, delayed=True)
    assert (meant.waiting, meant.delayed) == (purged.waiting, purged.delayed) == (30, 5)
    assert complete
    assert (left.waiting, left.delayed) == (4, 3)


async def test_a_purge_of_old_messages_ends_those_sent_before_a_time(
    shared_worker: Worker, producer: marq.Producer, shell: Shell, queue: str
) -> None:
    await producer.send_many(queue, [b"old"] * 30)
    await asyncio.sleep(0.01)
    at = datetime.now(UTC).isoformat()
    await asyncio.sleep(0.01)
    await producer.send_many(queue, [b"new"] * 4)

    meant = await shell.json("purge", queue, "--older", at, "--dry-run")
    purged = await shell.json("purge", queue, "--older", at, "--yes")
    later = await shell.json("purge", queue, "--older", "1h", "--yes")

    assert (meant["waiting"], purged["waiting"], later["waiting"]) == (30, 30, 0)
    assert [message["value"] for message in (await shell.json("peek", queue))["messages"]] == ["new"] * 4


def settings_of(worker: Worker) -> ClientSettings:
    options = client_of(worker)
    return ClientSettings.read(options.pop("bootstrap_servers"), options, environment={})


async def test_two_purges_of_a_queue_at_the_same_time_end_each_message_once(
    shared_worker: Worker, producer: marq.Producer, queue: str
) -> None:
    settings = settings_of(shared_worker)
    await producer.send_many(queue, [b"waits"] * 20)

    purges = await asyncio.gather(*[purging.purge(settings, queue) for _ in range(2)])

    assert sum([purge.waiting for purge in purges]) == 20
    assert (await purging.preview(settings, queue))[0].total == 0


async def test_a_purge_needs_no_pause_and_ends_messages_in_flight_on_request(
    shared_worker: Worker, producer: marq.Producer, queues: marq.Queues, queue: str
) -> None:
    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        await producer.send_many(queue, [b"early"] * 5)
        [message] = await take(consumer, 1)

        await purging.purge(settings_of(shared_worker), queue, in_flight=True)

        await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("in_flight") == 0)
        assert not queues[queue].paused
        await producer.send(queue, b"later")
        [later] = await take(consumer, 1)
        assert later.value == b"later"
        await consumer.ack([message, later])


async def test_a_replay_delivers_once_more_what_is_finished_and_leaves_alone_what_is_open(
    shared_worker: Worker, producer: marq.Producer, shell: Shell, queues: marq.Queues
) -> None:
    queue = "replayed"
    await queues.change(queue, backoff=[0.1])
    async with marq.Consumer(queue, **client_of(shared_worker)) as consumer:
        # Two are finished, one of them by its second delivery; one is in flight; others belong to another queue.
        first = await producer.send(queue, b"first", headers={"tenant": b"acme"})
        await producer.send_many(queue, [b"again", b"held"])
        await producer.send_many("not-replayed", [b"other"] * 3)
        taken = {message.value: message for message in await take(consumer, 3)}
        await taken[b"first"].ack()
        await taken[b"again"].release()
        [second] = await take(consumer, 1)
        assert second.attempt == 2
        await second.ack()
        meant = await shell.json("replay", queue, "--since", "1h", "--dry-run")
        assert (meant["messages"], meant["unfinished"], meant["earlier_records"]) == (2, 1, 1)

        done = await shell.json("replay", queue, "--since", "1h", "--yes")

        found = {message.value: message for message in await take(consumer, 2)}
        assert found.keys() == {b"first", b"again"}
        assert found[b"first"].headers == {"tenant": b"acme"}
        assert {message.attempt for message in found.values()} == {1}
        assert first.id not in {message.id for message in found.values()}
        await consumer.ack(list(found.values()))
        # A replay that is continued delivers nothing twice, though it writes all of it once more.
        again = await shell.json(
            "replay", queue, "--from", f"{first.topic}/{first.partition}/0", "--id", done["id"], "--yes"
        )
        assert again["id"] == done["id"]
        await taken[b"held"].ack()
        assert (await shell.json("drain", queue))["drained"]
        statistics = await shared_worker.queue(queue)
        assert (statistics["acked"], statistics["delivered"]) == (5, 2)
