"""The commands that look at queues and switch them, in processes of their own beside one worker."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import marq
from broker import EmbeddedBroker
from marq import purging
from marq.queues import Queues
from marq.receipt import Receipt
from marq.settings import ClientSettings
from tests.terminal import Terminal
from tests.worker.harness import LIMIT_SECONDS, Worker, eventually
from tests.worker.shell import Shell


async def test_a_queue_from_the_first_message_to_the_last_by_commands_alone(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[queues.emails]\nmax_attempts = 2").start().ready()
    async with Shell(worker) as shell:
        await by_commands_alone(worker, shell, broker)


async def by_commands_alone(worker: Worker, shell: Shell, broker: EmbeddedBroker) -> None:
    client = {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}

    # Sent, and looked at where it stands.
    first = await shell.json("send", "emails", "hello", "--header", "tenant=acme")
    assert await shell.json("send", "emails", "--lines", answer="a\nb\nc\n") == {"queue": "emails", "sent": 3}
    await shell.json("send", "emails", "later", "--delay", "2h")
    both = await shell("send", "emails", "x", "--delay", "2h", "--at", "2030-01-31T08:00:00Z", code=1)
    assert "--delay 2h and --at 2030-01-31T08:00:00Z: give one of the two" in both.err
    peeked = await shell.json("peek", "emails", "--limit", "2")
    assert peeked["complete"]
    assert peeked["messages"][0]["value"] == "hello"
    assert peeked["messages"][0]["id"] == first["id"]
    assert peeked["messages"][0]["headers"] == {"tenant": "acme"}
    out = (await shell("peek", "emails")).out
    assert all(len(line) <= 80 for line in out.splitlines())

    # In the table of all queues, also one that nobody has defined.
    await shell.json("send", "unheard-of", "x")

    async def figures() -> dict[str, dict[str, Any]]:
        return {each["queue"]: each for each in (await shell.json("queues"))["queues"]}

    def counted(found: dict[str, dict[str, Any]]) -> bool:
        return found["emails"]["waiting_for_delivery"] == 1 and "unheard-of" in found

    rows = await eventually(figures, counted)
    assert rows["emails"]["waiting"] == 4
    assert rows["emails"]["oldest_waiting_seconds"] > 0
    assert (rows["unheard-of"]["waiting"], rows["unheard-of"]["defined"]) == (1, False)

    # Somebody watches on a terminal, until he has seen enough.
    lines = await asyncio.to_thread(watch, worker)
    # Its messages may have waited for so long that it is said to have no consumer.
    assert any(re.match(r"emails\s+(delivers|no consumer)\s", line) for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert "Traceback" not in "".join(lines)

    # Not drained while something is left.
    left = await shell.json("drain", "emails", "--timeout", "0", code=1)
    assert (left["drained"], left["waiting"], left["waiting_for_delivery"]) == (False, 4, 1)

    # Paused: a consumer gets nothing, and says so.
    assert await shell.json("pause", "emails") == [{"queue": "emails", "paused": True, "changed": True}]
    async with marq.Consumer("emails", **client) as consumer:
        assert await consumer.receive(wait=0.5) == []
        assert await shell.json("resume", "emails") == [{"queue": "emails", "paused": False, "changed": True}]
        messages: list[marq.Message] = []
        while len(messages) < 4:
            messages += await consumer.receive(wait=LIMIT_SECONDS)
        await consumer.ack(messages)

        # Who owns what.
        state = await shell.json("state")
        assert {each["partition"] for each in state["markers"]} == {0, 1}
        assert all(str(worker.web_port) in each["last_owner"] for each in state["markers"])
        [group] = [each for each in state["groups"] if each["group"] == worker.names.group("emails")]
        assert {each["partition"] for each in group["partitions"]} == {0, 1}
        [member] = group["members"]
        assert (member["client_id"], member["pid"], member["instance_id"]) == ("marq", os.getpid(), None)
        assert {each["owner_id"] for each in group["partitions"]} == {member["id"]}
        assert all(f"process {os.getpid()}" in each["owner"] for each in group["partitions"])
        assert {each["earliest"] for each in group["partitions"]} == {0}
    delayed = await shell.json("delayed", "emails")
    out = (await shell("delayed", "emails")).out
    assert all(len(line) <= 80 for line in out.splitlines())
    await shell.json("cancel", "--yes", delayed["messages"][0]["id"])
    assert (await shell.json("drain", "emails"))["drained"]

    # With no worker alive it is known who was the last one, and what is open.
    await worker.stop()
    gone = await shell.json("state", code=1)
    assert [each["open"] for each in gone["markers"]] == [0, 0]
    assert all(str(worker.web_port) in each["last_owner"] for each in gone["markers"])
    # And who consumed last.
    [group] = [each for each in gone["groups"] if each["group"] == worker.names.group("emails")]
    assert group["members"] == []
    committed = [each for each in group["partitions"] if each["committed"]]
    assert committed
    for each in committed:
        assert each["owner"] is None
        assert each["last_owner"].startswith("marq on ")
        assert f"(process {os.getpid()})" in each["last_owner"]


def watch(worker: Worker) -> list[str]:
    command = [sys.executable, "-m", "faust", "-A", "app", "queues", "--watch", "0.1"]
    with Terminal(command, {**worker._environment, "NO_COLOR": "1"}, worker.directory) as terminal:
        for _ in range(2):
            terminal.shows("unheard-of")
        assert terminal.interrupted() == 130
        return terminal.lines


async def test_a_purge_ends_what_waits_and_nothing_that_comes_later(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[queues.emails]\nbackoff = [3600]\n").start().ready()
    client = {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}
    async with (
        Shell(worker) as shell,
        marq.Producer(**client) as producer,
        marq.Consumer("emails", max_in_flight=2, **client) as consumer,
    ):
        # One waits for its redelivery, two are held, so that there is no room for more; one waits for its time.
        await producer.send_many("emails", [b"early"] * 3)
        released, first = await take(consumer, 2)
        await released.release(delay=3600)
        held = [first, *await take(consumer, 1)]
        await producer.send_many("emails", [b"waits"] * 20)
        await producer.send_many("others", [b"other"] * 5)
        delayed = await producer.send("emails", b"delayed", delay=3600)

        # Nobody can be asked, so nothing is changed.
        assert "pass --yes" in (await shell("purge", "emails", code=1)).err
        meant = await shell.json("purge", "emails", "--dry-run")
        counts = {"waiting": 20, "redelivery": 1, "delayed": 0, "dead": 0, "too_late": 0}
        assert {name: meant[name] for name in counts} == counts

        found = await shell.json("purge", "emails", "--yes")

        assert {name: found[name] for name in counts} == counts
        await eventually(lambda: knows_of_the_purge(consumer))
        # What comes afterwards is delivered, and of what was there nothing.
        await producer.send("emails", b"afterwards")
        await consumer.ack(held)
        [message] = await take(consumer, 1)
        assert message.value == b"afterwards"
        await message.ack()
        assert await producer.reschedule(delayed, delay=0)
        [message] = await take(consumer, 1)
        assert message.value == b"delayed"
        await message.ack()
        assert (await shell.json("drain", "emails"))["drained"]
        figures = await worker.queue("emails")
        assert (figures["cancelled"], figures["acked"]) == (21, 4)
        assert len((await shell.json("peek", "others"))["messages"]) == 5


async def knows_of_the_purge(consumer: marq.Consumer) -> bool:
    assert consumer._running is not None
    return consumer._running._queues.definitions.purge("emails") is not None


@dataclass
class Held:
    """The first purge that is about to cancel waits for :attr:`further`."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    further: asyncio.Event = field(default_factory=asyncio.Event)

    async def cancel(self, purge: Any, receipts: Sequence[Receipt]) -> list[bool]:
        if not self.begun.is_set():
            self.begun.set()
            await self.further.wait()
        return await _cancel(purge, receipts)


_cancel = purging._Purging._cancel


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(purging._Purging, "_cancel", lambda purge, receipts: held.cancel(purge, receipts))
    return held


async def half_purged(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, held: Held
) -> tuple[Worker, ClientSettings, asyncio.Task[Any]]:
    """Return a worker whose queue has 20 messages, and a purge of it that has got as far as ending them."""
    worker = await new_worker().start().ready()
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": worker.names.prefix}, environment={})
    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        await producer.send_many("emails", [b"waits"] * 20)
    first = asyncio.create_task(purging.purge(settings, "emails"))
    await asyncio.wait_for(held.begun.wait(), LIMIT_SECONDS)
    return worker, settings, first


async def test_of_two_purges_of_a_queue_the_second_one_takes_over_and_the_queue_stays_paused(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, held: Held
) -> None:
    worker, settings, first = await half_purged(new_worker, broker, held)

    second = await purging.purge(settings, "emails")
    held.further.set()

    with pytest.raises(marq.MarqError, match="'emails': another purge of it goes on, so this one has ended"):
        await asyncio.wait_for(first, LIMIT_SECONDS)
    assert (second.waiting, second.paused) == (20, True)
    async with Queues.of(settings) as queues:
        assert queues["emails"].paused
    figures = await eventually(lambda: worker.queue("emails"), lambda found: found["cancelled"] == 20)
    assert figures["waiting_for_delivery"] == 0


async def test_a_queue_that_is_resumed_ends_its_purge_and_the_next_one_does_the_rest(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, held: Held
) -> None:
    worker, settings, first = await half_purged(new_worker, broker, held)

    async with Queues.of(settings) as queues:
        await queues.resume("emails")
    held.further.set()

    with pytest.raises(marq.MarqError, match="'emails': somebody resumed it while it was purged"):
        await asyncio.wait_for(first, LIMIT_SECONDS)
    assert not (await purging.purge(settings, "emails")).paused
    await eventually(lambda: worker.queue("emails"), lambda found: found["cancelled"] == 20)


async def take(consumer: marq.Consumer, count: int) -> list[marq.Message]:
    messages: list[marq.Message] = []
    while len(messages) < count:
        more = await consumer.receive(count - len(messages), wait=LIMIT_SECONDS)
        assert more, f"only {len(messages)} of {count} messages came"
        messages += more
    return messages


async def test_a_rewind_delivers_once_more_what_is_finished_and_leaves_alone_what_is_open(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker(queues="[queues.emails]\nbackoff = [0.1]\n").start().ready()
    client = {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}
    async with (
        Shell(worker) as shell,
        marq.Producer(**client) as producer,
        marq.Consumer("emails", **client) as consumer,
    ):
        # Two are finished, one of them by its second delivery; one is held; others belong to another queue.
        first = await producer.send("emails", b"first", headers={"tenant": b"acme"})
        await producer.send_many("emails", [b"again", b"held"])
        await producer.send_many("others", [b"other"] * 3)
        taken = {message.value: message for message in await take(consumer, 3)}
        await taken[b"first"].ack()
        await taken[b"again"].release()
        [second] = await take(consumer, 1)
        assert second.attempt == 2
        await second.ack()
        meant = await shell.json("rewind", "emails", "--since", "1h", "--dry-run")
        assert (meant["again"], meant["open"], meant["copies"]) == (2, 1, 1)

        done = await shell.json("rewind", "emails", "--since", "1h", "--yes")

        found = {message.value: message for message in await take(consumer, 2)}
        assert found.keys() == {b"first", b"again"}
        assert found[b"first"].headers == {"tenant": b"acme"}
        assert {message.attempt for message in found.values()} == {1}
        assert first.id not in {message.id for message in found.values()}
        await consumer.ack(list(found.values()))
        # What is gone on with doubles nothing, though all of it is written once more.
        again = await shell.json(
            "rewind", "emails", "--from", f"{first.topic}/{first.partition}/0", "--id", done["id"], "--yes"
        )
        assert again["id"] == done["id"]
        await taken[b"held"].ack()
        assert (await shell.json("drain", "emails"))["drained"]
        figures = await worker.queue("emails")
        assert (figures["acked"], figures["delivered"]) == (5, 2)
