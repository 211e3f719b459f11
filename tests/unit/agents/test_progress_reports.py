"""How far owners and readers say they are: what a watchdog may expect of them, and what not."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, MessageSizeTooLargeError

from marq.core.storage.handling_times import HandlingTimes
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import ScheduleLayers
from marq.wire.names import Names
from marq_worker.owner.ownership import Ownership
from marq_worker.tables.leases import LocalTableError


@pytest.fixture
def owner() -> Ownership:
    table = SimpleNamespace(replayed=Counter())
    context: Any = SimpleNamespace(
        names=Names("t"),
        table=table,
        handling=HandlingTimes(),
        waiting=HandlingTimes(),
        settings=lambda _: QueueSettings(),
        flush_seconds=1.0,
        owned=lambda: 1,
        markers_partitions=1,
        schedules=ScheduleLayers,
        max_message_bytes=1_000_000,
    )
    return Ownership(0, context)


@pytest.mark.parametrize("state", ["recovering", "waiting"])
def test_a_partition_without_owner_owes_a_takeover(owner: Ownership, state: str) -> None:
    owner.state = state

    standing = owner.standing()

    assert standing is not None
    assert standing.owes == f"it is {state}, and no owner"
    assert standing.position is None


def test_nothing_is_expected_of_a_partition_that_people_have_to_decide_on(owner: Ownership) -> None:
    owner.state, owner.alarm = "stopped", "retention has removed everything"

    assert owner.standing() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MessageSizeTooLargeError(), False),
        (LocalTableError("the disk is full"), False),
        (KafkaConnectionError(), True),
        (TimeoutError(), True),
    ],
)
async def test_nothing_is_expected_of_an_owner_that_the_broker_or_the_disk_refuses(
    owner: Ownership, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: bool
) -> None:
    class Over(BaseException):
        """Ends the owner's life after one attempt."""

    async def fails() -> None:
        raise error

    async def over(_: float) -> None:
        raise Over

    monkeypatch.setattr(owner, "_take_over", fails)
    monkeypatch.setattr("marq_worker.owner.ownership.asyncio.sleep", over)
    with pytest.raises(Over):
        await owner._live()

    assert (owner.standing() is not None) is expected


def test_records_of_the_changelog_and_rows_of_the_table_are_progress(owner: Ownership) -> None:
    before = owner.standing()
    owner.context.table.replayed[0] += 1000
    replayed = owner.standing()
    owner.restored += 1000
    restored = owner.standing()

    assert before is not None
    assert replayed is not None
    assert restored is not None
    assert len({before.progress, replayed.progress, restored.progress}) == 3


def test_an_owner_that_takes_its_partition_over_again_and_again_gets_no_further_by_that(owner: Ownership) -> None:
    owner.state = "owner"
    first = owner.standing()
    owner.transactions += 1
    owner.state = "waiting"
    second = owner.standing()

    assert first is not None
    assert second is not None
    assert first.progress == second.progress


def test_a_new_owner_owes_its_tick_until_it_is_read_back(owner: Ownership) -> None:
    owner.state = "owner"
    due = owner.standing()
    owner.tracker.tick(1)
    written = owner.standing()

    assert due is not None
    assert due.owes == "a TICK is due and not written"
    assert written is not None
    assert written.owes == "its own TICK has not arrived"
