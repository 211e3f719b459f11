"""What a receiver of polls keeps: deliveries on their way between endpoints, and deleted messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import marq
from marq.client.message_token import Token
from marq.consumer.message import Message
from marq.consumer.polled_consumer import TokenSettler
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq.wire.markers import Source
from marq_worker.app.sqs import receiving
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.receiving import (
    DELETED_S,
    LONG_POLL_S,
    MAX_DELETED,
    Deleted,
    Delivery,
    QueueReceiver,
    Receivers,
    end_of_poll_s,
)

TOKEN = Token("emails", 2**64 - 1, Source("marq.messages", 3), 2**40)


def delivery(message_id: str = "marq.messages/3/7", attempt: int = 1) -> Delivery:
    return Delivery(TOKEN, message_id, attempt, 1_700_000_000_000, b"x", {})


@given(st.binary(), st.dictionaries(st.text(), st.none() | st.binary(), max_size=3), st.integers(1, 2**32 - 1))
def test_a_delivery_passes_unchanged_between_endpoints(
    body: bytes, headers: dict[str, bytes | None], attempt: int
) -> None:
    sent = Delivery(TOKEN, "marq.messages/3/7", attempt, 1_700_000_000_000, body, headers, 1_700_000_000_007, 5, "url")

    assert Delivery.read(sent.document()) == sent


def test_an_endpoint_of_an_earlier_version_does_not_know_since_when_a_message_is_available() -> None:
    document = delivery()._replace(available_ms=5).document()
    del document["available_ms"]

    assert Delivery.read(document).available_ms == 0


def test_only_later_deliveries_of_a_deleted_message_are_ended() -> None:
    deleted = Deleted()
    deleted.add("a", 2)

    assert [deleted.concerns(delivery("a", attempt)) for attempt in (1, 2, 3)] == [False, False, True]
    assert not deleted.concerns(delivery("b", 3))


def test_a_deletion_counts_for_a_minute() -> None:
    now_s = 0.0
    deleted = Deleted(lambda: now_s)
    deleted.add("a", 1)

    now_s = DELETED_S - 1
    assert deleted.concerns(delivery("a", 2))
    now_s = DELETED_S
    assert not deleted.concerns(delivery("a", 2))


def test_deletions_that_no_longer_count_take_no_memory() -> None:
    now_s = 0.0
    deleted = Deleted(lambda: now_s)
    for number in range(100):
        now_s = float(number)
        deleted.add(str(number), 1)

    assert len(deleted._deleted) == DELETED_S


def test_the_oldest_deletions_are_forgotten_first() -> None:
    deleted = Deleted()
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
        self._woken = asyncio.Event()

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def poll(self, most: int, *, max_bytes: int | None = None) -> list[Message]:
        return []

    async def wait(self, most: int, wait_s: float) -> None:
        self._woken.clear()
        async with asyncio.timeout(wait_s):
            await self._woken.wait()

    def wake(self, count: int) -> None:
        self._woken.set()


class OneOther:
    """Another endpoint, which answers as the test says; and the settler of this one."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.answers: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.released: list[str] = []

    def of(self, queue: str) -> Sequence[str]:
        return [OTHER]

    async def ask(self, url: str, queue: str, most: int) -> list[dict[str, Any]]:
        self.asked.put_nowait(most)
        return await self.answers.get()

    def answer(self, *message_ids: str) -> None:
        self.answers.put_nowait([delivery(each).document() for each in message_ids])


class Receiver(QueueReceiver):
    def __init__(self, other: OneOther) -> None:
        client = ClientSettings.read("memory://", {}, owner="test")
        super().__init__("emails", client, "", None, other)  # type: ignore[arg-type]
        self._other = other

    def _new_consumer(self) -> Any:
        return Idle()

    async def _release(self, deliveries: Sequence[Delivery]) -> None:
        self._other.released += [each.id for each in deliveries]


async def test_another_endpoint_is_asked_at_once_for_as_many_messages_as_polls_want() -> None:
    receiver = Receiver(other := OneOther())
    polls = [asyncio.create_task(receiver.poll(most, 10)) for most in (1, 2)]
    assert await other.asked.get() == 3

    other.answer("a", "b", "c")

    received = await asyncio.gather(*polls)
    assert [[each.id for each in deliveries] for deliveries in received] == [["a"], ["b", "c"]]
    await receiver.stop()
    assert other.released == []


async def test_messages_of_another_endpoint_do_not_stay_when_no_poll_waits() -> None:
    receiver = Receiver(other := OneOther())
    waiting, leaving = [asyncio.create_task(receiver.poll(1, 10)) for _ in range(2)]
    await other.asked.get()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    other.answer("a", "b")
    assert [each.id for each in await waiting] == ["a"]
    await asyncio.sleep(0)

    # A later poll would get it after its lease, when others have it, or have finished it.
    assert other.released == ["b"]
    other.answer()
    assert await receiver.poll(1, 0) == []
    await receiver.stop()


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
            receiver = QueueReceiver("emails", client, "", settler, nobody)
            answers: list[list[Delivery]] = []
            while sum(map(len, answers)) < 20:
                answers.append(await receiver.poll_for_peer(100, 1))
            await receiver.stop()

    assert max(map(len, answers)) == 4
    # A redelivery has the id of its first record.
    tokens = {each.id: each.token for answer in answers for each in answer}
    assert list(tokens) == [f"{each.source.topic}/{each.source.partition}/{each.offset}" for each in tokens.values()]
    assert len(tokens) == 20


async def test_after_a_stop_no_queue_gets_a_receiver() -> None:
    other = OneOther()
    receivers = Receivers(lambda queue: Receiver(other))
    receiver = receivers.of("emails")
    assert receivers.of("emails") is receiver

    await receivers.stop()

    with pytest.raises(SqsError, match="the endpoint is stopping"):
        receivers.of("emails")
