"""Polling a queue with ordering, on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from marq.client.message_token import Token
from marq.consumer.session import MemberSession
from marq.core.storage.rows import State
from marq.leases.message import Message
from marq.settings.client import ClientSettings
from marq.settings.queue import QueueSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Acquire, Renew
from marq_worker.sqs.polling import WAITING_LEASE_MS, PolledInOrder
from tests.unit.client.fake_tracker import Tracker, record
from tests.unit.client.fakes import LIMIT_S, P0, Rig, Times, spin

VISIBLE_MS = 600_000


class Polled:
    """A polling consumer whose session runs on fakes."""

    def __init__(self, make_ordered: Callable[..., tuple[Rig, Tracker]]) -> None:
        self.purge: SkippedRecords | None = None
        settings = QueueSettings(ordering="key", lease_ms=VISIBLE_MS)
        self.rig, self.tracker = make_ordered(
            queue=lambda _: settings, skipped=lambda _: self.purge, lease_ms=WAITING_LEASE_MS, prefetch=False
        )
        receiver, clock = self.rig.receiver, self.rig.clock
        self.consumer = PolledInOrder("q", ClientSettings.read("memory://", {}, owner="test"))
        session: Any = MemberSession.__new__(MemberSession)
        session.cluster, session.buffer = Times(clock), self.rig.buffer
        session.receiver, session.receiver_settings = receiver, receiver._settings
        consumer: Any = self.consumer
        consumer._running, consumer._delivered = session, {}
        consumer._purge = None
        receiver.start()

    async def poll(self, count: int = 1) -> list[Message]:
        """Poll until this many messages have come."""
        messages: list[Message] = []
        while len(messages) < count:
            polled = await self.consumer.poll(10)
            messages += polled
            if not polled:
                await self.consumer.wait(10, LIMIT_S)
        return messages

    def learn(self, purge: SkippedRecords) -> None:
        """Learn of a purge from the definitions."""
        self.purge = purge
        self.rig.receiver.apply_settings()


@pytest.fixture
async def polled(make_ordered: Callable[..., tuple[Rig, Tracker]]) -> Polled:
    return Polled(make_ordered)


async def test_a_message_whose_client_hangs_up_during_a_poll_is_delivered_at_once_to_another(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"), record(1, "a"))
    polled.rig.settler.gate.clear()
    poll = asyncio.create_task(polled.poll())
    await polled.rig.acquirer.until(lambda: polled.rig.acquired == [0, 1])
    await spin(100)

    # Its lease is being written.
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    polled.tracker.open_messages = {0: (State.WAITING_IN_ORDER, 1, 0)}
    polled.rig.settler.gate.set()

    [message] = await polled.poll()
    assert (message.offset, message.attempt) == (0, 1)
    assert polled.rig.released == {0: (0, False, "")}
    await polled.consumer.ack_held(message)
    [following] = await polled.poll()
    assert (following.offset, following.attempt) == (1, 1)


async def test_a_message_is_released_if_its_partition_is_revoked_during_the_poll(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"))
    polled.rig.settler.gate.clear()
    poll = asyncio.create_task(polled.poll())
    await polled.rig.acquirer.until(lambda: polled.rig.acquired == [0])
    await spin(100)

    polled.rig.receiver.assigned()
    polled.rig.settler.gate.set()
    await spin(100)

    # Otherwise its group would wait for a lease that no client has.
    assert [batch.lease_ms for batch in polled.rig.settler.of(Renew) if batch.exactly] == [VISIBLE_MS]
    assert polled.rig.released == {0: (0, False, "")}
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)


async def test_a_message_that_no_poll_returned_keeps_its_attempt_in_an_outage(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"))
    await polled.consumer.wait(10, LIMIT_S)
    assert polled.rig.acquired == [0]
    polled.rig.settler.gate.clear()
    # Neither the lease for the poll nor a renewal can be written.
    poll = asyncio.create_task(polled.poll())
    await spin(100)
    assert [batch.counted for batch in polled.rig.acquirer.of(Acquire)] == [False]
    # So none is used up when the lease ends.
    polled.tracker.open_messages = {0: (State.LEASED_IN_ORDER, 0, 0)}
    await polled.rig.clock.advance(WAITING_LEASE_MS / 1000 + 1)
    polled.rig.settler.gate.set()
    await spin(100)
    await polled.rig.clock.advance(2)

    [message] = await poll

    assert (message.offset, message.attempt) == (0, 1)


async def test_a_message_that_a_poll_returned_loses_an_attempt_with_its_lease(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"))
    await polled.poll()
    assert [batch.started for batch in polled.rig.settler.of(Renew)] == [False, True]
    polled.tracker.open_messages = {0: (State.LEASED_IN_ORDER, 1, 0)}
    await polled.rig.clock.advance(VISIBLE_MS / 1000 + 1)

    [message] = await polled.poll()

    assert (message.offset, message.attempt) == (0, 2)


async def test_a_purge_that_spares_messages_in_flight_leaves_a_delivered_message_to_its_client(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"), record(1, "a"))
    [first] = await polled.poll()
    polled.learn(SkippedRecords(10**15, {P0: 2}))

    assert await polled.consumer.poll(10) == []

    assert polled.rig.acked == []
    assert polled.consumer.find(Token("q", first._batch.holder, P0, 0), 1) is first
    await polled.consumer.ack_held(first)


async def test_a_delivered_message_that_was_purged_does_not_block_its_key(polled: Polled) -> None:
    polled.rig.reader.add(P0, record(0, "a"))
    [first] = await polled.poll()
    polled.learn(SkippedRecords(10**15, {P0: 1}, in_flight={P0: 1}))
    assert await polled.consumer.poll(10) == []
    await polled.rig.clock.advance(1)
    polled.rig.reader.add(P0, record(1, "a"))
    poll = asyncio.create_task(polled.poll())
    await spin(100)
    await polled.rig.clock.advance(1)

    [following] = await poll

    assert following.offset == 1
    assert polled.consumer.find(Token("q", first._batch.holder, P0, 0), 1) is None
    assert polled.rig.acked == [0]


async def test_a_purged_message_that_waits_behind_another_one_is_not_delivered(polled: Polled) -> None:
    polled.rig.reader.add(P0, *[record(offset, "a") for offset in range(3)])
    [first] = await polled.poll()
    assert polled.rig.acquired == [0, 1, 2]
    # The last message is from later.
    polled.learn(SkippedRecords(10**15, {P0: 2}, in_flight={P0: 2}))
    assert await polled.consumer.poll(10) == []
    polled.tracker.open_messages = {2: (State.LEASED_IN_ORDER, 1, 0)}

    [message] = await polled.poll()
    assert (first.offset, message.offset, message.attempt) == (0, 2, 1)


async def test_a_stop_releases_a_message_that_is_still_being_acquired(polled: Polled) -> None:
    """Otherwise its lease would end, and count as an attempt although no program has seen it."""
    polled.rig.acquirer.gate.clear()
    polled.rig.settler.gate.clear()
    polled.rig.reader.add(P0, record(0, "a"))
    wait = asyncio.create_task(polled.consumer.wait(10, LIMIT_S))
    await spin(100)
    wait.cancel()
    await asyncio.gather(wait, return_exceptions=True)

    stopping = asyncio.create_task(polled.consumer.put_back(LIMIT_S))
    for gate in (polled.rig.acquirer.gate, polled.rig.settler.gate):
        await spin(100)
        assert not stopping.done()
        gate.set()
    await stopping

    assert polled.rig.acquired == [0]
    assert polled.rig.released == {0: (0, False, "")}
