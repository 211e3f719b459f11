"""``faust -A app state``: the owner and the position of each partition; without an owner, the last one.

It joins no group and needs no worker: groups, changelog and markers have all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code

from agents.listing import moment
from app.commands.command import JSON, command, open_queues
from app.commands.terminal import WATCH, Column, bar, looked, show
from app.readable import span
from marq.core.storage.rows import HELD
from marq.kafka.connection import client_options, close_admin, started
from marq.kafka.group_members import DescribedGroup, GroupMember, described_members, listed_groups
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader
from marq.kafka.owned_partitions import Owned
from marq.kafka.positions import committed_by
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Source

NO_OWNER = "none"
#: Characters at the end of a member id that tell the members of one process apart.
_TAIL = 8

_MARKERS = (
    Column("markers", right=True),
    Column("owner", least=16),
    Column("behind", right=True, rank=1),
    Column("open", right=True, rank=1),
    Column("oldest lease", right=True, rank=2),
    Column("last owner", least=16, rank=4),
    Column("last wrote", rank=3),
)
_PARTITIONS = (
    Column("group", least=16),
    Column("topic", least=14, rank=1),
    Column("part", right=True),
    Column("owner", least=16),
    Column("member", rank=4),
    Column("earliest", right=True, rank=5),
    Column("committed", right=True, rank=2),
    Column("behind", right=True),
    Column("oldest lease", right=True, rank=3),
)
_MEMBERS = (
    Column("group", least=16),
    Column("member", rank=1),
    Column("instance id", rank=2),
    Column("client id", rank=3),
    Column("host", rank=2),
    Column("process", right=True),
    Column("partitions", right=True),
)


@command(WATCH, JSON)
async def state(self: Any, watch: float | None, as_json: bool) -> int:
    """Show the owner, or last owner, and position of each partition; exit 1 if a markers partition has no owner."""
    client = self.app.client
    async with open_queues(client, changelog=True) as queues:

        async def look() -> dict[str, Any]:
            groups = await _groups(client)
            with bar("reading the changelog") as progress:
                owned = await Inspector(client, queues.definitions).owned(progress, incomplete=True)
            async with LogReader(client, committed=False) as view:
                ranges = await _ranges(view, groups.values())
            return described(client, queues.definitions, groups, owned, ranges, time.time() * 1000)

        document = await looked(look, _show, watch=watch, as_json=as_json)
    return 0 if all(partition["owner"] for partition in document["markers"]) else 1


@dataclass(frozen=True)
class Group:
    """A consumer group: its members, and by partition the owner, the committed offset and the committer."""

    described: DescribedGroup
    owners: Mapping[Source, GroupMember] = field(default_factory=dict)
    committed: Mapping[Source, int] = field(default_factory=dict)
    committers: Mapping[Source, str] = field(default_factory=dict)

    @property
    def sources(self) -> set[Source]:
        return {*self.owners, *self.committed}


def described(
    client: ClientSettings,
    definitions: Definitions,
    groups: Mapping[str, Group],
    owned: Mapping[int, Owned],
    ranges: Mapping[Source, range],
    now_ms: float,
) -> dict[str, Any]:
    names = client.names
    owners = groups[names.app_id].owners if names.app_id in groups else {}
    leased = {partition: _leases_since(each) for partition, each in owned.items()}
    oldest: dict[tuple[str, Source], int] = {}
    for since in leased.values():
        for (queue, source), since_ms in since.items():
            key = definitions.consumer_group(queue, names), source
            oldest[key] = min(since_ms, oldest.get(key, since_ms))
    return {
        "markers": [
            {
                "partition": partition,
                **_owner(owners.get(Source(names.markers, partition))),
                "applied_offset": each.applied,
                "end": each.end,
                "behind": each.behind,
                "open": len(each.tracker.book),
                "stopped_before": None if each.unknown is None else each.unknown.offset,
                "oldest_lease_seconds": _age_s(min(leased[partition].values(), default=None), now_ms),
                "last_owner": each.owner or None,
                "last_wrote": None if each.written_ms is None else moment(each.written_ms),
            }
            for partition, each in sorted(owned.items())
        ],
        "groups": [
            {
                "group": name,
                "state": group.described.state,
                "members": [_member(member) for member in group.described.members],
                "partitions": [
                    _partition(group, source, ranges.get(source), _age_s(oldest.get((name, source)), now_ms))
                    for source in sorted(group.sources)
                ],
            }
            for name, group in sorted(groups.items())
            if name != names.app_id
        ],
    }


def _leases_since(owned: Owned) -> dict[tuple[str, Source], int]:
    """Return, by queue and source, when the oldest lease of a message in flight began, by the log's clock."""
    since: dict[tuple[str, Source], int] = {}
    for source, leases in owned.tracker.book.leases_by_source():
        for _, lease in leases:
            if lease.state in HELD:
                key = lease.queue, source
                since[key] = min(lease.since_ms, since.get(key, lease.since_ms))
    return since


def _owner(member: GroupMember | None) -> dict[str, Any]:
    return {"owner": None if member is None else str(member), "owner_id": None if member is None else member.id}


def _member(member: GroupMember) -> dict[str, Any]:
    partitions = sum(map(len, member.partitions.values()))
    return {"member": str(member), **member.document(), "partitions": partitions}


def _partition(group: Group, source: Source, span: range | None, oldest_lease_s: float | None) -> dict[str, Any]:
    committed = group.committed.get(source)
    start, end = (0, 0) if span is None else (span.start, span.stop)
    return {
        "topic": source.topic,
        "partition": source.partition,
        **_owner(group.owners.get(source)),
        # The last committer; an owner that has not committed yet is not the last owner.
        "last_owner": group.committers.get(source),
        "earliest": start,
        "committed": committed,
        "end": end,
        "behind": max(0, end - max(start, committed or 0)),
        "oldest_lease_seconds": oldest_lease_s,
    }


def _age_s(since_ms: int | None, now_ms: float) -> float | None:
    return None if since_ms is None else max(0.0, (now_ms - since_ms) / 1000)


def _show(document: dict[str, Any]) -> None:
    show(
        _MARKERS,
        [
            (
                str(each["partition"]),
                each["owner"] or NO_OWNER,
                f"{each['behind']:,}",
                f"{each['open']:,}",
                _age(each["oldest_lease_seconds"]),
                each["last_owner"] or "unknown",
                (each["last_wrote"] or "never").replace("T", " ").partition(".")[0],
            )
            for each in document["markers"]
        ],
    )
    partitions = [
        (
            group["group"],
            each["topic"],
            str(each["partition"]),
            each["owner"] or (f"{NO_OWNER}, last {each['last_owner']}" if each["last_owner"] else NO_OWNER),
            (each["owner_id"] or "")[-_TAIL:],
            f"{each['earliest']:,}",
            "" if each["committed"] is None else f"{each['committed']:,}",
            f"{each['behind']:,}",
            _age(each["oldest_lease_seconds"]),
        )
        for group in document["groups"]
        for each in group["partitions"]
    ]
    if partitions:
        show(_PARTITIONS, partitions)
    members = [
        (
            group["group"],
            each["id"],
            each["instance_id"] or "",
            each["client_id"],
            each["host"],
            "" if each["pid"] is None else str(each["pid"]),
            str(each["partitions"]),
        )
        for group in document["groups"]
        for each in group["members"]
    ]
    if members:
        show(_MEMBERS, members)
    for each in document["markers"]:
        if (offset := each["stopped_before"]) is not None:
            number = each["partition"]
            command = f"faust -A app quarantine {number} {offset}"
            print(f"markers partition {number} stops before offset {offset}: {command}")
    if not all(each["owner"] for each in document["markers"]):
        print("partitions of the markers have no owner: no lease ends there; start a worker: faust -A app worker")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


async def _groups(client: ClientSettings) -> dict[str, Group]:
    """Return the groups of the namespace, with that of the trackers."""
    names = client.names
    admin = await started(lambda: AIOKafkaAdminClient(**client_options(client)), client, close_admin)
    try:
        listed = await listed_groups(admin)
        ours = {name: listed[name] for name in sorted(listed) if names.is_group(name) or name == names.app_id}
        return {each.name: await _group(admin, each) for each in await described_members(admin, ours)}
    except KafkaError as error:
        raise BrokerUnavailable(f"{client.bootstrap_servers}: cannot describe the consumer groups: {error}") from error
    finally:
        await close_admin(admin)


async def _group(admin: AIOKafkaAdminClient, group: DescribedGroup) -> Group:
    if group.error:
        # Otherwise all partitions would seem to have no owner.
        raise for_code(group.error)
    owners = {
        Source(topic, number): member
        for member in group.members
        for topic, numbers in member.partitions.items()
        for number in numbers
    }
    offsets = await admin.list_consumer_group_offsets(group.name)
    committed = {Source(*tp): each for tp, each in offsets.items() if each.offset >= 0}
    return Group(
        group,
        owners,
        {source: each.offset for source, each in committed.items()},
        {source: by for source, each in committed.items() if (by := committed_by(each.metadata or ""))},
    )


async def _ranges(view: LogReader, groups: Iterable[Group]) -> dict[Source, range]:
    topics = sorted({source.topic for group in groups for source in group.sources})
    return {source: span for topic in topics for source, span in (await view.ranges(topic)).items()}
