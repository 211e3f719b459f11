"""FIFO queues: how messages are sent, and how outcomes of deliveries find the endpoint that holds the message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.client.message_token import Token
from marq.core.storage.rows import State
from marq.wire.markers import Source
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.fifo import FifoReceiver, move_options, send_options
from marq_worker.sqs.handles import Handle
from marq_worker.sqs.message_answers import DEDUPLICATION_HEADER, GROUP_HEADER, SEQUENCE_HEADER
from marq_worker.sqs.outcomes import ACK, RELEASE, RENEW, Outcomes, SettleRequest
from marq_worker.sqs.polling import LeaseStatus
from tests.unit.client.fakes import spin

TOKEN = Token("orders.fifo", 7, Source("marq.messages", 3), 17)
HERE, THERE = "http://here:9324", "http://there:9324"
CONTENT_BASED = QueueAttributes(fifo=True, content_based_deduplication=True)
IN_FLIGHT = LeaseStatus(State.LEASED_IN_ORDER, 1, 5_000)


def handle(url: str, attempt: int = 1) -> Handle:
    return Handle(TOKEN, "marq.messages/3/17", attempt, 0, url)


# --- sending ----------------------------------------------------------------------------------------------------------


def test_a_message_is_placed_by_its_group_and_deduplicated_by_its_id_or_its_body() -> None:
    parameters = {"MessageBody": "x", "MessageGroupId": "g"}

    named = send_options(CONTENT_BASED, 0, {**parameters, "MessageDeduplicationId": "1"}, [("a", b"b")])
    by_body = send_options(CONTENT_BASED, 0, parameters, [])

    assert (named["ordering_key"], named["deduplication_id"], named["delay"]) == ("g", "1", None)
    assert by_body["deduplication_id"] == sha256(b"x").hexdigest()
    with pytest.raises(SqsError, match="MessageDeduplicationId is missing") as caught:
        send_options(QueueAttributes(fifo=True), 0, parameters, [])
    assert caught.value.shape == "InvalidParameterValue"


def test_a_queue_with_the_name_of_a_deleted_one_has_other_deduplication_ids() -> None:
    parameters = {"MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "1"}

    first, second, third = [
        send_options(CONTENT_BASED, generation, parameters, []) for generation in (0, 1_700_000_000, 1_700_000_999)
    ]

    assert len({options["deduplication_id"] for options in (first, second, third)}) == 3
    # What receivers see.
    assert dict(second["headers"])[DEDUPLICATION_HEADER] == b"1"


def test_a_dead_letter_keeps_its_group_and_has_a_deduplication_id_of_its_own() -> None:
    headers = {GROUP_HEADER: b"g", SEQUENCE_HEADER: b"1", "a": b"b"}
    delivery = SqsDelivery(TOKEN, "marq.messages/3/17", 2, 0, b"x", headers)

    moved = move_options(delivery, list(headers.items()))
    without_group = move_options(delivery._replace(headers={}), [])

    # It gets another sequence number.
    assert moved["headers"] == [(GROUP_HEADER, b"g"), ("a", b"b")]
    assert (moved["ordering_key"], moved["deduplication_id"]) == (b"g", "orders.fifo marq.messages/3/17")
    assert without_group["ordering_key"] == delivery.id


# --- outcomes ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**32 - 1), st.sampled_from([ACK, RENEW, RELEASE]), st.integers(0, 10**9), st.booleans())
def test_an_outcome_passes_unchanged_between_endpoints(attempt: int, action: str, lease: int, counted: bool) -> None:
    outcome = SettleRequest(TOKEN, attempt, action, lease, counted)

    assert SettleRequest.read(outcome.document()) == outcome


class Rig:
    """Everything around the outcomes of one endpoint: what it holds, what the other one holds, and the tracker."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.held_here = self.held_there = True
        self.answers = True
        self.requests: list[int] = []
        self.lease = IN_FLIGHT
        self.outcomes = Outcomes(HERE, self, self, self, self._receiver)  # type: ignore[arg-type]

    def _receiver(self, queue: str) -> FifoReceiver:
        assert queue == TOKEN.queue
        receiver = FifoReceiver.__new__(FifoReceiver)
        receiver.settle = self._settle_here  # type: ignore[method-assign]
        return receiver

    async def _settle_here(self, outcome: SettleRequest) -> bool:
        self.log.append(f"here: {outcome.action}")
        return self.held_here

    # The other endpoint.
    async def settle(self, url: str, documents: Sequence[dict[str, Any]]) -> Sequence[bool]:
        assert url == THERE
        self.requests.append(len(documents))
        await asyncio.sleep(0)
        self.log += [f"there: {document['action']}" for document in documents]
        return [self.held_there] * len(documents) if self.answers else []

    # The tracker.
    async def ask(self, token: Token) -> LeaseStatus:
        self.log.append("asked")
        return self.lease

    # The settler by token.
    async def ack(self, tokens: Sequence[Token]) -> None:
        self.log.append("token: ack")

    async def renew(self, leases: Sequence[tuple[Token, int]]) -> None:
        self.log.append(f"token: renew {leases[0][1]}")

    async def release(self, tokens: Sequence[Token], *, counted: bool) -> None:
        self.log.append(f"token: release {counted}")


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_an_outcome_goes_to_the_endpoint_of_the_handle(rig: Rig) -> None:
    await rig.outcomes.ack([handle(HERE)])
    await rig.outcomes.ack([handle(THERE)])
    await rig.outcomes.renew([handle(THERE)], 5_000)
    await rig.outcomes.release([handle(THERE)])

    assert rig.log == ["here: ack", "there: ack", "there: renew", "there: release"]


@pytest.mark.parametrize("gone", ["it does not hold the message", "it does not answer"])
async def test_an_outcome_is_written_by_token_if_the_endpoint_is_gone(rig: Rig, gone: str) -> None:
    rig.held_there, rig.answers = gone == "it does not answer", gone != "it does not answer"

    await rig.outcomes.ack([handle(THERE)])
    await rig.outcomes.renew([handle(THERE)], 5_000)
    await rig.outcomes.release([handle(THERE)], counted=False)

    assert [line for line in rig.log if not line.startswith("there")] == [
        "asked", "token: ack", "asked", "token: renew 5000", "asked", "token: release False",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "lease",
    [
        IN_FLIGHT._replace(attempt=2),
        IN_FLIGHT._replace(left_ms=0),
        IN_FLIGHT._replace(state=State.WAITING_IN_ORDER),
    ],
)
async def test_a_handle_of_a_former_delivery_changes_nothing(rig: Rig, lease: LeaseStatus) -> None:
    rig.held_here, rig.lease = False, lease

    for settling, shape in (
        (rig.outcomes.ack([handle(HERE)]), "InvalidParameterValue"),
        (rig.outcomes.renew([handle(HERE)], 5_000), "MessageNotInflight"),
        (rig.outcomes.release([handle(HERE)]), "MessageNotInflight"),
    ):
        with pytest.raises(SqsError, match="has expired") as caught:
            await settling
        assert caught.value.shape == shape
    assert not any(line.startswith("token") for line in rig.log)


async def test_a_message_that_has_ended_can_be_deleted_again_but_not_hidden(rig: Rig) -> None:
    rig.held_here, rig.lease = False, LeaseStatus(0, 0, 0)

    await rig.outcomes.ack([handle(HERE)])
    await rig.outcomes.release([handle(HERE)], counted=False)
    with pytest.raises(SqsError, match="has expired"):
        await rig.outcomes.renew([handle(HERE)], 5_000)


async def test_outcomes_for_an_endpoint_go_together_while_a_request_is_under_way(rig: Rig) -> None:
    first = asyncio.create_task(rig.outcomes.ack([handle(THERE)]))
    for _ in range(3):
        await asyncio.sleep(0)
    assert rig.requests == [1]
    await asyncio.gather(first, *[rig.outcomes.ack([handle(THERE)]) for _ in range(5)])

    assert rig.requests == [1, 5]


async def test_a_stop_settles_the_outcomes_that_could_not_be_sent_by_token(rig: Rig) -> None:
    sending = asyncio.Event()

    async def settle(url: str, documents: Sequence[dict[str, Any]]) -> Sequence[bool]:
        sending.set()
        await asyncio.Event().wait()
        return []

    rig.settle = settle  # type: ignore[method-assign]
    first = asyncio.create_task(rig.outcomes.ack([handle(THERE)]))
    await sending.wait()
    second = asyncio.create_task(rig.outcomes.release([handle(THERE)]))
    await spin()

    await rig.outcomes.stop()

    await asyncio.wait_for(asyncio.gather(first, second), 60)
    assert sorted(rig.log) == ["asked", "asked", "token: ack", "token: release True"]
