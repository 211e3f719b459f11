"""``marq quarantine [PARTITION OFFSET]``: quarantines a marker record of a newer version, or lists them."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from marq.kafka.inspector import Inspector
from marq.kafka.owned_partitions import Owned
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, quarantine_key
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import Source
from marq.wire.quarantines import MAX_TEXT, Quarantine, digest
from marq.wire.record_headers import record_id
from marq_worker.commands.command import JSON, YES, Setup, command, open_queues
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.terminal import Column, bar, cell, show
from marq_worker.web.peers import ask_workers

#: Seconds to wait for the owner to apply a request, and between two checks.
_APPLY_LIMIT_S, _PAUSE_S = 20.0, 0.2
#: Bytes of a record to show.
_SHOWN_BYTES = 64

_ORDERS = (
    Column("part", cell("partition"), right=True),
    Column("offset", cell("offset"), right=True),
    Column("state", lambda order: "applied" if order["applied"] else "requested"),
    Column("at", lambda order: order["at"].replace("T", " ")[:19], least=19, rank=2),
    Column("by", cell("by"), least=12, rank=1),
    Column("why", cell("why"), least=12, rank=3),
)


@command(
    click.argument("partition", required=False, type=click.IntRange(0)),
    click.argument("offset", required=False, type=click.IntRange(0)),
    click.option("--why", default="", metavar="TEXT", help="Reason, stored with the request."),
    JSON,
    YES,
)
async def quarantine(
    setup: Setup, partition: int | None, offset: int | None, why: str, as_json: bool, yes: bool
) -> int:  # fmt: skip
    """Quarantine the marker record that stops a partition; without arguments, list stopped partitions."""
    client = setup.client
    if partition is not None and offset is None:
        raise ConfigError("quarantine: give PARTITION and OFFSET, or neither to see which partitions are stopped")
    if len(why) > MAX_TEXT:
        raise ConfigError(f"--why: expected at most {MAX_TEXT} characters, got {len(why)}")
    async with open_queues(client, changelog=True) as queues:
        with bar("reading the changelog") as progress:
            owned = await Inspector(client, queues.definitions).owned(progress, incomplete=True)
        if partition is None or offset is None:
            listed = described(owned, queues.definitions)
            print(json.dumps(listed)) if as_json else _show(listed)
            return 0
        order = known(partition, offset, owned, queues.definitions)
        if order is None:
            await refuse_unless_stopped(client, partition, offset, owned)
            order = _new(client, partition, offset, why, owned[partition])
            confirm(_question(client, partition, owned[partition]), client, yes=yes)
            # Durable from here on: the owner applies the request even if this command is killed.
            await queues.publish({quarantine_key(order): order.document()})
    applied = owned[partition].applied >= offset or await _applied(client, partition, offset)
    print(json.dumps(_document(order, applied)) if as_json else _said(client, order, applied=applied))
    return 0 if applied else 1


def known(partition: int, offset: int, owned: Mapping[int, Owned], definitions: Definitions) -> Quarantine | None:
    """Return the valid request that already exists for a record, if any."""
    partition_owned = owned.get(partition)
    if partition_owned is None:
        raise ConfigError(f"quarantine: there is no markers partition {partition}; expected one of {sorted(owned)}")
    if partition_owned.unknown is not None and partition_owned.unknown.offset == offset:
        # The owner still stops there, so any request is for another record: the topic was recreated.
        return None
    orders = {(order.partition, order.offset): order for order in definitions.quarantines()}
    return orders.get((partition, offset))


async def refuse_unless_stopped(
    client: ClientSettings, partition: int, offset: int, owned: Mapping[int, Owned]
) -> None:
    """Refuse a record that does not stop its partition, because its marker would be lost."""
    place = record_id(Source(client.names.markers, partition), offset)
    unknown = owned[partition].unknown
    if unknown is None or unknown.offset != offset:
        where = "no record stops it" if unknown is None else f"it stops before offset {unknown.offset}"
        raise MarqError(f"record {place} does not stop markers partition {partition}: {where}; nothing was changed")
    url, part = await _owner(client, partition)
    if part.get("state") == "owner":
        raise MarqError(
            f"record {place} does not stop the worker that owns the partition ({url}): it has not reached the"
            " record yet, or its version can read the record; nothing was changed"
        )


async def _owner(client: ClientSettings, partition: int) -> tuple[str, Mapping[str, Any]]:
    """Return the address and the metrics of a partition's owner; empty if no worker says that it is the owner."""
    members, answers = await ask_workers(client, "api/queues")
    for url, answer in zip(members.urls, answers, strict=True):
        for part in () if answer is None else answer["partitions"]:
            if part["partition"] == partition:
                return str(url), part
    return "", {}


async def _applied(client: ClientSettings, partition: int, offset: int) -> bool:
    """Wait until the owner has skipped a record; return whether it has."""
    until_s = time.monotonic() + _APPLY_LIMIT_S
    while time.monotonic() < until_s:
        _, part = await _owner(client, partition)
        if not part:
            return False
        if part["applied_offset"] >= offset:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False


def _new(client: ClientSettings, partition: int, offset: int, why: str, owned: Owned) -> Quarantine:
    assert owned.unknown is not None
    return Quarantine(
        partition, offset, digest(owned.unknown.value), _operator(client), _moment(time.time() * 1000), why
    )


def _operator(client: ClientSettings) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        user = f"uid {os.getuid()}"
    principal = f", {client.sasl_username}" if client.sasl_username else ""
    return f"{user}@{socket.gethostname()}{principal}"


def _question(client: ClientSettings, partition: int, owned: Owned) -> str:
    assert owned.unknown is not None
    unknown = owned.unknown
    return (
        f"Record {record_id(Source(client.names.markers, partition), unknown.offset)}:"
        f" {unknown.error}; {len(unknown.value):,} bytes, written {_moment(unknown.timestamp_ms)},"
        f" {unknown.value[:_SHOWN_BYTES].hex()}\n"
        "If a newer Marq wrote it, upgrade the workers instead. If you quarantine it, its messages may be lost or"
        " delivered twice.\nQuarantine it?"
    )


def _moment(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _document(order: Quarantine, applied: bool) -> dict[str, Any]:
    return {"partition": order.partition, "offset": order.offset, "applied": applied, **order.document()}


def _said(client: ClientSettings, order: Quarantine, *, applied: bool) -> str:
    place = record_id(Source(client.names.markers, order.partition), order.offset)
    if applied:
        return (
            f"record {place} is quarantined; topic {client.names.quarantine} has its bytes, and the partition continues"
        )
    return f"record {place}: the request is saved; the partition's owner applies it as soon as a worker runs"


def described(owned: Mapping[int, Owned], definitions: Definitions) -> dict[str, Any]:
    """Return the stopped partitions and all requests, for programs."""
    return {
        "stopped": [
            {
                "partition": partition,
                "offset": partition_owned.unknown.offset,
                "error": partition_owned.unknown.error,
                "written": _moment(partition_owned.unknown.timestamp_ms),
                "bytes": len(partition_owned.unknown.value),
                "begins": partition_owned.unknown.value[:_SHOWN_BYTES].hex(),
            }
            for partition, partition_owned in sorted(owned.items())
            if partition_owned.unknown is not None
        ],
        "quarantined": [
            _document(order, order.partition in owned and owned[order.partition].applied >= order.offset)
            for order in definitions.quarantines()
        ],
    }


def _show(listed: Mapping[str, Any]) -> None:
    for marker in listed["stopped"]:
        location = f"{marker['partition']} {marker['offset']}"
        print(
            f"markers partition {marker['partition']} is stopped before offset {marker['offset']}: {marker['error']}"
            f" ({marker['bytes']:,} bytes, {marker['begins']}). If a newer Marq wrote it, upgrade the workers; if not:"
            f" marq quarantine {location}"
        )
    orders = listed["quarantined"]
    if orders:
        show(_ORDERS, orders)
    if not listed["stopped"] and not orders:
        print("no partition is stopped, and no operator has quarantined a record")
