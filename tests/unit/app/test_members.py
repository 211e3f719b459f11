"""What is known of the trackers when the broker says nothing, or not all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from aiokafka.errors import GroupAuthorizationFailedError, KafkaConnectionError, NotCoordinatorForGroupError
from yarl import URL

from marq.kafka.group_members import STABLE, DescribedGroup, DescribedMember
from marq.settings.client import ClientSettings
from marq_worker.web import peers
from marq_worker.web.peers import Members, TrackersGroup

URLS = [URL("http://one:1"), URL("http://two:1")]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (URLS, Members(URLS, settled=True, answered=True)),
        # During a rebalance the broker does not tell the members.
        (None, Members((), settled=False, answered=True)),
        (KafkaConnectionError("gone"), Members((), settled=False, answered=False)),
        (TimeoutError(), Members((), settled=False, answered=False)),
        # It is there, and says no.
        (GroupAuthorizationFailedError("marq-app"), Members((), settled=False, answered=True)),
    ],
)
async def test_the_trackers_are_found(
    monkeypatch: pytest.MonkeyPatch, answer: list[URL] | Exception | None, expected: Members
) -> None:
    group = TrackersGroup(ClientSettings())

    async def describe() -> list[URL] | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(group, "_describe", describe)

    assert await group.members() == expected


async def test_all_groups_are_described_with_one_request_and_their_coordinators_are_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[object] = []

    class Admin:
        async def find_coordinator(self, name: str) -> int:
            requests.append(name)
            return 1

    async def describe(admin: object, groups: Mapping[str, int]) -> list[DescribedGroup]:
        requests.append(groups)
        return [DescribedGroup(name, "Empty") for name in groups]

    monkeypatch.setattr(peers, "described_members", describe)
    group = TrackersGroup(ClientSettings())
    monkeypatch.setattr(group, "_admin", Admin())

    for _ in range(2):
        assert await group.unassigned(["a", "b"]) == ["a", "b"]

    both = {"a": 1, "b": 1}
    assert requests == ["a", "b", both, both]


async def test_coordinators_are_looked_up_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    error = NotCoordinatorForGroupError.errno

    class Admin:
        async def start(self) -> None: ...
        async def close(self) -> None: ...

        async def find_coordinator(self, name: str) -> int:
            looked_up.append(name)
            return 1

    async def describe(admin: object, groups: Mapping[str, int]) -> list[DescribedGroup]:
        return [DescribedGroup(name, "Empty", error=error) for name in groups]

    monkeypatch.setattr(peers, "described_members", describe)
    monkeypatch.setattr(peers, "AIOKafkaAdminClient", lambda **_: Admin())
    monkeypatch.setattr(peers, "paced", lambda admin: admin)
    group = TrackersGroup(ClientSettings())

    assert await group.unassigned(["a"]) == []
    error = 0
    assert await group.unassigned(["a"]) == ["a"]
    assert looked_up == ["a", "a"]


def test_a_group_whose_members_wait_for_the_end_of_a_rebalance_reads_something_soon() -> None:
    idle, reader = DescribedMember("1", "client", "host"), DescribedMember("2", "client", "host", partitions={"t": [0]})

    assert DescribedGroup("g", STABLE, [idle]).reads_nothing
    assert DescribedGroup("g", "Empty").reads_nothing
    assert not DescribedGroup("g", "CompletingRebalance", [idle]).reads_nothing
    assert not DescribedGroup("g", STABLE, [idle, reader]).reads_nothing
