"""What a receiver of polls keeps: deliveries on their way between endpoints, and deleted messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

import marq
from marq.client.message_token import Token
from marq.consumer.prefetch import PrefetchBuffer
from marq.leases.message import Message
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq.wire.markers import Source
from marq_worker.sqs import receiving
from marq_worker.sqs.deleted_messages import DELETED_S, MAX_DELETED, DeletedMessages
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.outcomes import Outcomes
from marq_worker.sqs.polling import PolledConsumer, TokenSettler
from marq_worker.sqs.receiving import (
    LONG_POLL_S,
    QueueReceiver,
    Receivers,
    end_of_poll_s,
)
from tests.unit.client.fakes import spin

TOKEN = Token("emails", 2**64 - 1, Source("marq.messages", 3), 2**40)
#: Shorter than the polls of the tests.
LIMIT_S = 20


def delivery(message_id: str = "marq.messages/3/7", attempt: int = 1) -> SqsDelivery:
    return SqsDelivery(TOKEN, message_id, attempt, 1_700_000_000_000, b"x", {})


def test_only_later_deliveries_of_a_deleted_message_are_ended() -> None:
    deleted = DeletedMessages()
    deleted.add("a", 2)

    assert [deleted.concerns(delivery("a", attempt)) for attempt in (1, 2, 3)] == [False, False, True]
    assert not deleted.concerns(delivery("b", 3))


def test_a_deletion_counts_for_a_minute() -> None:
    now_s = 0.0
    deleted = DeletedMessages(lambda: now_s)
    deleted.add("a", 1)

    now_s = DELETED_S - 1
    assert deleted.concerns(delivery("a", 2))
    now_s = DELETED_S
    assert not deleted.concerns(delivery("a", 2))


def test_deletions_that_no_longer_count_take_no_memory() -> None:
    now_s = 0.0
    deleted = DeletedMessages(lambda: now_s)
    for number in range(100):
        now_s = float(number)
        deleted.add(str(number), 1)

    assert len(deleted._deleted) == DELETED_S


def test_the_oldest_deletions_are_forgotten_first() -> None:
    deleted = DeletedMessages()
    for number in range(MAX_DELETED + 1):
        deleted.add(str(number), 1)

    assert not deleted.concerns(delivery("0", 2))
    assert deleted.concerns(delivery("1", 2))


def test_long_polls_end_together_and_never_too_early() -> None:
    assert [end_of_poll_s(now_s, 20) for now_s in (100.0, 100.1, 100.5, 100.51)] == [120.0, 120.5, 120.5, 121.0]


def test_short_polls_end_in_time() -> None:
    assert end_of_poll_s(100.1, LONG_POLL_S - 1) == 100.1 + LONG_POLL_S - 1


# --- messages of other endpoints --------------------------------------------------------------------------------------

OTHER = "http://other:9324"


class Idle:
    """A consumer without messages."""

    def __init__(self) -> None:
        self.error = None
        self._buffer = PrefetchBuffer("emails")

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def put_back(self, limit_s: float) -> None:
        return

    async def poll(self, most: int, *, max_bytes: int | None = None) -> list[Message]:
        return []

    async def wait(self, most: int, wait_s: float) -> None:
        async with asyncio.timeout(wait_s):
            await self._buffer.wait()


class OneOther:
    """Another endpoint, which answers as the test says; and what this one has released."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.answers: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.released: list[str] = []
        self.has_released = asyncio.Event()

    def of(self, queue: str) -> Sequence[str]:
        return [OTHER]

    async def ask(self, url: str, queue: str, most: int) -> list[dict[str, Any]]:
        self.asked.put_nowait(most)
        return await self.answers.get()

    def answer(self, *message_ids: str) -> None:
        self.answers.put_nowait([delivery(message_id).document(0) for message_id in message_ids])


class Receiver(QueueReceiver):
    def __init__(self, other: OneOther) -> None:
        client = ClientSettings.read("memory://", {}, owner="test")
        super().__init__("emails", client, "", None, other)  # type: ignore[arg-type]
        self._other = other
        self.offered = asyncio.Event()

    def _offer_foreign(self) -> None:
        if self._foreign:
            # The test continues before the woken poll.
            self.offered.set()
        super()._offer_foreign()

    def _new_consumer(self) -> Any:
        return Idle()

    async def stop(self) -> None:
        # A stop waits for the answers.
        for _ in self._asking:
            self._other.answer()
        await super().stop()

    async def _release(self, deliveries: Sequence[SqsDelivery]) -> None:
        self._other.released += [message.id for message in deliveries]
        self._other.has_released.set()


async def test_another_endpoint_is_asked_at_once_for_as_many_messages_as_polls_want() -> None:
    receiver = Receiver(other := OneOther())
    polls = [asyncio.create_task(receiver.poll(most, 10)) for most in (1, 2)]
    assert await other.asked.get() == 3

    other.answer("a", "b", "c")

    received = await asyncio.gather(*polls)
    assert [[message.id for message in deliveries] for deliveries in received] == [["a"], ["b", "c"]]
    await receiver.stop()
    assert other.released == []


async def test_a_poll_that_ends_does_not_look_at_all_others_if_no_message_is_there() -> None:
    """Thousands of long polls end together: looking at all that wait each time would block the loop for seconds."""
    receiver = Receiver(OneOther())
    woken: list[int] = []
    receiver._wake = woken.append  # type: ignore[method-assign]

    await asyncio.gather(*[receiver.poll(1, 0) for _ in range(3)])
    await receiver.stop()

    assert woken == []


async def test_messages_of_another_endpoint_do_not_stay_when_no_poll_waits() -> None:
    receiver = Receiver(other := OneOther())
    waiting, leaving = [asyncio.create_task(receiver.poll(1, 10)) for _ in range(2)]
    await other.asked.get()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    other.answer("a", "b")
    assert [message.id for message in await waiting] == ["a"]
    await asyncio.sleep(0)

    # A later poll would get it after its lease, when others have it, or have finished it.
    assert other.released == ["b"]
    other.answer()
    assert await receiver.poll(1, 0) == []
    await receiver.stop()


async def test_a_poll_for_another_endpoint_does_not_keep_a_message_from_a_client() -> None:
    """Both wait for the same consumer, and the one that has waited longest is woken first."""
    receiver = Receiver(other := OneOther())
    for_peer = asyncio.create_task(receiver.poll_for_peer(1, 30))
    await spin()
    poll = asyncio.create_task(receiver.poll(1, 30))
    await other.asked.get()

    other.answer("a")

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    for_peer.cancel()
    await receiver.stop()


async def test_if_a_client_leaves_as_its_poll_is_woken_another_poll_gets_the_message() -> None:
    receiver = Receiver(other := OneOther())
    leaving = asyncio.create_task(receiver.poll(1, 30))
    await other.asked.get()
    poll = asyncio.create_task(receiver.poll(1, 30))
    await spin()
    other.answer("a")
    await receiver.offered.wait()

    leaving.cancel()

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    await receiver.stop()


class Slow(Receiver):
    """Its consumer renews leases until the test sets ``renewed``; then it is empty."""

    def __init__(self, other: OneOther) -> None:
        super().__init__(other)
        self.renewing, self.renewed = asyncio.Event(), asyncio.Event()

    async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
        self.renewing.set()
        await self.renewed.wait()
        return []

    async def gets(self, *message_ids: str) -> None:
        """Let the other endpoint's messages arrive while the consumer renews leases."""
        await self.renewing.wait()
        self._ask_others()
        self._other.answer(*message_ids)
        await self.offered.wait()


async def test_a_poll_gets_a_message_that_arrives_while_the_consumer_renews_leases() -> None:
    receiver = Slow(OneOther())
    poll = asyncio.create_task(receiver.poll(1, 30))
    await receiver.gets("a")

    receiver.renewed.set()

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    await receiver.stop()


async def test_a_message_of_another_endpoint_does_not_wait_for_the_consumer() -> None:
    receiver = Slow(OneOther())
    busy = asyncio.create_task(receiver.poll(1, 30))
    await receiver.gets("a", "b")

    assert [message.id for message in await asyncio.wait_for(receiver.poll(10, 30), LIMIT_S)] == ["a", "b"]
    receiver.renewed.set()
    await receiver.stop()
    assert await busy == []


async def test_messages_of_another_endpoint_do_not_wait_for_the_consumer_of_their_poll() -> None:
    """It may have to renew the leases of its own messages first; the next poll gets those."""

    class Both(Receiver):
        async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
            return [delivery("own")] if self.offered.is_set() else []

    receiver = Both(other := OneOther())
    poll = asyncio.create_task(receiver.poll(10, 30))
    await other.asked.get()

    other.answer("a")

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    assert [message.id for message in await receiver.poll(10, 30)] == ["own"]
    await receiver.stop()


async def test_a_message_of_another_endpoint_that_all_polls_are_too_busy_to_take_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would stay hidden until a poll takes it, or until its lease ends."""
    monkeypatch.setattr(receiving, "MAX_WAIT_S", 0.0)
    receiver = Slow(other := OneOther())
    poll = asyncio.create_task(receiver.poll(1, 0))
    await receiver.gets("a")

    await asyncio.wait_for(other.has_released.wait(), LIMIT_S)
    assert other.released == ["a"]
    receiver.renewed.set()
    assert await poll == []
    await receiver.stop()


@pytest.mark.parametrize("ended_s", [0.0, 1.0])
async def test_a_poll_returns_no_message_of_another_endpoint_whose_lease_has_ended(ended_s: float) -> None:
    """A client of the other endpoint may have the redelivery already."""
    receiver = Receiver(other := OneOther())
    poll = asyncio.create_task(receiver.poll(2, 30))
    await other.asked.get()

    ended = delivery("ended").document(0) | {"lease_ms": round(-ended_s * 1000)}
    other.answers.put_nowait([ended, delivery("a").document(0)])

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    await receiver.stop()
    assert other.released == ["ended"]


async def test_a_poll_returns_no_message_of_its_own_whose_lease_has_ended() -> None:
    class Late(Receiver):
        async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
            return [delivery("ended")._replace(until_s=time.monotonic()), delivery("a")]

    receiver = Late(other := OneOther())

    assert [message.id for message in await receiver.poll(2, 30)] == ["a"]
    assert [message.id for message in await receiver.poll_for_peer(2, 30)] == ["a"]
    await receiver.stop()
    assert other.released == ["ended", "ended"]


async def test_a_poll_gets_a_message_of_another_endpoint_while_there_is_no_consumer() -> None:
    """A new consumer may need seconds to join the group."""

    class Joining(Receiver):
        def _new_consumer(self) -> Any:
            consumer = Idle()
            consumer.start = asyncio.Event().wait  # type: ignore[assignment,method-assign]
            return consumer

    receiver = Joining(other := OneOther())
    poll = asyncio.create_task(receiver.poll(1, 0))
    await other.asked.get()

    other.answer("a")

    assert [message.id for message in await asyncio.wait_for(poll, LIMIT_S)] == ["a"]
    await receiver.stop()
    assert other.released == []


async def test_messages_do_not_wait_until_redeliveries_of_deleted_ones_are_ended() -> None:
    ended = asyncio.Event()

    class Ending(Receiver):
        async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
            return [delivery("deleted", attempt=2), delivery("a")]

        async def _end(self, deliveries: Sequence[SqsDelivery]) -> None:
            await ended.wait()
            self._other.released += [message.id for message in deliveries]

    receiver = Ending(other := OneOther())
    receiver.deleted.add("deleted", 1)

    assert [message.id for message in await asyncio.wait_for(receiver.poll(2, 30), LIMIT_S)] == ["a"]
    ended.set()
    await receiver.stop()
    assert other.released == ["deleted"]


async def test_a_stop_does_not_wait_forever_for_a_poll_that_cannot_renew_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "STOP_S", 0.02)
    receiver = Slow(OneOther())
    poll = asyncio.create_task(receiver.poll(1, 0))
    await receiver.renewing.wait()

    await asyncio.wait_for(receiver.stop(), LIMIT_S)

    receiver.renewed.set()
    assert await poll == []


async def test_a_stop_releases_messages_that_another_endpoint_is_sending() -> None:
    """Otherwise no client would get them before their leases end, which would count as a delivery."""
    receiver = Receiver(other := OneOther())
    poll = asyncio.create_task(receiver.poll(1, 30))
    await other.asked.get()
    stopping = asyncio.create_task(QueueReceiver.stop(receiver))
    assert await poll == []
    await spin()

    other.answer("a")
    await asyncio.wait_for(stopping, LIMIT_S)

    assert other.released == ["a"]


async def test_a_stop_does_not_wait_forever_for_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "STOP_S", 0.02)
    receiver = Receiver(other := OneOther())
    poll = asyncio.create_task(receiver.poll(1, 30))
    await other.asked.get()

    await asyncio.wait_for(QueueReceiver.stop(receiver), LIMIT_S)

    assert await poll == []


async def test_a_stop_releases_messages_before_their_consumer_stops() -> None:
    """While it runs, it knows the messages; and it needs a moment for those that it is about to acquire."""
    steps: list[str] = []

    class Noting(Idle):
        async def put_back(self, limit_s: float) -> None:
            steps.append("put back")

        async def stop(self) -> None:
            steps.append("stop")

    class Releasing(Receiver):
        def _new_consumer(self) -> Any:
            return Noting()

        async def _release(self, deliveries: Sequence[SqsDelivery]) -> None:
            await spin()
            steps.extend([f"release {message.id}" for message in deliveries])

    receiver = Releasing(OneOther())
    await receiver._started.wait()
    receiver.release([delivery("a")])

    await receiver.stop()

    assert steps == ["release a", "put back", "stop"]


async def test_outcomes_reach_a_receiver_until_it_has_stopped() -> None:
    """It has the messages of a FIFO queue that clients delete meanwhile."""
    receivers = Receivers(lambda queue: Slow(OneOther()))
    receiver = receivers.of("emails")
    poll = asyncio.create_task(receiver.poll(1, 0))
    assert isinstance(receiver, Slow)
    await receiver.renewing.wait()

    stopping = asyncio.create_task(receivers.stop())
    await spin()

    assert receivers.known("emails") is receiver
    receiver.renewed.set()
    await stopping
    assert receivers.known("emails") is None
    assert await poll == []


async def test_the_stop_of_an_endpoint_waits_for_receivers_that_are_being_dropped() -> None:
    receivers = Receivers(lambda queue: Slow(OneOther()))
    receiver = receivers.of("emails")
    poll = asyncio.create_task(receiver.poll(1, 0))
    assert isinstance(receiver, Slow)
    await receiver.renewing.wait()
    dropping = asyncio.create_task(receivers.drop("emails"))
    await spin()
    dropping.cancel()
    await asyncio.gather(dropping, return_exceptions=True)

    stopping = asyncio.create_task(receivers.stop())
    await spin()

    assert not stopping.done()
    receiver.renewed.set()
    await stopping
    assert await poll == []


async def test_a_receiver_that_fails_to_stop_does_not_keep_others_running(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []

    class Stopping(Receiver):
        async def stop(self) -> None:
            await super().stop()
            stopped.append(self._queue)
            if len(stopped) == 1:
                raise ZeroDivisionError

    receivers = Receivers(lambda queue: Stopping(OneOther()))
    receivers.of("emails")
    receivers.of("orders")

    await receivers.stop()

    assert len(stopped) == 2
    assert caplog.messages == ["a queue's receiver was not stopped: ZeroDivisionError()"]


async def test_an_answer_to_another_endpoint_has_a_limit_and_the_next_one_has_the_other_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release would make the tracker write each of the others again, at every answer."""
    monkeypatch.setattr(receiving, "MAX_ANSWER_BYTES", 3_500)
    async with Broker() as broker:
        client = ClientSettings.read(broker.address, {}, owner="test")
        nobody: Any = OneOther()
        async with TokenSettler(client) as settler, marq.Producer(broker.address) as producer:
            for headers in ({}, {"large": bytes(1_000)}):
                await producer.send_many("emails", [bytes(10 if headers else 1_000)] * 10, headers=headers)
            outcomes = Outcomes("", settler, nobody, nobody, nobody)
            receiver = QueueReceiver("emails", client, "", outcomes, nobody)
            answers: list[list[SqsDelivery]] = []
            while sum(map(len, answers)) < 20:
                answers.append(await receiver.poll_for_peer(100, 1))
            await receiver.stop()

    assert max(map(len, answers)) == 4
    # A redelivery has the id of its first record.
    tokens = {message.id: message.token for answer in answers for message in answer}
    assert list(tokens) == [
        f"{token.source.topic}/{token.source.partition}/{token.offset}" for token in tokens.values()
    ]
    assert len(tokens) == 20


async def test_after_a_stop_no_queue_gets_a_receiver() -> None:
    other = OneOther()
    receivers = Receivers(lambda queue: Receiver(other))
    receiver = receivers.of("emails")
    assert receivers.of("emails") is receiver

    await receivers.stop()

    with pytest.raises(SqsError, match="the endpoint is stopping"):
        receivers.of("emails")
