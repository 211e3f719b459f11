"""The lines of a worker's start: who it is, what it runs, and when it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import pytest

from marq_worker import start_report
from marq_worker.config.settings import AppSettings, LogFormat, Role
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.logs import COORDINATOR, FOREIGN, TELLTALES, hide_faust, shape
from marq_worker.start_report import MAX_QUEUES, StartReport, introduction
from marq_worker.web.liveness_and_readiness import Reason

SETTINGS = AppSettings(bootstrap_servers="kafka:9092", prefix="shop", project="billing")


def group(name: str, *queues: str) -> HandlerGroup:
    return HandlerGroup(name, {queue: HandledQueue(f"tasks:{queue}", 8) for queue in queues})


def test_a_worker_introduces_itself() -> None:
    groups = {"handlers": group("handlers", "mail", "billing"), "slow": group("slow", "export")}

    assert list(introduction(SETTINGS, groups, "http://127.0.0.1:6066"))[1:] == [
        "queue billing: tasks:billing, concurrency 8, group handlers",
        "queue export: tasks:export, concurrency 8, group slow",
        "queue mail: tasks:mail, concurrency 8, group handlers",
        "dashboard on http://127.0.0.1:6066",
    ]
    first = next(introduction(SETTINGS, groups, ""))
    assert first.startswith("Marq ")
    assert first.endswith(": namespace shop on kafka:9092, project billing, roles handlers, tracker, web")


def test_a_worker_names_the_handlers_of_all_types() -> None:
    types = {"bill": "tasks:bill", "welcome": "tasks:welcome"}
    queues = {"mail": HandledQueue(None, 8, types=types), "news": HandledQueue("tasks:other", 8, types=types)}

    assert list(introduction(SETTINGS, {"handlers": HandlerGroup("handlers", queues)}, ""))[1:] == [
        "queue mail: tasks:bill, tasks:welcome, concurrency 8, group handlers",
        "queue news: tasks:other, tasks:bill, tasks:welcome, concurrency 8, group handlers",
    ]


def test_a_worker_with_many_queues_lists_some() -> None:
    groups = {"handlers": group("handlers", *[f"queue-{number:04d}" for number in range(1_000)])}

    lines = list(introduction(SETTINGS, groups, ""))

    assert len(lines) == MAX_QUEUES + 2
    assert lines[-1] == f"and {1_000 - MAX_QUEUES} more queues with handlers; marq queues lists them"


def test_a_worker_without_handlers_says_how_to_get_some() -> None:
    assert "MARQ_HANDLERS" in list(introduction(SETTINGS, {}, ""))[-1]
    tracker = AppSettings(roles=frozenset({Role.TRACKER}))
    assert len(list(introduction(tracker, None, "http://127.0.0.1:6066"))) == 1


@pytest.fixture
def levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in (*FOREIGN, *TELLTALES)}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    coordinator = logging.getLogger(COORDINATOR)
    for hidden in coordinator.filters[:]:
        coordinator.removeFilter(hidden)


def test_lines_of_faust_are_hidden_and_ours_are_not(levels: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # It gives some of them a level, as at each start.
    shape(logging.getLogger("test-of-start"), LogFormat.TEXT)

    hide_faust()

    for name in ("faust.worker", "mode.services", "aiokafka.conn", "marq_worker.faust_worker"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)
        assert logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert all(logging.getLogger(name).level == logging.NOTSET for name in ("marq", "marq.worker", "tasks"))


def test_no_warning_about_a_worker_that_starts_or_stops(levels: None, caplog: pytest.LogCaptureFixture) -> None:
    hide_faust()

    aiokafka = logging.getLogger(COORDINATOR)
    aiokafka.warning("Heartbeat failed for group %s because it is rebalancing", "marq-app")
    aiokafka.warning("Auto offset commit failed: %s", "denied")

    assert [record.getMessage() for record in caplog.records] == ["Auto offset commit failed: denied"]


async def test_a_worker_says_once_when_it_is_ready_and_until_then_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_report, "LOOK_S", 0)
    monkeypatch.setattr(start_report, "REMIND_S", 0)
    answers: list[Sequence[Reason]] = [[Reason("broker", "does not answer")], [], []]
    asked, ready = list[int](), asyncio.Event()

    async def not_ready() -> Sequence[Reason]:
        asked.append(len(asked))
        return answers[len(asked) - 1]

    def partitions() -> int:
        ready.set()
        return 4

    with caplog.at_level(logging.INFO, "marq.worker"):
        async with StartReport(time.monotonic(), not_ready, partitions):
            async with asyncio.timeout(10):
                await ready.wait()

    lines = [record.getMessage() for record in caplog.records if record.name == "marq.worker"]
    assert len(lines) == len(asked) == 2
    assert lines[0].startswith("not ready after ")
    assert lines[0].endswith(" s: broker: does not answer")
    assert lines[1].startswith("ready in ")
    assert lines[1].endswith(" s, owns 4 markers partitions")
