"""Whose statistics a page adds up, and when they are said to be complete."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from yarl import URL

from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.web import peers
from marq_worker.web.partition_statistics import Statistics
from marq_worker.web.peers import Members
from marq_worker.web.statistics import NamespaceStatistics

OWN, OTHER = URL("http://here:1"), URL("http://there:1")
APP: Any = SimpleNamespace(conf=SimpleNamespace(canonical_url=OWN), http_client=None)


class Trackers:
    """Stands in for the group and for the workers in it; those in ``silent`` don't answer."""

    def __init__(self, *urls: URL, settled: bool = True, silent: Sequence[URL] = ()) -> None:
        self.asked: list[URL] = []
        self._members = Members(urls, settled)
        self._silent = silent

    async def members(self) -> Members:
        return self._members

    async def ask(self, client: Any, url: URL, limit_s: float) -> dict[str, Any] | None:
        assert (url.path, dict(url.query)) == ("/api/queues", {"scope": "worker"})
        url = url.with_query(None).with_path("")
        self.asked.append(url)
        return None if url in self._silent else {"queues": {"emails": {"acked": 7}}, "partitions": []}


@pytest.fixture
def statistics_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def statistics_of(trackers: Trackers) -> dict[str, Any]:
        monkeypatch.setattr(peers, "_ask", trackers.ask)
        group: Any = trackers
        return await NamespaceStatistics(APP, Statistics(TrackerOwners("markers")), group, list).all()

    return statistics_of


async def test_a_worker_without_the_role_tracker_asks_all_trackers(statistics_of: Any) -> None:
    found = await statistics_of(Trackers(OTHER))

    assert found["complete"]
    assert found["queues"]["emails"]["acked"] == 7
    assert [worker["url"] for worker in found["workers"]] == [str(OWN), str(OTHER)]


async def test_a_tracker_does_not_ask_itself(statistics_of: Any) -> None:
    trackers = Trackers(OWN, OTHER)

    found = await statistics_of(trackers)

    assert trackers.asked == [OTHER]
    assert found["complete"]


@pytest.mark.parametrize("shared", [OWN, OTHER], ids=["ours", "of others"])
async def test_trackers_that_gave_the_same_address_are_not_counted_twice_and_one_is_missing(
    statistics_of: Any, shared: URL
) -> None:
    trackers = Trackers(OWN, OTHER, shared)

    found = await statistics_of(trackers)

    assert trackers.asked == [OTHER]
    assert found["queues"]["emails"]["acked"] == 7
    assert not found["complete"]
    assert [worker["url"] for worker in found["workers"] if not worker["answered"]] == [str(shared)]


async def test_statistics_are_not_complete_while_it_is_not_known_who_the_trackers_are(statistics_of: Any) -> None:
    found = await statistics_of(Trackers(OTHER, settled=False))

    assert not found["complete"]
    assert found["queues"]["emails"]["acked"] == 7


async def test_statistics_are_not_complete_without_an_answer(statistics_of: Any) -> None:
    found = await statistics_of(Trackers(OTHER, silent=[OTHER]))

    assert not found["complete"]
    assert found["queues"] == {}
