"""When a former member is removed from the group: only if needed, and only when its successor is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marq.kafka import connection
from marq.settings.client import ClientSettings
from marq_worker import former_member
from marq_worker.former_member import expel

FORMER, OTHER = "marq-former", "marq-other"


class Broker:
    """Answers each look at the group with the next of these: its state, and the ids of its members."""

    def __init__(self, *looks: tuple[str, list[str]]) -> None:
        self._looks = list(looks)
        self.left: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def describe_consumer_groups(self, groups: list[str]) -> list[Any]:
        state, members = self._looks.pop(0)
        entries = [(member, "marq", "/127.0.0.1", b"", b"") for member in members]
        return [SimpleNamespace(groups=[(0, groups[0], state, "consumer", "", entries)])]

    async def find_coordinator(self, group: str) -> int:
        return 1

    async def _send_request(self, request: Any, node: int) -> Any:
        self.left.append(request._member_id)
        return SimpleNamespace(error_code=0)

    @property
    def asked_for_all(self) -> bool:
        return not self._looks


async def expelled(broker: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(connection, "AIOKafkaAdminClient", lambda **_: broker)
    monkeypatch.setattr(connection, "paced", lambda admin: admin)
    await expel(ClientSettings.read(environment={}), folder, limit_s=30)
    assert broker.asked_for_all
    return broker.left


async def test_a_dead_member_leaves_when_another_one_joins_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former_member.remember(tmp_path, FORMER)
    broker = Broker(
        ("Stable", [OTHER, FORMER]), ("Stable", [OTHER, FORMER]), ("PreparingRebalance", [OTHER, FORMER, "new"])
    )

    assert await expelled(broker, tmp_path, monkeypatch) == [FORMER]


async def test_a_member_that_is_gone_already_needs_no_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former_member.remember(tmp_path, FORMER)

    assert await expelled(Broker(("PreparingRebalance", [OTHER])), tmp_path, monkeypatch) == []


async def test_a_new_folder_has_no_former_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await expelled(Broker(), tmp_path, monkeypatch) == []


def test_an_unwritable_folder_is_not_a_reason_to_stop(tmp_path: Path) -> None:
    former_member.remember(tmp_path / "absent", FORMER)
