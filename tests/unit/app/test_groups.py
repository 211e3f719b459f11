"""The groups of queues as brokers describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka.errors import NodeNotReadyError

from marq.kafka.group_members import DescribedGroup
from marq.settings.client import ClientSettings
from marq_worker.web.dashboard import groups as groups_module
from marq_worker.web.dashboard.groups import Groups

NAMES = ["a", "b", "c", "d", "e"]


class SlowBrokers:
    """Brokers that find this many coordinators before the time of a call is over."""

    def __init__(self, groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self.described: list[list[str]] = []
        self.error: Exception | None = None
        self._left = 0

        async def admin() -> SlowBrokers:
            self._left = 2
            return self

        monkeypatch.setattr(groups, "_admin_client", admin)
        monkeypatch.setattr(groups_module, "described_members", self._describe)

    async def find_coordinator(self, group: str) -> int:
        if not self._left:
            raise TimeoutError
        self._left -= 1
        self.found.append(group)
        return 1

    async def _describe(self, admin: Any, coordinators: Mapping[str, int]) -> list[DescribedGroup]:
        self.described.append(list(coordinators))
        if self.error is not None:
            raise self.error
        return []


@pytest.fixture
def groups() -> Groups:
    return Groups(ClientSettings.read("memory://", {}, owner="test"))


async def test_coordinators_of_many_groups_are_found_by_several_calls(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, each call would begin with the first group, and endpoints would never find each other."""
    brokers = SlowBrokers(groups, monkeypatch)

    for _ in range(3):
        await groups.members(NAMES)

    assert brokers.found == NAMES
    assert brokers.described == [NAMES[:2], NAMES[:4], NAMES]


@pytest.mark.parametrize("error", [TimeoutError(), NodeNotReadyError()])
async def test_coordinators_that_do_not_answer_are_looked_up_again(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    brokers = SlowBrokers(groups, monkeypatch)
    brokers.error = error

    for _ in range(2):
        await groups.members(["a"])

    assert brokers.found == ["a", "a"]
