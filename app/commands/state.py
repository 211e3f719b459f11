"""``faust -A app state``: who owns what, and how far each is; of what nobody owns, who had it last.

It joins no group. What the broker knows of groups, the changelog and the markers say all of it, so it works with no
worker alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import faust
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import KafkaError, for_code

from app.commands.command import command
from app.commands.tables import Column, show
from app.commands.watching import WATCH, bar, looked
from marq.connection import client_options, close_admin, started
from marq.core.errors import BrokerUnavailable
from marq.inspector import Inspector, Owned
from marq.log_view import LogView
from marq.queues import Queues
from marq.settings import ClientSettings
from marq.topics import ensure_topics

NOBODY = "nobody"

_MARKERS = (
    Column("markers", right=True),
    Column("owner", least=16),
    Column("behind", right=True, rank=1),
    Column("open", right=True, rank=1),
    Column("last owner", least=16, rank=3),
    Column("last wrote", rank=2),
)
_GROUPS = (
    Column("group", least=16),
    Column("topic", least=14, rank=1),
    Column("part", right=True),
    Column("owner", least=16),
    Column("committed", right=True, rank=2),
    Column("behind", right=True),
)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(app, WATCH, click.option("--json", "as_json", is_flag=True, help="Show it as JSON."))
    async def state(self: Any, watch: float | None, as_json: bool) -> int:
        """Show who owns which partitions, or had them last, and how far each is; exits 1 when one has no owner."""
        client = self.app.client
        await ensure_topics(client, changelog=True)
        async with Queues.of(client) as queues:

            async def look() -> dict[str, Any]:
                groups = await _groups(client)
                with bar("reading the changelog") as progress:
                    owned = await Inspector(client, queues.definitions).owned(progress, incomplete=True)
                async with LogView(client, committed=False) as view:
                    ends = await _ends(view, groups.values())
                return described(client, groups, owned, ends)

            found = await looked(look, _show, watch=watch, as_json=as_json)
        return 0 if all(each["owner"] for each in found["markers"]) else 1


Group = Mapping[str, Any]


def described(
    client: ClientSettings, groups: Mapping[str, Group], owned: Mapping[int, Owned], ends: Mapping[tuple[str, int], int]
) -> dict[str, Any]:
    """Return who owns what for programs."""
    app_id = client.names.app_id
    owners = groups[app_id]["owners"] if app_id in groups else {}
    return {
        "markers": [
            {
                "partition": partition,
                "owner": owners.get((client.names.markers, partition)),
                "applied_offset": each.applied,
                "end": each.end,
                "behind": each.behind,
                "open": len(each.tracker.book),
                "stopped_before": None if each.unknown is None else each.unknown.offset,
                "last_owner": each.owner or None,
                "last_wrote": None if each.written_ms is None else _moment(each.written_ms),
            }
            for partition, each in sorted(owned.items())
        ],
        "groups": [
            {
                "group": name,
                "state": group["state"],
                "members": group["members"],
                "partitions": _partitions(group, ends),
            }
            for name, group in sorted(groups.items())
            if name != app_id
        ],
    }


def _partitions(group: Group, ends: Mapping[tuple[str, int], int]) -> list[dict[str, Any]]:
    found = []
    for place in sorted({*group["owners"], *group["committed"]}):
        committed, end = group["committed"].get(place), ends.get(place, 0)
        found.append(
            {
                "topic": place[0],
                "partition": place[1],
                "owner": group["owners"].get(place),
                "committed": committed,
                "end": end,
                "behind": max(0, end - (committed or 0)),
            }
        )
    return found


def _show(found: dict[str, Any]) -> None:
    show(
        _MARKERS,
        [
            (
                str(each["partition"]),
                each["owner"] or NOBODY,
                f"{each['behind']:,}",
                f"{each['open']:,}",
                each["last_owner"] or "unknown",
                (each["last_wrote"] or "never").replace("T", " ").partition(".")[0],
            )
            for each in found["markers"]
        ],
    )
    rows = [
        (
            group["group"],
            each["topic"],
            str(each["partition"]),
            each["owner"] or NOBODY,
            "" if each["committed"] is None else f"{each['committed']:,}",
            f"{each['behind']:,}",
        )
        for group in found["groups"]
        for each in group["partitions"]
    ]
    if rows:
        show(_GROUPS, rows)
    for each in found["markers"]:
        if (offset := each["stopped_before"]) is not None:
            place = f"{each['partition']} {offset}"
            print(
                f"markers partition {each['partition']} stops before offset {offset}: faust -A app quarantine {place}"
            )
    if not all(each["owner"] for each in found["markers"]):
        print("partitions of the markers have no owner: no lease ends there; start a worker: faust -A app worker")


async def _groups(client: ClientSettings) -> dict[str, Group]:
    """Return the installation's groups, that of the trackers among them."""
    names = client.names
    admin = await started(lambda: AIOKafkaAdminClient(**client_options(client)), client, close_admin)
    try:
        listed = {name for name, *_ in await admin.list_consumer_groups()}
        ours = sorted(name for name in listed if names.is_group(name) or name == names.app_id)
        return {name: await _group(admin, name) for name in ours}
    except KafkaError as error:
        raise BrokerUnavailable(f"{client.bootstrap_servers}: the groups could not be described: {error}") from error
    finally:
        await close_admin(admin)


async def _group(admin: AIOKafkaAdminClient, name: str) -> Group:
    [response] = await admin.describe_consumer_groups([name])
    # (error, group, state, protocol type, protocol, members, …)
    [(code, _, state, _, _, members, *_)] = response.groups
    if code:
        # Else it would look as if nobody owned anything.
        raise for_code(code)
    owners: dict[tuple[str, int], str] = {}
    listed = []
    # (member id, client id, host, metadata, assignment)
    for _, client_id, host, _, assignment, *_ in members:
        owner = f"{client_id} on {host.lstrip('/')}"
        assigned = ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []
        owners.update({(each.topic, each.partition): owner for each in assigned})
        listed.append({"member": owner, "partitions": len(assigned)})
    offsets = await admin.list_consumer_group_offsets(name)
    committed = {(each.topic, each.partition): found.offset for each, found in offsets.items() if found.offset >= 0}
    return {"state": state, "members": listed, "owners": owners, "committed": committed}


async def _ends(view: LogView, groups: Sequence[Group] | Any) -> dict[tuple[str, int], int]:
    topics = sorted({topic for group in groups for topic, _ in {*group["owners"], *group["committed"]}})
    return {
        (source.topic, source.partition): span.stop
        for topic in topics
        for source, span in (await view.ranges(topic)).items()
    }


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
