"""What is known of the trackers when the broker says nothing, or not all."""

from __future__ import annotations

import pytest
from aiokafka.errors import GroupAuthorizationFailedError, KafkaConnectionError
from yarl import URL

from app.web.peers import Group, Members
from marq.kafka.group_members import STABLE, DescribedGroup, GroupMember
from marq.settings.client import ClientSettings

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
    group = Group(ClientSettings())

    async def describe() -> list[URL] | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(group, "_describe", describe)

    assert await group.members() == expected


def test_a_group_whose_members_wait_for_the_end_of_a_rebalance_reads_something_soon() -> None:
    idle, reader = GroupMember("1", "client", "host"), GroupMember("2", "client", "host", partitions={"t": [0]})

    assert DescribedGroup("g", STABLE, [idle]).reads_nothing
    assert DescribedGroup("g", "Empty").reads_nothing
    assert not DescribedGroup("g", "CompletingRebalance", [idle]).reads_nothing
    assert not DescribedGroup("g", STABLE, [idle, reader]).reads_nothing
