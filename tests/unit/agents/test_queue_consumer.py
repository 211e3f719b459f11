"""The agent that writes the ACQUIRE markers of handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import faust
import pytest
import pytest_asyncio

from marq.backend.cluster import KafkaCluster
from marq.kafka.group_reader import GroupCommit
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.marker_codec import decode
from marq_worker.agents import queue_consumer
from marq_worker.agents.queue_consumer import Acquirers
from tests.unit.client.fakes import P0, rig, spin

LIMIT_S = 60.0
ACQUIRES = [MarkerRecord(0, b"acquire")]


@pytest_asyncio.fixture
async def app() -> AsyncIterator[faust.App]:
    app = faust.App("handlers", store="memory://")
    yield app
    for agent in app.agents.values():
        await agent.stop()
    # A stream asks for it, and it has an event loop.
    consumer: Any = app.consumer
    consumer._thread.thread_loop.close()


class HeldWriter:
    """A writer whose writes end when the test says so."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.written: list[MarkerRecord] = []
        self.cancelled = False

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> list[int]:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            # As an abort of a transaction, which takes a while.
            await spin()
            self.cancelled = True
            raise
        self.written += records
        return [0] * len(records)


async def agent_of(app: faust.App) -> Acquirers:
    channel = queue_consumer.attach(app)
    await app.agents["queue consumer"].start()
    return channel


async def test_the_agent_writes_what_a_receiver_acquires_before_the_offset_is_committed(app: faust.App) -> None:
    # given: a receiver whose ACQUIREs are turns of the agent
    channel, held, fakes = await agent_of(app), HeldWriter(), rig()
    receiver = fakes.receiver
    receiver._acquirer = channel.writer(held)
    receiver.start()
    fakes.add(1)
    taking = asyncio.create_task(fakes.take(1))

    # when
    await asyncio.wait_for(held.begun.wait(), LIMIT_S)
    before = dict(fakes.reader.committed)
    held.may_end.set()
    [message] = await asyncio.wait_for(taking, LIMIT_S)

    # then
    assert (before, fakes.reader.committed) == ({}, {P0: 1})
    assert message.offset == 0
    assert [list(decode(record.value).offsets) for record in held.written] == [[0]]
    await receiver.stop_reading(1)
    await receiver.stop(1)


async def test_a_stop_ends_a_receiver_whose_agent_does_nothing(app: faust.App) -> None:
    # given: a cycle that waits for its turn
    channel, fakes = queue_consumer.attach(app), rig()
    turns = aiter(channel.stream())
    receiver = fakes.receiver
    receiver._acquirer = channel.writer(fakes.acquirer)
    receiver.start()
    fakes.add(1)
    receiver.prefetch.buffers["q"].call_demand += 1
    receiver.demand()
    turn = await asyncio.wait_for(anext(turns), LIMIT_S)

    # when
    await asyncio.wait_for(receiver.stop_reading(0), LIMIT_S)
    await asyncio.wait_for(receiver.stop(0), LIMIT_S)
    turn.begin()
    await spin()

    # then: nothing that a later reader would take for a lease
    assert (fakes.acquirer.written, fakes.reader.committed) == ([], {})


async def test_a_turn_that_the_agent_does_not_begin_in_time_is_never_begun(app: faust.App) -> None:
    """The cycle reads again; a late ACQUIRE would count an attempt that no handler saw."""
    # given: an agent that does not run
    channel, writer = queue_consumer.attach(app), HeldWriter()
    writer.may_end.set()
    turns = aiter(channel.stream())

    # when
    with pytest.raises(BrokerUnavailable, match="the agent has not begun the turn in time"):
        await channel.writer(writer).write(ACQUIRES, 0.0)
    turn = await asyncio.wait_for(anext(turns), LIMIT_S)
    turn.begin()
    await spin()

    # then
    assert not writer.begun.is_set()


async def test_a_write_that_fails_is_the_cycles_and_the_agent_goes_on(app: faust.App) -> None:
    channel = await agent_of(app)
    good, bad = HeldWriter(), SimpleNamespace(write=_unavailable)
    good.may_end.set()

    with pytest.raises(BrokerUnavailable, match="no broker"):
        await channel.writer(bad).write(ACQUIRES, LIMIT_S)

    assert await channel.writer(good).write(ACQUIRES, LIMIT_S) == [0]


async def _unavailable(*_: object) -> None:
    raise BrokerUnavailable("no broker")


async def test_a_slow_write_holds_up_no_other(app: faust.App) -> None:
    channel, slow, fast = await agent_of(app), HeldWriter(), HeldWriter()
    fast.may_end.set()
    waiting = asyncio.create_task(channel.writer(slow).write(ACQUIRES, LIMIT_S))
    await asyncio.wait_for(slow.begun.wait(), LIMIT_S)

    await asyncio.wait_for(channel.writer(fast).write(ACQUIRES, LIMIT_S), LIMIT_S)

    assert not waiting.done()
    slow.may_end.set()
    await asyncio.wait_for(waiting, LIMIT_S)


async def test_a_cycle_that_a_stop_gives_up_ends_after_its_write(app: faust.App) -> None:
    """A write that went on could end after the RELEASE of its messages."""
    channel, writer = await agent_of(app), HeldWriter()
    writing = asyncio.create_task(channel.writer(writer).write(ACQUIRES, LIMIT_S))
    await asyncio.wait_for(writer.begun.wait(), LIMIT_S)

    writing.cancel()
    await asyncio.wait([writing], timeout=LIMIT_S)

    assert writing.cancelled()
    assert writer.cancelled


async def test_both_ways_to_acquire_leave_the_markers_to_the_agent() -> None:
    written: list[Sequence[MarkerRecord]] = []

    def acquirer(_: object) -> Any:
        async def write(records: Sequence[MarkerRecord], *_: object) -> None:
            written.append(records)

        return SimpleNamespace(write=write)

    topics, commit = cast("Topics", SimpleNamespace(markers_limit_bytes=1 << 20)), cast("GroupCommit", None)
    cluster = KafkaCluster(ClientSettings(), acquirer)

    await cluster.acquirer(topics).write(ACQUIRES, LIMIT_S)
    await cluster.transactions(topics, "group", None).write(ACQUIRES, commit, LIMIT_S)

    assert written == [ACQUIRES, ACQUIRES]


async def test_a_worker_lists_the_queue_consumer_and_runs_nothing_of_it(app: faust.App) -> None:
    queue_consumer.attach(app, listed=True)
    agent = app.agents["queue consumer"]

    await agent.start()

    assert "ACQUIRE" in agent.help
    assert agent.channel.get_topic_name() == "<acquirers>"
    assert list(app.topics) == []
    assert not agent._actors
