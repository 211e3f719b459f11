"""Consumer groups as the broker describes them: the members of many groups, with few requests.

A broker lists the groups that it coordinates, so no group's coordinator has to be looked up, and it describes many
groups in one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from marq.kafka.assignor import holders_of, parsed
from marq.kafka.protocol import describe_groups

#: Maximum number of groups in one request.
AT_ONCE = 200
#: The state of a group whose partitions are assigned.
STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """A member of a group, and the partitions that are assigned to it.

    Args:
        id: the member id that the broker has given it.
        instance_id: the static instance id, None without one, or if the broker is older than Kafka 2.4.
        pid: the process id that a Marq consumer reports to its group, None for other members.
        url: the address of a worker's pages, "" for other members.
        holders: the numbers under which it acquires messages; empty for members that are not Marq consumers.
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
        """Return a human-readable label; two members of one process differ only in their ids."""
        where = self.url or ("" if self.pid is None else f"process {self.pid}")
        return f"{self.instance_id or self.client_id} on {self.host}{f' ({where})' if where else ''}"

    def document(self) -> dict[str, Any]:
        """Return the member in a machine-readable form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    """A group: its state as Kafka names it, and its members; ``error``: Kafka's error code, 0 if there was none.

    ``operations``: the bits of the operations that this client may use on it, if requested and the broker reports them.
    """

    name: str
    state: str = ""
    members: Sequence[DescribedMember] = ()
    error: int = 0
    operations: int | None = None

    @property
    def reads_nothing(self) -> bool:
        """Whether no member has a partition, and none may get one at the end of a rebalance."""
        has_partitions = any(numbers for member in self.members for numbers in member.partitions.values())
        return not self.members or (self.state == STABLE and not has_partitions)


async def listed_groups(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Return the groups that this client may see, each with its coordinator; raises KafkaError."""
    brokers = [int(broker["node_id"]) for broker in (await admin.describe_cluster())["brokers"]]
    return {name: broker for broker in brokers for name, *_ in await admin.list_consumer_groups([broker])}


async def described_members(
    admin: AIOKafkaAdminClient, groups: Mapping[str, int], *, permissions: bool = False
) -> list[DescribedGroup]:
    """Describe groups, each given with the broker to ask; raises KafkaError."""
    by_broker: dict[int, list[str]] = {}
    for name, broker in groups.items():
        by_broker.setdefault(broker, []).append(name)
    described = []
    for broker, names in by_broker.items():
        for first in range(0, len(names), AT_ONCE):
            answer = await describe_groups(admin, names[first : first + AT_ONCE], broker, permissions=permissions)
            described += [_group(answer.API_VERSION, *group) for group in answer.groups]
    return described


def _group(
    version: int, code: int, name: str, state: str, _type: str, _protocol: str, members: Sequence[Any], *bits: int
) -> DescribedGroup:
    if version < 4:
        members = [(identity, None, *rest) for identity, *rest in members]
    return DescribedGroup(name, state, [_member(*member) for member in members], code, *bits)


def _member(
    identity: str, instance_id: str | None, client_id: str, host: str, metadata: bytes, assignment: bytes
) -> DescribedMember:
    told = _told(metadata)
    user_data = parsed(told)
    pid, url = user_data.get("pid"), user_data.get("url")
    return DescribedMember(
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
    """Return the user data of a member, None if they can't be read."""
    try:
        user_data: bytes | None = ConsumerProtocolMemberMetadata.decode(metadata).user_data
    except (ValueError, TypeError, AttributeError):
        return None
    return user_data


def _assigned(assignment: bytes) -> dict[str, list[int]]:
    try:
        shares = ConsumerProtocolMemberAssignment.decode(assignment).assignment if assignment else []
    except ValueError:
        return {}
    return {topic: sorted(numbers) for topic, numbers in shares}
