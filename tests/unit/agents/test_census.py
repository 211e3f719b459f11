"""A census that meets what nobody foresaw: it says so, counts again, and ends when it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from agents import census as module
from agents.census import Census
from agents.statistics import Statistics
from agents.tracker import TrackerOwners
from marq.core.definitions import Definitions
from marq.core.markers import Source
from marq.settings import ClientSettings


class Consumer:
    """Stands for one that is started and stopped."""

    async def stop(self) -> None:
        pass


@pytest.fixture
def census(monkeypatch: pytest.MonkeyPatch) -> Census:
    async def started(*_: Any) -> Consumer:
        return Consumer()

    monkeypatch.setattr(module, "started", started)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    definitions = Definitions()
    return Census(ClientSettings.read("nowhere:1", {}, environment={}), TrackerOwners("markers"), lambda: definitions)


async def test_a_defect_is_told_once_and_the_census_begins_again(census, monkeypatch, caplog) -> None:
    begun, third = [], asyncio.Event()

    async def count(_self: Census, _consumer: Consumer) -> None:
        census.counts, census._trouble = True, ""
        begun.append(census)
        if len(begun) == 3:
            third.set()
            await asyncio.Event().wait()
        raise LookupError("nobody thought of it")

    monkeypatch.setattr(Census, "_count", count)
    census.start()
    async with asyncio.timeout(60):
        await third.wait()
    warned = [record for record in caplog.records if record.name == "marq.census"]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert warned[0].exc_info[0] is LookupError
    await census.stop()


async def test_what_is_not_counted_is_not_known_to_be_nothing(census, monkeypatch) -> None:
    stopped = asyncio.Event()

    async def count(_self: Census, _consumer: Consumer) -> None:
        census.counts, census._trouble = True, ""
        raise LookupError("nobody thought of it")

    async def stop(self: Consumer) -> None:
        # The figures while the consumer is being stopped, which takes its time.
        assert not census.complete
        stopped.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Census, "_count", count)
    monkeypatch.setattr(Consumer, "stop", stop)
    census.start()
    async with asyncio.timeout(60):
        await stopped.wait()
    assert "waiting" not in Statistics(census.owners, census).local()["queues"].get("emails", {})
    async with asyncio.timeout(60):
        await census.stop()


async def test_a_census_whose_task_has_failed_keeps_nobody_from_stopping(census) -> None:
    async def fail() -> None:
        raise LookupError("nobody thought of it")

    census._tasks = [asyncio.create_task(fail())]
    await asyncio.wait(census._tasks)

    await census.stop()


async def test_mistaken_keys_get_no_figures_each(census, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_UNKNOWN", 2)
    census.definitions().fold(b"file:defined", {})

    found = census._figures_of(Counter({"one": 1, "two": 2, "three": 3, "four": 4, "defined": 1}), {})

    assert {queue: each.waiting for queue, each in found.items()} == {"three": 3, "four": 4, "defined": 1}
    assert census.figures()["others"] == 3


def test_while_there_are_markers_to_fold_what_stood_there_before_is_counted_slowly(census) -> None:
    census.owners.owned[0] = owner = SimpleNamespace(folded=7)
    counted = SimpleNamespace(position=0, began_at=50_000, uncounted=60_000)
    census._sources = {Source("messages", 0): counted}

    busy = census._rest_s(10_000, took_s=0.01)
    idle = census._rest_s(10_000, took_s=0.01)
    owner.folded, counted.position = 8, 50_000
    later = census._rest_s(10_000, took_s=0.01)
    counted.uncounted = 10

    assert (busy, idle, later) == (10_000 / module.BUSY_PER_SECOND, 0.01, 0.01)
    assert census._rest_s(10, took_s=0.01) == 0.0
