"""How a consumer takes part in its group: as a leader without metadata, and as a static member that was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import GroupLoadInProgressError, KafkaError, NoError, UnknownMemberIdError
from aiokafka.protocol.group import JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

from marq.kafka import group_consumer
from marq.kafka.assignor import SpreadAssignor
from marq.kafka.group_consumer import Coordinator
from marq.kafka.protocol import FENCED_INSTANCE_ID

#: The answer of an unavailable broker.
AWAY = None
MINE = "the id that this member had"


class FakeClient:
    """A client of a broker that answers metadata requests, and joins, as it is told."""

    def __init__(self) -> None:
        self.cluster = ClusterMetadata()
        #: The partitions of each topic, one answer after the other; the last one stays.
        self.metadata: list[dict[str, int] | None] = [{}]
        self.asked = asyncio.Event()
        #: Error codes for the first joins; later ones get GROUP_LOAD_IN_PROGRESS.
        self.joins: list[int] = []
        self.joined_as: list[str] = []
        self.syncs = 0

    def set_topics(self, topics: object) -> None: ...

    async def _maybe_wait_metadata(self) -> None: ...

    def force_metadata_update(self) -> asyncio.Future[bool]:
        answer = self.metadata.pop(0) if len(self.metadata) > 1 else self.metadata[0]
        if answer is not None:
            self.cluster._partitions = {topic: dict.fromkeys(range(count)) for topic, count in answer.items()}
        self.asked.set()
        done = asyncio.get_running_loop().create_future()
        done.set_result(answer is not None)
        return done

    async def send(self, node: int, request: Any, *, group: object) -> Any:
        if isinstance(request, LeaveGroupRequest):
            return SimpleNamespace(error_code=NoError.errno)
        if isinstance(request, SyncGroupRequest):
            self.syncs += 1
            return SimpleNamespace(error_code=GroupLoadInProgressError.errno)
        assert isinstance(request, JoinGroupRequest)
        self.joined_as.append(request._member_id)
        joined = {"generation_id": 1, "group_protocol": "roundrobin", "member_id": MINE, "leader_id": "another"}
        code = self.joins.pop(0) if self.joins else GroupLoadInProgressError.errno
        return SimpleNamespace(error_code=code, **joined)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def make(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Coordinator]]:
    monkeypatch.setattr(group_consumer, "_PAUSE_S", 0.01)
    monkeypatch.setattr(group_consumer, "LOOK_AGAIN_S", 0.01)
    made: list[Coordinator] = []

    def make(instance_id: str | None = None) -> Coordinator:
        assignors = (SpreadAssignor(dict),)
        coordinator = Coordinator(
            client, SubscriptionState(), group_id="g", group_instance_id=instance_id, assignors=assignors
        )
        coordinator.coordinator_id = 1
        made.append(coordinator)
        return coordinator

    yield make
    for coordinator in made:
        await coordinator.close()


def led(*topics: str) -> SimpleNamespace:
    """What the broker tells the leader of a group with one member."""
    metadata = SpreadAssignor(dict).metadata(topics).encode()
    return SimpleNamespace(API_VERSION=5, group_protocol="roundrobin", members=[("m", None, metadata)])


def assigned(assignments: Any) -> dict[str, list[int]]:
    return dict(assignments["m"].assignment)


async def test_a_leader_without_metadata_assigns_nothing_before_the_broker_answers(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.metadata = [AWAY, AWAY, AWAY, {"a": 2}]

    assert assigned(await make()._perform_assignment(led("a"))) == {"a": [0, 1]}


async def test_a_leader_that_is_closed_while_the_broker_is_away_sends_no_assignment(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.metadata = [AWAY]
    coordinator = make()
    assigning = asyncio.create_task(coordinator._perform_assignment(led("a")))
    await client.asked.wait()

    await coordinator.close()

    with pytest.raises(KafkaError, match="closed before it could assign partitions"):
        await assigning


async def test_a_topic_that_does_not_exist_holds_up_no_other_and_is_assigned_once_it_does(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.metadata = [{"a": 1}]
    coordinator = make()

    assert assigned(await coordinator._perform_assignment(led("a", "missing"))) == {"a": [0]}

    client.asked.clear()
    client.metadata = [{"a": 1, "missing": 1}]
    async with asyncio.timeout(60):
        await client.asked.wait()
    # As aiokafka's client does with an answer.
    coordinator._subscription.subscribe({"a", "missing"})
    coordinator._handle_metadata_update(client.cluster)
    assert coordinator._rejoin_needed_fut.done()


async def test_a_static_member_whose_id_another_client_has_stops_and_joins_no_more(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.joins = [FENCED_INSTANCE_ID]
    coordinator, fenced = make("one"), asyncio.Event()
    coordinator.on_fenced = fenced.set
    coordinator.member_id = MINE

    # The broker does not know the member that it has replaced: so it answers a heartbeat or a commit.
    coordinator.reset_generation()
    joining = asyncio.create_task(coordinator._do_rejoin_group(SimpleNamespace(topics={"a"}, active=True)))
    async with asyncio.timeout(60):
        await fenced.wait()

    assert client.joined_as == [MINE]
    await coordinator.close()
    assert await joining is False
    assert client.joined_as == [MINE]


async def test_a_static_member_whose_session_is_over_joins_as_a_new_one(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.joins = [UnknownMemberIdError.errno] * 2
    coordinator, subscription = make("one"), SimpleNamespace(topics={"a"}, active=True)
    coordinator.member_id = MINE
    coordinator.reset_generation()

    await coordinator._do_rejoin_group(subscription)
    await coordinator._do_rejoin_group(subscription)

    assert client.joined_as == [MINE, ""]


async def test_other_members_join_without_the_id_that_they_had(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.joins = [UnknownMemberIdError.errno]
    coordinator = make()
    coordinator.member_id = MINE
    coordinator.reset_generation()

    await coordinator._do_rejoin_group(SimpleNamespace(topics={"a"}, active=True))

    assert client.joined_as == [""]


async def test_a_member_joins_again_if_the_coordinator_loads_its_groups_during_a_rebalance(
    make: Callable[..., Coordinator], client: FakeClient
) -> None:
    client.joins = [NoError.errno]
    coordinator = make()

    joined = await coordinator._do_rejoin_group(SimpleNamespace(topics={"a"}, active=True))

    assert (joined, client.syncs) == (False, 1)
    assert coordinator._rejoin_needed_fut.done()
