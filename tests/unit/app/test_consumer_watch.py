"""Which queues are read, as the members of a group tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import CoordinatorNotAvailableError

from marq.kafka.assignor import SpreadAssignor
from marq.kafka.group_members import DescribedGroup, DescribedMember, _group
from marq.wire.names import Names
from marq_worker.backlog.consumer_watch import is_read, unattended
from tests.unit.app.definitions import in_file

NAMES = Names("shop")
EMAILS = NAMES.group("emails")


def group(state: str = "Stable", error: int = 0, **partitions: list[int]) -> DescribedGroup:
    named = {topic.replace("_", "."): numbers for topic, numbers in partitions.items()}
    return DescribedGroup(EMAILS, state, [DescribedMember("m-1", "marq", "h", partitions=named)], error)


@pytest.mark.parametrize(
    ("described", "read"),
    [
        (DescribedGroup(EMAILS, "Empty"), False),
        (group(shop_messages=[0]), True),
        (group(orders=[0]), True),
        (group(), False),
        (group(others=[3]), False),
        # A consumer has just started.
        (group("PreparingRebalance"), True),
        (group("CompletingRebalance"), True),
        # What we may not see may have a consumer.
        (DescribedGroup(EMAILS, error=30), True),
    ],
)
def test_a_queue_is_read_by_a_member_with_one_of_its_partitions(described: DescribedGroup, read: bool) -> None:
    assert is_read("emails", described, NAMES, in_file(emails={"topic": "orders"})) is read


def test_a_group_that_could_not_be_described_is_an_error() -> None:
    with pytest.raises(CoordinatorNotAvailableError):
        is_read("emails", DescribedGroup(EMAILS, error=15), NAMES, in_file())


def test_members_are_told_apart_by_what_they_tell_their_group() -> None:
    metadata = SpreadAssignor(dict).metadata(["shop.messages"]).encode()
    assignment = ConsumerProtocolMemberAssignment(0, [("shop.messages", [1, 0])], b"").encode()
    members = [("one-1", "one", "marq", "/10.0.0.9", metadata, assignment), ("x-2", None, "x", "/h", b"", b"")]

    found = _group(4, 0, EMAILS, "Stable", "consumer", "roundrobin", members, 0)

    one, newcomer = found.members
    assert (one.id, one.instance_id, one.client_id, one.host) == ("one-1", "one", "marq", "10.0.0.9")
    assert isinstance(one.pid, int)
    assert one.partitions == {"shop.messages": [0, 1]}
    assert str(one) == f"one on 10.0.0.9 (process {one.pid})"
    assert (newcomer.pid, newcomer.partitions, str(newcomer)) == (None, {}, "x on h")


def test_a_broker_that_is_older_tells_no_instance_ids() -> None:
    found = _group(3, 0, EMAILS, "Stable", "consumer", "roundrobin", [("x-2", "x", "/h", b"", b"")], 0)

    assert found.members == [DescribedMember("x-2", "x", "h")]


class Admin:
    """Two brokers; the second one coordinates the only group that there is."""

    def __init__(self) -> None:
        self.described: list[tuple[int, list[str]]] = []

    async def describe_cluster(self) -> dict[str, Any]:
        return {"brokers": [{"node_id": 1}, {"node_id": 2}]}

    async def list_consumer_groups(self, brokers: list[int]) -> list[tuple[str, str]]:
        return [(EMAILS, "consumer")] if brokers == [2] else []

    async def _send_request(self, request: Any, broker: int) -> Any:
        self.described.append((broker, request._values[0]))

        groups = [
            (0, name, "Empty", "", "", [], 0) if name == EMAILS else (16, name, "", "", "", [], 0)
            for name in request._values[0]
        ]
        return SimpleNamespace(API_VERSION=4, groups=groups)


async def test_thousands_of_queues_are_asked_about_with_few_requests() -> None:
    admin, queues = Admin(), ["emails", *(f"never-read-{number}" for number in range(999))]

    found = await unattended(admin, NAMES, in_file(), queues)  # type: ignore[arg-type]

    assert found == set(queues)
    assert len(admin.described) == 5
