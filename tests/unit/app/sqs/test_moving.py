"""Moves of dead letters: what is sent where, and when a move ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from marq.client.message_token import Token
from marq.queues.queues import Queues
from marq.testing import Broker
from marq.wire.errors import BrokerUnavailable, MessageTooLarge
from marq.wire.markers import Source
from marq_worker.sqs import moving
from marq_worker.sqs.counts import MessageCounts
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_answers import SOURCE_HEADER
from marq_worker.sqs.moving import LEASE_S, NO_QUEUE, NO_SOURCE, NOT_COUNTED, NOT_RECEIVED, Mover
from marq_worker.sqs.receive_limits import OldMessages
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.tasks import SKEW_S, MoveTask, PurgeTask, QueueTasks

ARN = "arn:aws:sqs:us-east-1:000000000000:"
NOW_MS = round(time.time() * 1000)


def letter(
    number: int, source: str | None = "emails", sent_ms: int = NOW_MS - 1_000, available_ms: int = NOW_MS
) -> SqsDelivery:
    headers = {} if source is None else {SOURCE_HEADER: (ARN + source).encode()}
    token = Token("dead", 1, Source("marq.messages", 0), number)
    members = {"available_ms": available_ms, "received_ms": NOW_MS}
    return SqsDelivery(token, f"marq.messages/0/{number}", 1, sent_ms, b"x", headers, **members)


class Receiver:
    """A queue that has these messages, each until it is acknowledged; it also takes the outcomes."""

    def __init__(self) -> None:
        self.waiting: list[SqsDelivery] = []
        self.polls: list[int] = []
        self.renewed: list[int] = []
        self.log: list[str] = []
        self.released: list[int] = []
        self.returns = True
        #: The messages whose leases end before the next acknowledgement, or before the next renewal.
        self.over: list[SqsDelivery] = []
        self.over_at_renewal = False
        self.now_s = 0.0

    def of(self, queue: str) -> Receiver:
        assert queue == "dead"
        return self

    async def poll(self, most: int, wait_s: float) -> list[SqsDelivery]:
        await asyncio.sleep(0)
        self.now_s += 0.5
        self.polls.append(most)
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken

    def release(self, deliveries: Sequence[SqsDelivery]) -> None:
        self.released += [delivery.token.offset for delivery in deliveries]
        if self.returns:
            self.waiting += deliveries

    async def ack(self, deliveries: Sequence[SqsDelivery]) -> None:
        self.log += [f"ack {delivery.token.offset}" for delivery in deliveries if delivery not in self.over]
        self._raise_if_over()

    async def renew(self, deliveries: Sequence[SqsDelivery], lease_ms: int) -> None:
        self.renewed += [lease_ms for _ in deliveries]
        if self.over_at_renewal:
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        over, self.over = self.over, []
        if over:
            raise SqsError("InvalidParameterValue", "the visibility timeout of this delivery is over")


class Rig:
    """A mover, its queue, and what it has sent."""

    def __init__(self, queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues = queues
        self.tasks = QueueTasks(queues)
        self.receiver = Receiver()
        self.errors: dict[int, list[Exception]] = {}
        self.sent: list[tuple[str, int]] = []
        self.stopping = asyncio.Event()
        self.waits: list[float] = []
        self.directory = Directory(queues, 1_000_000)
        receivers: Any = self.receiver
        monkeypatch.setattr(moving, "_wait", self._wait)
        monkeypatch.setattr(moving, "RETRY_S", 0)
        outcomes: Any = self.receiver
        old_messages = OldMessages(outcomes)
        self.mover = Mover(
            self.tasks, self.directory, receivers, self._send, outcomes, old_messages, self._count,
            lambda: self.receiver.now_s,
        )  # fmt: skip

    async def _wait(self, stopping: asyncio.Event, seconds: float) -> None:
        self.waits.append(seconds)

    async def _count(self, queue: str) -> MessageCounts:
        return MessageCounts(len(self.receiver.waiting), known=True)

    async def _send(self, queue: str, delivery: SqsDelivery) -> None:
        number = delivery.token.offset
        if errors := self.errors.get(number):
            raise errors.pop()
        self.sent.append((queue, number))
        self.receiver.log.append(f"send {number}")

    async def run(self, *letters: SqsDelivery, **members: Any) -> MoveTask:
        """Move messages; return the task afterwards."""
        task = MoveTask(**{"id": "a", "started_ms": NOW_MS, "allowed": ["emails", "bills"], **members})
        self.receiver.waiting += letters
        await self.tasks.start_move("dead", task)
        await self.mover.run("dead", task, self.stopping)
        after = self.tasks.move("dead", "a")
        assert after is not None
        return after


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with Broker(queues={name: {"lease": LEASE_S} for name in ("dead", "emails", "bills")}) as broker:
        yield Rig(broker.queues, monkeypatch)


async def test_each_message_returns_to_its_queue_and_is_acknowledged_after_it_was_sent(rig: Rig) -> None:
    task = await rig.run(letter(1, "emails"), letter(2, "bills"))

    assert rig.sent == [("emails", 1), ("bills", 2)]
    assert rig.receiver.log == ["send 1", "send 2", "ack 1", "ack 2"]
    assert (task.state, task.moved, task.reason) == ("COMPLETED", 2, None)


async def test_one_destination_takes_all_messages(rig: Rig) -> None:
    task = await rig.run(letter(1, "emails"), letter(2, None), destination="bills", allowed=["bills"])

    assert rig.sent == [("bills", 1), ("bills", 2)]
    assert task.state == "COMPLETED"


@pytest.mark.parametrize(("source", "reason"), [(None, NO_SOURCE), ("secret", NO_SOURCE), ("missing", NO_QUEUE)])
async def test_a_message_without_a_queue_fails_the_move_and_stays(rig: Rig, source: str | None, reason: str) -> None:
    rig.receiver.returns = False
    task = await rig.run(letter(1), letter(2, source), allowed=["emails", "missing"])

    assert (task.state, task.reason, rig.receiver.log) == ("FAILED", reason, [])
    assert rig.receiver.released == [1, 2]


async def test_a_message_that_was_not_sent_for_certain_is_sent_again(rig: Rig) -> None:
    rig.errors = {2: [BrokerUnavailable("away"), BrokerUnavailable("away")]}

    task = await rig.run(letter(1), letter(2))

    assert rig.receiver.log == ["send 1", "ack 1", "send 2", "ack 2"]
    assert (task.state, task.moved) == ("COMPLETED", 2)


async def test_a_message_that_does_not_fit_fails_the_move(rig: Rig) -> None:
    rig.receiver.returns = False
    rig.errors = {2: [MessageTooLarge("too large")]}

    task = await rig.run(letter(1), letter(2))

    assert (task.state, task.reason, task.moved) == ("FAILED", "too large", 1)
    assert (rig.receiver.log, rig.receiver.released) == (["send 1", "ack 1"], [2])


async def test_later_messages_stay_and_expired_ones_end(rig: Rig) -> None:
    """Else messages that fail at once would go round without an end."""
    await rig.directory.set_attributes("dead", {"MessageRetentionPeriod": "3600"})
    old_ms = NOW_MS - 3_700_000

    task = await rig.run(
        letter(1, sent_ms=NOW_MS + round(SKEW_S * 1000) + 1), letter(2, available_ms=old_ms), letter(3, sent_ms=old_ms)
    )

    assert rig.receiver.log == ["send 3", "ack 3", "ack 2"]
    assert [delivery.token.offset for delivery in rig.receiver.waiting] == [1]
    assert (task.state, task.moved) == ("COMPLETED", 1)


async def test_only_old_messages_that_were_deleted_are_logged_as_deleted(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "marq.sqs")
    await rig.directory.set_attributes("dead", {"MessageRetentionPeriod": "3600"})
    rig.receiver.over = [letter(2, available_ms=1)]

    await rig.run(letter(2, available_ms=1))

    assert rig.receiver.log == []
    assert not [message for message in caplog.messages if "MessageRetentionPeriod" in message]
    await rig.run(letter(3, available_ms=1))
    assert "messages older than MessageRetentionPeriod were deleted: queue=dead messages=1" in caplog.messages


async def test_a_rate_limits_polls_and_spaces_them(rig: Rig) -> None:
    await rig.run(*map(letter, range(6)), rate=3)

    assert set(rig.receiver.polls) == {3}
    assert rig.waits[:2] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("lease_s", [1, 43_200])
async def test_a_message_is_leased_for_as_long_as_a_move_takes_before_it_is_sent(rig: Rig, lease_s: int) -> None:
    """A longer lease would hide it from the endpoint that continues the move."""
    await rig.queues.change("dead", lease=lease_s)

    await rig.run(letter(1))

    assert rig.receiver.renewed == [LEASE_S * 1000]


@pytest.mark.parametrize("newer", [[], [letter(9, sent_ms=NOW_MS + 60_000)]], ids=["alone", "with-newer-ones"])
async def test_a_move_waits_for_the_messages_of_a_dead_endpoint(rig: Rig, newer: list[SqsDelivery]) -> None:
    """They are in flight there until their leases end."""
    in_flight = [letter(1)]

    async def count(queue: str) -> MessageCounts:
        if rig.receiver.now_s > LEASE_S:
            rig.receiver.waiting += in_flight
            in_flight.clear()
        return MessageCounts(len(rig.receiver.waiting), in_flight=len(in_flight), known=True)

    rig.mover._count = count

    task = await rig.run(*newer)

    assert (task.state, task.moved) == ("COMPLETED", 1)


async def test_a_move_does_not_wait_for_messages_that_clients_have_in_flight_for_longer(rig: Rig) -> None:
    async def count(queue: str) -> MessageCounts:
        return MessageCounts(0, in_flight=1, known=True)

    rig.mover._count = count

    assert (await rig.run()).state == "COMPLETED"
    assert LEASE_S + moving.QUIET_S <= rig.receiver.now_s < moving.MAX_QUIET_S


async def test_messages_of_a_fifo_queue_are_moved_later_if_a_lease_ends_before_they_are_sent(rig: Rig) -> None:
    await rig.directory.set_attributes("dead", {"MessageRetentionPeriod": "3600"})
    rig.receiver.over, rig.receiver.over_at_renewal = [letter(1)], True

    task = await rig.run(letter(1), letter(2), letter(3, available_ms=1))

    assert rig.receiver.released == [3, 1, 2]
    assert rig.receiver.log == ["send 1", "send 2", "ack 1", "ack 2", "ack 3"]
    assert (task.state, task.moved) == ("COMPLETED", 2)


async def test_a_lease_that_ends_before_the_acknowledgement_does_not_end_a_move(rig: Rig) -> None:
    rig.receiver.over = [letter(1)]

    task = await rig.run(letter(1), letter(2), letter(3))

    assert rig.receiver.log == ["send 1", "send 2", "send 3", "ack 2", "ack 3"]
    assert (task.state, task.moved) == ("COMPLETED", 3)


async def test_messages_that_wait_elsewhere_keep_a_move_running_for_a_while(rig: Rig) -> None:
    counted: list[float] = []

    async def count(queue: str) -> MessageCounts:
        counted.append(rig.receiver.now_s)
        return MessageCounts(1 if rig.receiver.now_s < 30 else 0, known=True)

    rig.mover._count = count

    assert (await rig.run()).state == "COMPLETED"
    assert moving.QUIET_S <= counted[0] < 30 <= rig.receiver.now_s < moving.MAX_QUIET_S


@pytest.mark.parametrize(
    ("counts", "reason"),
    [(MessageCounts(1, known=True), NOT_RECEIVED), (MessageCounts(1), NOT_RECEIVED), (MessageCounts(0), NOT_COUNTED)],
    ids=["some", "at-least-some", "unknown"],
)
async def test_a_move_fails_if_messages_may_be_left_that_do_not_arrive(
    rig: Rig, counts: MessageCounts, reason: str
) -> None:
    async def count(queue: str) -> MessageCounts:
        return counts

    rig.mover._count = count

    task = await rig.run(letter(1))

    assert (task.state, task.reason, task.moved) == ("FAILED", reason, 1)
    assert rig.receiver.now_s > moving.MAX_QUIET_S


async def test_a_cancelled_move_ends_and_a_stopped_one_or_a_purged_queue_continues_later(rig: Rig) -> None:
    async def cancel(most: int, wait_s: float) -> list[SqsDelivery]:
        await rig.tasks.cancel_move("dead", "a")
        return []

    rig.receiver.poll = cancel  # type: ignore[method-assign]
    assert (await rig.run()).state == "CANCELLED"
    rig.stopping.set()
    assert (await rig.run()).state == "RUNNING"
    rig.stopping.clear()
    await rig.tasks.start_purge("dead", PurgeTask(requested_s=time.time()))
    assert (await rig.run()).state == "RUNNING"


async def test_a_stop_during_a_poll_starts_no_receiver_and_ends_the_polled_messages(rig: Rig) -> None:
    poll, of = rig.receiver.poll, rig.receiver.of
    opened: list[str] = []

    async def stop(most: int, wait_s: float) -> list[SqsDelivery]:
        rig.stopping.set()
        return await poll(most, wait_s)

    def counted(queue: str) -> Receiver:
        opened.append(queue)
        return of(queue)

    rig.receiver.poll = stop  # type: ignore[method-assign]
    rig.mover._receivers = SimpleNamespace(of=counted)  # type: ignore[assignment]

    task = await rig.run(letter(1))

    assert opened == ["dead"]
    assert (task.state, task.moved, rig.receiver.log) == ("RUNNING", 1, ["send 1", "ack 1"])


async def test_a_move_of_a_deleted_queue_fails(rig: Rig) -> None:
    await rig.tasks.start_purge("dead", PurgeTask(requested_s=time.time(), deletes=True))

    task = await rig.run()

    assert (task.state, task.reason) == ("FAILED", NO_QUEUE)


async def test_a_message_whose_lease_ended_before_its_renewal_is_not_sent(rig: Rig) -> None:
    """Others may have it, and finish it: the copy would be a second message."""
    rig.receiver.returns = False

    await rig.run(letter(1)._replace(until_s=time.monotonic()), letter(2))

    assert rig.sent == [("emails", 2)]
    assert rig.receiver.released == [1]
