"""What the supervisor of handlers processes decides."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agents.handler_groups import HandledQueue, HandlerGroup
from app.faust_app import EXIT_FENCED
from app.handlers_process import VARIABLE, HandlersProcess
from app.handlers_processes import (
    FIRST_PAUSE_S,
    LONG_LIFE_S,
    MAX_PAUSE_S,
    HandlersProcesses,
    Pauses,
    changes,
    command,
    stop_limit_s,
)


def group(name: str, *queues: str, concurrency: int = 64, topic: str | None = None) -> HandlerGroup:
    return HandlerGroup(name, {queue: HandledQueue("mail:send", concurrency, topic) for queue in queues})


def test_a_group_that_stays_as_it_is_keeps_its_process() -> None:
    running = {"a": group("a", "emails")}

    assert changes(running, {"a": group("a", "emails")}) == ([], [])


def test_groups_that_come_and_go_start_and_stop_processes() -> None:
    running = {"a": group("a", "emails")}

    assert changes(running, {"b": group("b", "reports")}) == (["a"], ["b"])
    assert changes({}, running) == ([], ["a"])
    assert changes(running, {}) == (["a"], [])


@pytest.mark.parametrize(
    "changed",
    [
        group("a", "emails", "reports"),
        group("a", "emails", concurrency=3),
        group("a", "emails", topic="emails"),
        HandlerGroup("a", {"emails": HandledQueue("mail:send_twice", 64)}),
    ],
    ids=["queues", "concurrency", "topic", "handler"],
)
def test_a_group_that_differs_gets_another_process(changed: HandlerGroup) -> None:
    running = {"a": group("a", "emails"), "b": group("b", "orders")}

    assert changes(running, {**running, "a": changed}) == (["a"], ["a"])


def test_the_pause_before_the_next_start_grows_up_to_a_limit() -> None:
    pauses = Pauses()

    found = [pauses.after(1.0) for _ in range(10)]

    assert found[:3] == [FIRST_PAUSE_S, FIRST_PAUSE_S * 2, FIRST_PAUSE_S * 4]
    assert found[-1] == MAX_PAUSE_S


def test_after_a_long_life_the_pause_is_short_again() -> None:
    pauses = Pauses()
    for _ in range(10):
        pauses.after(1.0)

    assert pauses.after(LONG_LIFE_S) == FIRST_PAUSE_S
    assert pauses.after(1.0) == FIRST_PAUSE_S * 2


@pytest.mark.parametrize(("timeout", "processes"), [(9, 6), (300, 297), (4, 2), (1, 0.5)])
def test_processes_get_a_part_of_the_time_for_a_stop(timeout: float, processes: float) -> None:
    assert stop_limit_s(timeout) == processes


async def test_a_process_whose_instance_id_another_one_uses_ends_its_worker_and_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = [sys.executable, "-c", f"raise SystemExit({EXIT_FENCED})"]
    monkeypatch.setattr("app.handlers_processes.command", lambda _: ended)
    codes: asyncio.Queue[int] = asyncio.Queue()
    processes = HandlersProcesses(1, None, codes.put_nowait)

    processes.want({"a": group("a", "emails")})
    async with asyncio.timeout(30):
        code = await codes.get()
    [figures] = processes.figures()
    await processes.stop()

    assert (code, figures["starts"]) == (EXIT_FENCED, 1)


def test_a_process_has_the_workers_log_level_and_no_web_server() -> None:
    assert command("INFO")[-3:] == ["--without-web", "-l", "INFO"]
    assert command(None)[-1] == "--without-web"


def test_a_process_takes_what_it_is_told_out_of_its_environment() -> None:
    told = HandlersProcess(group("a", "emails", topic="t"), 7, 8)
    environment = {VARIABLE: told.encode(), "PATH": "/bin"}

    assert HandlersProcess.take(environment) == told
    assert environment == {"PATH": "/bin"}
    assert HandlersProcess.take(environment) is None
