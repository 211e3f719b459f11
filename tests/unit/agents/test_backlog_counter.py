"""A backlog counter after an unexpected error: logs it, counts again, and ends when it is stopped."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq_worker.backlog import backlog_counter as module
from marq_worker.backlog.backlog_counter import BacklogCounter
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.web.partition_statistics import Statistics


class Consumer:
    """Stands for one that is started and stopped."""

    async def stop(self) -> None:
        pass


@pytest.fixture
def backlog(monkeypatch: pytest.MonkeyPatch) -> BacklogCounter:
    async def started(*_: Any) -> Consumer:
        return Consumer()

    monkeypatch.setattr(module, "started", started)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    definitions = Definitions()
    return BacklogCounter(
        ClientSettings.read("nowhere:1", {}, environment={}), TrackerOwners("markers"), lambda: definitions
    )


async def test_a_defect_is_told_once_and_the_backlog_begins_again(backlog, monkeypatch, caplog) -> None:
    begun, third = [], asyncio.Event()

    async def count(_self: BacklogCounter, _consumer: Consumer) -> None:
        backlog.counts, backlog._trouble = True, ""
        begun.append(backlog)
        if len(begun) == 3:
            third.set()
            await asyncio.Event().wait()
        raise LookupError("nobody thought of it")

    monkeypatch.setattr(BacklogCounter, "_count", count)
    await backlog.start()
    async with asyncio.timeout(60):
        await third.wait()
    warned = [record for record in caplog.records if record.name == "marq.backlog"]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert warned[0].exc_info[0] is LookupError
    await backlog.stop()


async def test_what_is_not_counted_is_not_known_to_be_nothing(backlog, monkeypatch) -> None:
    stopped = asyncio.Event()

    async def count(_self: BacklogCounter, _consumer: Consumer) -> None:
        backlog.counts, backlog._trouble = True, ""
        raise LookupError("nobody thought of it")

    async def stop(self: Consumer) -> None:
        # The metrics while the consumer is being stopped, which takes its time.
        assert not backlog.complete
        stopped.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(BacklogCounter, "_count", count)
    monkeypatch.setattr(Consumer, "stop", stop)
    await backlog.start()
    async with asyncio.timeout(60):
        await stopped.wait()
    assert "waiting" not in Statistics(backlog.owners, backlog).local()["queues"].get("emails", {})
    async with asyncio.timeout(60):
        await backlog.stop()


async def test_mistaken_keys_get_no_statistics_each(backlog, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_UNKNOWN", 2)
    backlog.definitions().fold(b"file:defined", {})

    found = backlog._backlogs_of(Counter({"one": 1, "two": 2, "three": 3, "four": 4, "defined": 1}), {})

    assert {queue: count.waiting for queue, count in found.items()} == {"three": 3, "four": 4, "defined": 1}
    assert backlog.metrics()["unknown_queues"] == 3


def test_while_there_are_markers_to_fold_what_stood_there_before_is_counted_slowly(backlog) -> None:
    engine = SimpleNamespace(folded=7)
    backlog.owners.owned[0] = SimpleNamespace(engine=engine)
    counted = SimpleNamespace(position=0, began_at=50_000, uncounted=60_000)
    backlog._sources.by_source = {Source("messages", 0): counted}

    busy = backlog._rest_s(10_000, took_s=0.01)
    idle = backlog._rest_s(10_000, took_s=0.01)
    engine.folded, counted.position = 8, 50_000
    later = backlog._rest_s(10_000, took_s=0.01)
    counted.uncounted = 10

    assert (busy, idle, later) == (10_000 / module.BUSY_PER_SECOND, 0.01, 0.01)
    assert backlog._rest_s(10, took_s=0.01) == 0.0
