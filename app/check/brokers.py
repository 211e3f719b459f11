"""The brokers: their number, and the protocol versions they support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from marq_worker.app.check.findings import Finding, fine, problem


class Api(NamedTuple):
    """A request that Marq sends: the lowest version with the fields that Marq uses, and the highest one it supports."""

    name: str
    least: int
    largest: int
    #: The first Kafka with the lowest version.
    since: str


#: Requests by their API key in Kafka's protocol.
APIS: Mapping[int, Api] = {
    0: Api("Produce", 3, 7, "0.11"),
    1: Api("Fetch", 4, 11, "0.11"),
    2: Api("ListOffsets", 1, 3, "0.10.1"),
    3: Api("Metadata", 4, 5, "1.0"),
    8: Api("OffsetCommit", 2, 3, "0.9"),
    9: Api("OffsetFetch", 1, 3, "0.8.2"),
    10: Api("FindCoordinator", 1, 1, "0.11"),
    11: Api("JoinGroup", 0, 5, "0.9"),
    12: Api("Heartbeat", 0, 1, "0.9"),
    14: Api("SyncGroup", 0, 3, "0.9"),
    15: Api("DescribeGroups", 0, 3, "0.9"),
    19: Api("CreateTopics", 0, 3, "0.10.1"),
    22: Api("InitProducerId", 0, 0, "0.11"),
    24: Api("AddPartitionsToTxn", 0, 0, "0.11"),
    26: Api("EndTxn", 0, 0, "0.11"),
    32: Api("DescribeConfigs", 0, 2, "0.11"),
}
_JOIN_GROUP, _STATIC = 11, Api("JoinGroup, for MARQ_INSTANCE_ID", 5, 5, "2.3")


def judge_apis(spoken: Mapping[int, tuple[int, int]], *, static_member: bool) -> list[Finding]:
    """Judge the versions of requests that a broker supports, by their numbers."""
    wanted = {**APIS, **({_JOIN_GROUP: _STATIC} if static_member else {})}
    old = [api for key, api in wanted.items() if spoken.get(key, (0, -1))[1] < api.least]
    new = [api for key, api in wanted.items() if spoken.get(key, (0, 0))[0] > api.largest]
    findings = []
    if old:
        newest = max((api.since for api in old), key=_numbers)
        findings.append(
            problem(
                "broker version",
                f"too old: it does not support {', '.join(api.name for api in old)} as marq needs them",
                expected=f"Kafka {newest} or newer",
                advice="upgrade the brokers",
            )
        )
    if new:
        findings.append(
            problem(
                "broker version",
                f"too new: it no longer supports {', '.join(f'{api.name} version {api.largest}' for api in new)}",
                advice="upgrade marq on this machine",
            )
        )
    return findings or [fine("broker version", "supports all requests that marq sends")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
