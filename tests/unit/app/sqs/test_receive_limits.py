"""Messages that clients don't receive: what is done with them if the client hangs up, or if that fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from marq.client.message_token import Token
from marq.settings.definitions import Definitions
from marq.wire.errors import BrokerUnavailable, ConfigError, Forbidden, MarqError, MessageTooLarge
from marq.wire.markers import Source
from marq_worker.sqs import deliveries, message_operations, receive_limits
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_operations import MessageOperations
from marq_worker.sqs.receive_limits import LEAST_LEASE_S, UNMOVABLE_S, OldMessages, ReceiveLimits
from tests.unit.client.fakes import spin

ATTRIBUTES = QueueAttributes(dead_letter_queue="dead", max_receive_count=1, retention_s=3600)
#: The brokers' time; this machine's clock is days ahead.
NOW_MS = round(time.time() * 1000) - 5 * 86_400_000
OLD_MS = NOW_MS - 7_200_000
LIMIT_S = 10


def message(number: int, attempt: int = 2, available_ms: int = NOW_MS, received_ms: int = NOW_MS) -> SqsDelivery:
    """Return a message that was sent long ago, with a delay."""
    token = Token("emails", 1, Source("marq.messages", 0), number)
    members = {"available_ms": available_ms, "received_ms": received_ms}
    return SqsDelivery(token, f"marq.messages/0/{number}", attempt, 1, b"x", {}, **members)


class Rig:
    """The limits; a dead-letter queue, outcomes and a receiver that say what happened; and the receiving operation."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.attributes = ATTRIBUTES
        self.errors: dict[int, Exception] = {}
        self.moving = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.polls: list[list[SqsDelivery]] = []
        #: If set, every poll finds this message.
        self.always: SqsDelivery | None = None
        self.stopped = False
        #: The errors of the next renewals.
        self.refusals: list[SqsError] = []
        #: How long a renewal takes, and the time that has passed because of that.
        self.renewal_s = self.now_s = 0.0
        directory: Any = SimpleNamespace(
            exists=lambda name: name == "dead",
            get=lambda name: SimpleNamespace(attributes=self.attributes),
            why_not_pollable=lambda name: None,
        )
        parts: Any = self
        outcomes: Any = SimpleNamespace(ack=self.ack, release=self.outcomes_release, renew=self.renew)
        self.limits = ReceiveLimits(directory, outcomes, parts, OldMessages(outcomes))
        queues = SimpleNamespace(definitions=Definitions())
        unused: Any = dict.fromkeys(("producer", "visibility"))
        self.operations = MessageOperations(
            queues=queues, directory=directory, receivers=parts, outcomes=outcomes,
            limits=self.limits, handles=parts, ids=SimpleNamespace(of=str), **unused,
        )  # type: ignore[arg-type]  # fmt: skip

    async def end(self, *messages: SqsDelivery) -> None:
        """End these messages as their limits say, and wait until all is done."""
        await self.limits.end("emails", self.limits.divide(list(messages), self.attributes))
        await self.limits.stop()

    async def receive(self, wait_s: int = 0, **parameters: int) -> list[str]:
        """Receive up to ten messages; return their ids."""
        parameters = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": wait_s, **parameters}
        async with asyncio.timeout(LIMIT_S):
            answer = await self.operations.receive("emails", parameters)
        return [entry["MessageId"] for entry in answer.get("Messages", [])]

    # The receiver.
    def of(self, queue: str) -> Rig:
        return self

    async def poll(self, most: int, wait_s: float) -> list[SqsDelivery]:
        await asyncio.sleep(0)
        if self.always is not None:
            return [self.always]
        return self.polls.pop(0) if self.polls else []

    def release(self, deliveries: Sequence[SqsDelivery]) -> None:
        self.log += [f"released {delivery.token.offset}" for delivery in deliveries]

    # The receipt handles.
    def issue(self, *parts: Any) -> str:
        return "handle"

    # The dead-letter queue, and the outcomes.
    async def outcomes_release(self, deliveries: Sequence[SqsDelivery], *, counted: bool = True) -> None:
        self.log += [f"released {delivery.token.offset} counted={counted}" for delivery in deliveries]

    async def renew(self, deliveries: Sequence[SqsDelivery], lease_ms: int) -> None:
        self.now_s += self.renewal_s
        if self.refusals:
            raise self.refusals.pop()
        self.log += [f"leased {delivery.token.offset} for {lease_ms}" for delivery in deliveries]

    async def move(self, delivery: SqsDelivery, queue: str, target: str) -> None:
        self.moving.set()
        await self.gate.wait()
        number = delivery.token.offset
        if number in self.errors:
            raise self.errors[number]
        self.log.append(f"moved {number}")

    async def ack(self, deliveries: Sequence[SqsDelivery]) -> None:
        self.log.extend(f"acked {delivery.token.offset}" for delivery in deliveries)


def test_only_messages_that_were_available_for_longer_than_a_retention_that_a_client_chose_are_too_old() -> None:
    """By the brokers' clock; without it, no message is."""
    limits = Rig().limits
    messages = [message(1, 1), message(2, 1, OLD_MS), message(3, 1, 0), message(4, 1, OLD_MS, received_ms=0)]

    def old(retention_s: int | None) -> list[int]:
        attributes = replace(ATTRIBUTES, retention_s=retention_s)
        return [delivery.token.offset for delivery in limits.divide(messages, attributes).old]

    assert old(3_600) == [2]
    assert old(None) == []


async def test_each_message_is_deleted_as_soon_as_it_was_moved() -> None:
    rig = Rig()
    polled = [message(1), message(2, attempt=1), message(3, available_ms=OLD_MS), message(4)]
    divided = rig.limits.divide(polled, ATTRIBUTES)

    await rig.limits.end("emails", divided)
    await rig.limits.stop()

    assert [delivery.token.offset for delivery in divided.deliverable] == [2]
    assert rig.log == ["acked 3", "moved 1", "acked 1", "moved 4", "acked 4"]


async def test_a_message_whose_lease_has_ended_is_not_moved_because_another_poll_may_have_it() -> None:
    rig = Rig()
    ended = message(1)._replace(until_s=time.monotonic() - 1)

    await rig.end(ended, message(2))

    assert rig.log == ["moved 2", "acked 2"]


async def test_no_move_begins_after_a_stop_because_it_could_not_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_limits, "STOP_S", 0)
    rig = Rig()
    rig.gate.clear()
    await rig.limits.end("emails", rig.limits.divide([message(1), message(2)], ATTRIBUTES))
    await rig.moving.wait()

    await rig.limits.stop()
    rig.gate.set()
    await spin()

    assert rig.log == ["moved 1", "acked 1"]


async def test_deleted_messages_are_logged_at_once_and_then_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, old = Rig(), [message(1), message(2)]
    monkeypatch.setattr(receive_limits, "LOG_S", 0)

    def logged() -> list[tuple[int, str]]:
        return [(record.levelno, record.getMessage().partition(": ")[2]) for record in caplog.records]

    first = [(logging.WARNING, "queue=emails messages=2"), (logging.WARNING, "queue=bills messages=2")]
    for queue in ("emails", "bills", "emails", "emails"):
        await rig.limits._old_messages.delete(queue, old)
    assert logged() == first
    for _ in range(3):
        await asyncio.sleep(0)
    assert logged() == [*first, (logging.WARNING, "queue=emails messages=4")]

    monkeypatch.setattr(receive_limits, "LOG_S", 60)
    for _ in range(3):
        await rig.limits._old_messages.delete("orders", old)
    await rig.limits.stop()
    assert [text for _, text in logged()[3:]] == ["queue=orders messages=2", "queue=orders messages=4"]


async def test_short_leases_are_extended_before_messages_are_moved() -> None:
    """If a lease ended before the acknowledgement, its message would be redelivered, and moved again."""
    rig = Rig()
    rig.attributes = replace(ATTRIBUTES, visibility_timeout_s=1)

    await rig.end(message(1), message(2))

    leased = [f"leased {number} for {LEAST_LEASE_S * 1000}" for number in (1, 2)]
    assert rig.log == [*leased, "moved 1", "acked 1", "moved 2", "acked 2"]


async def test_a_client_that_hangs_up_causes_no_second_copies() -> None:
    rig = Rig()
    rig.gate.clear()
    rig.polls = [[message(1), message(2)]]
    call = asyncio.create_task(rig.operations.receive("emails", {"MaxNumberOfMessages": 10}))
    async with asyncio.timeout(LIMIT_S):
        await rig.moving.wait()

    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert rig.log == []
    rig.gate.set()
    await rig.limits.stop()

    assert rig.log == ["moved 1", "acked 1", "moved 2", "acked 2"]


async def test_a_slow_dead_letter_queue_does_not_hold_up_the_other_messages_of_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their leases may end meanwhile. Beyond a limit, because the endpoint keeps them, dead letters stay leased."""
    monkeypatch.setattr(receive_limits, "MAX_BEGUN", 1)
    rig = Rig()
    rig.gate.clear()
    rig.polls = [[message(1), message(2, attempt=1)], [message(3), message(4, attempt=1)]]

    assert [await rig.receive() for _ in range(2)] == [["marq.messages/0/2"], ["marq.messages/0/4"]]
    rig.gate.set()
    await asyncio.wait(rig.limits._ending)
    assert rig.log == ["moved 1", "acked 1"]
    rig.polls = [[message(3)]]
    assert await rig.receive() == []
    await rig.limits.stop()
    assert rig.log == ["moved 1", "acked 1", "moved 3", "acked 3"]


async def test_a_poll_gets_messages_that_follow_dead_ones_while_these_are_moved() -> None:
    rig = Rig()
    rig.gate.clear()
    rig.polls = [[message(1)], [message(2, attempt=1)]]

    assert await rig.receive(wait_s=20) == ["marq.messages/0/2"]
    rig.gate.set()
    await rig.limits.stop()
    assert rig.log == ["moved 1", "acked 1"]


async def test_polls_begin_no_more_than_a_number_of_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint keeps the messages meanwhile."""
    monkeypatch.setattr(receive_limits, "MAX_BEGUN", 1)
    rig = Rig()
    rig.gate.clear()
    rig.polls = [[message(number)] for number in (1, 2, 3)]
    call = asyncio.create_task(rig.operations.receive("emails", {}))
    await rig.moving.wait()
    await spin()

    assert rig.polls == [[message(3)]]
    rig.gate.set()
    assert await call == {}


@pytest.mark.parametrize(
    ("error", "moved"), [(MarqError("x"), ["moved 2", "acked 2"]), (BrokerUnavailable("x"), []), (Forbidden("x"), [])]
)
async def test_a_message_that_can_t_be_moved_does_not_hold_up_the_others(error: Exception, moved: list[str]) -> None:
    """It is tried again after its visibility timeout. Without a broker, the others would only wait, too."""
    rig = Rig()
    rig.errors[1] = error

    await rig.end(message(1), message(2))

    assert rig.log == moved


@pytest.mark.parametrize("error", [MessageTooLarge("too large"), ConfigError("own topic")])
async def test_a_message_that_can_never_be_moved_is_delivered_as_without_a_redrive_policy(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would block its group until Kafka's retention ends it."""
    now_s = 0.0
    rig = Rig()
    rig.limits._clock = lambda: now_s
    rig.errors[1] = error
    await rig.end(message(1), message(2))
    assert rig.log == ["released 1 counted=False", "moved 2", "acked 2"]
    assert [str(error) in text for text in caplog.messages] == [True]

    assert rig.limits.divide([message(1)], ATTRIBUTES).dead == []
    # The policy or the queue may have been changed.
    now_s = UNMOVABLE_S
    assert rig.limits.divide([message(1)], ATTRIBUTES).deliverable == []


async def test_a_poll_ends_in_time_although_there_are_more_messages_to_delete() -> None:
    rig = Rig()
    rig.always = message(1, available_ms=OLD_MS)

    assert await rig.receive() == []
    assert rig.log


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Return a rig whose clock moves during renewals only."""
    rig = Rig()
    for module in (deliveries, message_operations):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: rig.now_s))
    return rig


async def test_a_poll_returns_no_message_whose_lease_ended_while_its_timeout_was_changed(clocked: Rig) -> None:
    """The redelivery may be with another client; if the change was in time after all, the release ends it."""
    clocked.polls = [[message(1, attempt=1)._replace(until_s=3.0), message(2, attempt=1)._replace(until_s=3.1)]]
    clocked.renewal_s = 3.0

    assert await clocked.receive(VisibilityTimeout=600) == ["marq.messages/0/2"]
    assert clocked.log == ["leased 1 for 600000", "leased 2 for 600000", "released 1"]


async def test_a_timeout_that_was_over_before_it_was_durable_counts_as_ended(clocked: Rig) -> None:
    clocked.polls = [[message(1, attempt=1)], [], [message(2, attempt=1)]]
    clocked.renewal_s = 1.0

    assert await clocked.receive(VisibilityTimeout=1) == []
    assert clocked.log == ["leased 1 for 1000", "released 1"]
    # This client wants it visible at once.
    assert await clocked.receive(VisibilityTimeout=0) == ["marq.messages/0/2"]


async def test_a_poll_goes_on_if_the_lease_of_a_fifo_message_ended_before_its_timeout_was_changed() -> None:
    """The client has not asked for this message, so an error would tell it nothing."""
    rig = Rig()
    rig.polls = [[message(1, attempt=1), message(2, attempt=1)], [message(3, attempt=1)]]
    rig.refusals = [SqsError("MessageNotInflight", "the visibility timeout of this delivery is over")]

    assert await rig.receive(VisibilityTimeout=600) == ["marq.messages/0/3"]
    assert rig.log == ["released 1", "released 2", "leased 3 for 600000"]
