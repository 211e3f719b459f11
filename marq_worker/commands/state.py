"""``marq state``: the owner and the position of each partition; without an owner, the last one.

It joins no group and needs no worker: everything is in the groups, the changelog and the markers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code

from marq.core.storage.rows import HELD
from marq.kafka.group_members import DescribedGroup, DescribedMember, described_members, listed_groups
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader, existing_ranges
from marq.kafka.owned_partitions import Owned
from marq.kafka.queue_positions import committed_by
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq_worker.commands.command import JSON, Setup, command, open_groups, open_queues
from marq_worker.commands.terminal import WATCH, Column, bar, cell, duration, interval, looked, number, show
from marq_worker.web.message_listing import moment

NO_OWNER = "none"
#: Characters at the end of a member id that tell the members of one process apart.
_TAIL = 8


def _owner_or_last(row: Mapping[str, Any]) -> str:
    return row["owner"] or (f"{NO_OWNER}, last {row['last_owner']}" if row["last_owner"] else NO_OWNER)


_MARKERS = (
    Column("markers", cell("partition"), right=True),
    Column("owner", lambda row: row["owner"] or NO_OWNER, least=16),
    Column("lag", number("lag"), right=True, rank=1),
    Column("unfinished", number("unfinished"), right=True, rank=1),
    Column("oldest lease", duration("oldest_lease_seconds"), right=True, rank=2),
    Column("last owner", lambda row: row["last_owner"] or "unknown", least=16, rank=4),
    Column("last wrote", lambda row: (row["last_wrote"] or "never").replace("T", " ").partition(".")[0], rank=3),
)
_PARTITIONS = (
    Column("group", cell("group"), least=16),
    Column("topic", cell("topic"), least=14, rank=1),
    Column("part", cell("partition"), right=True),
    Column("owner", _owner_or_last, least=16),
    Column("member", lambda row: (row["owner_id"] or "")[-_TAIL:], rank=4),
    Column("earliest", number("earliest"), right=True, rank=5),
    Column("committed", number("committed"), right=True, rank=2),
    Column("lag", number("lag"), right=True),
    Column("oldest lease", duration("oldest_lease_seconds"), right=True, rank=3),
)
_MEMBERS = (
    Column("group", cell("group"), least=16),
    Column("member", cell("id"), rank=1),
    Column("instance id", cell("instance_id"), rank=2),
    Column("client id", cell("client_id"), rank=3),
    Column("host", cell("host"), rank=2),
    Column("process", cell("pid"), right=True),
    Column("partitions", cell("partitions"), right=True),
)


@command(WATCH, JSON)
async def state(setup: Setup, watch: str | None, as_json: bool) -> int:
    """Show the owner, or last owner, and position of each partition; exit 1 if a markers partition has no owner."""
    client = setup.client
    async with open_queues(client, changelog=True) as queues:

        async def look() -> dict[str, Any]:
            groups = await _groups(client)
            with bar("reading the changelog") as progress:
                owned = await Inspector(client, queues.definitions).owned(progress, incomplete=True)
            async with LogReader(client, committed=False) as view:
                ranges = await existing_ranges(view, {source for group in groups.values() for source in group.sources})
            return described(client, queues.definitions, groups, owned, ranges, time.time() * 1000)

        document = await looked(look, _show, watch=interval(watch), as_json=as_json)
    return 0 if all(partition["owner"] for partition in document["markers"]) else 1


@dataclass(frozen=True)
class GroupState:
    """A consumer group: its members, and by partition the owner, the committed offset and the committer."""

    described: DescribedGroup
    owners: Mapping[Source, DescribedMember] = field(default_factory=dict)
    committed: Mapping[Source, int] = field(default_factory=dict)
    committers: Mapping[Source, str] = field(default_factory=dict)

    @property
    def sources(self) -> set[Source]:
        return {*self.owners, *self.committed}


def described(
    client: ClientSettings,
    definitions: Definitions,
    groups: Mapping[str, GroupState],
    owned: Mapping[int, Owned],
    ranges: Mapping[Source, range],
    now_ms: float,
) -> dict[str, Any]:
    names = client.names
    owners = groups[names.app_id].owners if names.app_id in groups else {}
    leased = {partition: _leases_since(content) for partition, content in owned.items()}
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
                "applied_offset": content.applied,
                "end": content.end,
                "lag": content.behind,
                "unfinished": len(content.tracker.book),
                "stopped_before": None if content.unknown is None else content.unknown.offset,
                "oldest_lease_seconds": _age_s(min(leased[partition].values(), default=None), now_ms),
                "last_owner": content.owner or None,
                "last_wrote": None if content.written_ms is None else moment(content.written_ms),
            }
            for partition, content in sorted(owned.items())
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
    """Return, by queue and partition, when the oldest lease of a message in flight began, by the log's clock."""
    since: dict[tuple[str, Source], int] = {}
    for source, leases in owned.tracker.book.leases_by_source():
        for _, lease in leases:
            if lease.state in HELD:
                key = lease.queue, source.log
                since[key] = min(lease.since_ms, since.get(key, lease.since_ms))
    return since


def _owner(member: DescribedMember | None) -> dict[str, Any]:
    return {"owner": None if member is None else str(member), "owner_id": None if member is None else member.id}


def _member(member: DescribedMember) -> dict[str, Any]:
    partitions = sum(map(len, member.partitions.values()))
    return {"member": str(member), **member.document(), "partitions": partitions}


def _partition(group: GroupState, source: Source, span: range | None, oldest_lease_s: float | None) -> dict[str, Any]:
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
        "lag": max(0, end - max(start, committed or 0)),
        "oldest_lease_seconds": oldest_lease_s,
    }


def _age_s(since_ms: int | None, now_ms: float) -> float | None:
    return None if since_ms is None else max(0.0, (now_ms - since_ms) / 1000)


def _show(document: dict[str, Any]) -> None:
    show(_MARKERS, document["markers"])
    for columns, key in ((_PARTITIONS, "partitions"), (_MEMBERS, "members")):
        rows = [{"group": group["group"], **row} for group in document["groups"] for row in group[key]]
        if rows:
            show(columns, rows)
    for partition in document["markers"]:
        if (offset := partition["stopped_before"]) is not None:
            number = partition["partition"]
            command = f"marq quarantine {number} {offset}"
            print(f"markers partition {number} stops before offset {offset}: {command}")
    if not all(partition["owner"] for partition in document["markers"]):
        print("markers partitions have no owner, so their leases do not expire; start a worker: marq worker")


async def _groups(client: ClientSettings) -> dict[str, GroupState]:
    """Return the groups of the namespace, including that of the trackers."""
    names = client.names
    async with open_groups(client) as admin:
        listed = await listed_groups(admin)
        ours = {name: listed[name] for name in sorted(listed) if names.is_group(name) or name == names.app_id}
        return {group.name: await _group(admin, group) for group in await described_members(admin, ours)}


async def _group(admin: AIOKafkaAdminClient, group: DescribedGroup) -> GroupState:
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
    committed = {Source(*tp): commit for tp, commit in offsets.items() if commit.offset >= 0}
    return GroupState(
        group,
        owners,
        {source: commit.offset for source, commit in committed.items()},
        {source: by for source, commit in committed.items() if (by := committed_by(commit.metadata or ""))},
    )
