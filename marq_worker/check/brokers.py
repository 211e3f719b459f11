"""The brokers: the protocol versions that they support, and their clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from marq_worker.findings import CheckFinding, fine, problem, warning

#: Smaller differences between clocks do no harm.
ALLOWED_S = 5.0


class Api(NamedTuple):
    """A request that Marq sends: the lowest version with the fields that Marq uses, and the highest one it supports."""

    name: str
    least: int
    largest: int
    #: The first Kafka with the lowest version.
    since: str


#: Requests that all workers and clients need, by their API key in Kafka's protocol.
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
    13: Api("LeaveGroup", 0, 1, "0.9"),
    14: Api("SyncGroup", 0, 3, "0.9"),
    15: Api("DescribeGroups", 0, 3, "0.9"),
    16: Api("ListGroups", 0, 1, "0.9"),
    19: Api("CreateTopics", 0, 3, "0.10.1"),
    22: Api("InitProducerId", 0, 0, "0.11"),
    24: Api("AddPartitionsToTxn", 0, 0, "0.11"),
    26: Api("EndTxn", 0, 0, "0.11"),
    32: Api("DescribeConfigs", 0, 2, "0.11"),
}
_JOIN_GROUP, _STATIC = 11, Api("JoinGroup, for MARQ_INSTANCE_ID", 5, 5, "2.3")


def judge_apis(spoken: Mapping[int, tuple[int, int]], *, static_member: bool) -> list[CheckFinding]:
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


@dataclass(frozen=True, slots=True)
class ClockSample:
    """When a record was sent, appended (by the broker's clock) and confirmed, in ms since the epoch."""

    sent_ms: float
    appended_ms: float
    confirmed_ms: float

    @property
    def ahead_s(self) -> float:
        """Least number of seconds by which this machine's clock is ahead of the broker's; below 0: behind."""
        if self.appended_ms < self.sent_ms:
            return (self.sent_ms - self.appended_ms) / 1000
        return min(0.0, self.confirmed_ms - self.appended_ms) / 1000


def judge_clock(appended: ClockSample) -> CheckFinding:
    ahead_s = appended.ahead_s
    if abs(ahead_s) <= ALLOWED_S:
        return fine("clock", f"at most {ALLOWED_S:g} s off the broker's clock")
    return warning(
        "clock",
        f"this machine's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the broker's",
        expected=f"at most {ALLOWED_S:g} s",
        advice=(
            "synchronize the clocks with NTP (chrony, systemd-timesyncd). Until then, clients on this machine write"
            " wrong send times (sent_at), and delays until a given time (at=) end early or late. Leases, redelivery and"
            " delays in seconds use only the broker's clock"
        ),
    )
