"""Consumer groups as the broker describes them: the members of many groups, with few requests.

A broker lists the groups that it coordinates, so no group's coordinator has to be looked up, and it describes many
groups in one answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.protocol.admin import DescribeGroupsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Bytes, Int16, Int32, Schema, String

from marq.assignor import holders_of

#: Groups that are described with one request.
AT_ONCE = 200
#: The state of a group that has assigned its partitions.
STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group, and the partitions that are assigned to it.

    Args:
        id: the member id that the broker has given it.
        instance_id: the static instance id, None without one, or if the broker is older than Kafka 2.4.
        pid: the process id that a consumer of Marq tells its group, None for other members.
        url: the address of a worker's pages, "" for other members.
        holders: the numbers under which it acquires messages; empty for members that are no consumers of Marq.
    """

    id: str
    client_id: str
    host: str
    instance_id: str | None = None
    pid: int | None = None
    url: str = ""
    partitions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    holders: Sequence[int] = ()

    def __str__(self) -> str:
        """Return a label for people; two members of one process differ in their ids alone."""
        where = self.url or ("" if self.pid is None else f"process {self.pid}")
        return f"{self.instance_id or self.client_id} on {self.host}{f' ({where})' if where else ''}"

    def document(self) -> dict[str, Any]:
        """Return the same for programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    """A group: its state as Kafka names it, and its members; ``error``: why nothing is known, 0: it is known."""

    name: str
    state: str = ""
    members: Sequence[GroupMember] = ()
    error: int = 0


async def listed_groups(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Return the groups that we may see, each with the broker that coordinates it; raises KafkaError."""
    brokers = [int(broker["node_id"]) for broker in (await admin.describe_cluster())["brokers"]]
    return {name: broker for broker in brokers for name, *_ in await admin.list_consumer_groups([broker])}


async def described_members(admin: AIOKafkaAdminClient, groups: Mapping[str, int]) -> list[DescribedGroup]:
    """Describe groups, of which each is named with the broker to ask; raises KafkaError."""
    by_broker: dict[int, list[str]] = {}
    for name, broker in groups.items():
        by_broker.setdefault(broker, []).append(name)
    described = []
    for broker, names in by_broker.items():
        for first in range(0, len(names), AT_ONCE):
            answer = await _describe(admin, names[first : first + AT_ONCE], broker)
            described += [_group(answer.API_VERSION, *group) for group in answer.groups]
    return described


async def _describe(admin: AIOKafkaAdminClient, groups: list[str], broker: int) -> Any:
    try:
        return await admin._send_request(_DescribeGroups(groups), broker)
    except NotImplementedError:
        # Kafka before 2.3.
        return await admin._send_request(DescribeGroupsRequest(groups), broker)


class _DescribeGroupsResponseV4(Response):
    API_KEY = 15
    API_VERSION = 4
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "groups",
            Array(
                ("error_code", Int16),
                ("group", String("utf-8")),
                ("state", String("utf-8")),
                ("protocol_type", String("utf-8")),
                ("protocol", String("utf-8")),
                (
                    "members",
                    Array(
                        ("member_id", String("utf-8")),
                        ("group_instance_id", String("utf-8")),
                        ("client_id", String("utf-8")),
                        ("client_host", String("utf-8")),
                        ("member_metadata", Bytes),
                        ("member_assignment", Bytes),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
    )


class _DescribeGroupsV3(RequestStruct):
    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = DescribeGroupsResponse_v3
    SCHEMA = Schema(("groups", Array(String("utf-8"))), ("include_authorized_operations", Boolean))


class _DescribeGroupsV4(RequestStruct):
    API_KEY = 15
    API_VERSION = 4
    RESPONSE_TYPE = _DescribeGroupsResponseV4
    SCHEMA = _DescribeGroupsV3.SCHEMA


class _DescribeGroups(Request[_DescribeGroupsV3 | _DescribeGroupsV4]):
    """aiokafka 0.14 has no version 4, which tells the instance ids."""

    API_KEY = 15

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups

    def build(
        self, request_struct_class: type[_DescribeGroupsV3 | _DescribeGroupsV4]
    ) -> _DescribeGroupsV3 | _DescribeGroupsV4:
        return request_struct_class(list(self._groups), False)


def _group(
    version: int, code: int, name: str, state: str, _type: str, _protocol: str, members: Sequence[Any], *_: Any
) -> DescribedGroup:
    if version < 4:
        members = [(identity, None, *rest) for identity, *rest in members]
    return DescribedGroup(name, state, [_member(*member) for member in members], code)


def _member(
    identity: str, instance_id: str | None, client_id: str, host: str, metadata: bytes, assignment: bytes
) -> GroupMember:
    told = _told(metadata)
    user_data = _user_data(told)
    pid, url = user_data.get("pid"), user_data.get("url")
    return GroupMember(
        identity,
        client_id,
        host.removeprefix("/"),
        instance_id,
        pid if isinstance(pid, int) else None,
        url if isinstance(url, str) else "",
        _assigned(assignment),
        tuple(sorted(holders_of(told))),
    )


def _told(metadata: bytes) -> bytes | None:
    """Return what a member has told its group."""
    try:
        user_data: bytes | None = ConsumerProtocolMemberMetadata.decode(metadata).user_data
    except (ValueError, TypeError, AttributeError):
        return None
    return user_data


def _user_data(told: bytes | None) -> Mapping[str, Any]:
    """Return what a member has told its group, nothing where that is not an object of JSON."""
    try:
        user_data = json.loads(told or b"")
    except ValueError:
        return {}
    return user_data if isinstance(user_data, dict) else {}


def _assigned(assignment: bytes) -> dict[str, list[int]]:
    try:
        shares = ConsumerProtocolMemberAssignment.decode(assignment).assignment if assignment else []
    except ValueError:
        return {}
    return {topic: sorted(numbers) for topic, numbers in shares}
