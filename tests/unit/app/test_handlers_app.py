"""What a handler process reports to its watchdog, and how it names what blocks its event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from marq.wire.errors import MarqError
from marq.wire.markers import Source
from marq_worker.app.handlers_app import HandlersApp
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.running_handlers import MAX_CALLS, RunningHandlers
from marq_worker.handlers.worker_pipes import Reporter, reports
from marq_worker.progress import ProgressReport
from marq_worker.watchdog.broker_probe import MessagesPartition, Rebalance


def app(*, rebalancing: bool, reads_committed: bool = False) -> Any:
    reader = SimpleNamespace(
        rebalancing=rebalancing, changes=3, reads_committed=reads_committed, wanted=lambda: {Source("t.messages", 0): 7}
    )
    return SimpleNamespace(handlers=SimpleNamespace(reader=reader), conf=SimpleNamespace(id="t-emails"))


@pytest.mark.parametrize("reads_committed", [False, True])
def test_between_rebalances_the_watchdog_watches_what_is_read(reads_committed: bool) -> None:
    """Else it would end a process that waits for another program's transaction."""
    standings = HandlersApp._standings(app(rebalancing=False, reads_committed=reads_committed))

    assert standings == {MessagesPartition("t.messages", 0, reads_committed): ProgressReport((7,), 7)}


def test_a_rebalance_must_end() -> None:
    """Else a process that hangs in one would live on without reading anything."""
    owed = ProgressReport((3,), owes="it does not end")

    assert HandlersApp._standings(app(rebalancing=True)) == {Rebalance("t-emails"): owed}


@pytest.mark.parametrize("fenced", [False, True])
def test_a_process_that_receives_nothing_more_ends_and_says_whether_another_has_its_instance_id(
    monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """A new process with this id would take the partitions back from the worker that has them now."""
    ends: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *signalled: ends.append(signalled))
    app: Any = SimpleNamespace(
        handlers=SimpleNamespace(reader=SimpleNamespace(fenced=fenced)),
        group=SimpleNamespace(name="mail"),
        fenced=lambda: ends.append("fenced"),
    )

    HandlersApp.failed(app, MarqError("lost"))

    assert ends == ["fenced" if fenced else (os.getpid(), signal.SIGTERM)]


def blocker(task: Any, *pools: Any) -> str:
    group = HandlerGroup("mail", {queue: HandledQueue(f"tasks:{queue}", 1) for queue in ("letters", "parcels")})
    handlers = RunningHandlers(group)
    handlers.session = SimpleNamespace(pools=pools)  # type: ignore[assignment]
    return HandlersApp._blocker(SimpleNamespace(handlers=handlers, group=group), task)  # type: ignore[arg-type]


def pool(queue: str, *tasks: Any) -> Any:
    return SimpleNamespace(busy_tasks=tasks, running=[SimpleNamespace(queue=queue) for _ in tasks])


async def test_a_handler_that_blocks_the_event_loop_is_named_with_its_queue() -> None:
    async def call() -> str:
        return blocker(asyncio.current_task(), pool("letters", object()), pool("parcels", asyncio.current_task()))

    assert await asyncio.create_task(call()) == "handler tasks:parcels of queue parcels"


async def test_a_task_that_a_handler_started_is_named_with_the_handlers_that_run() -> None:
    async def fetch() -> list[str]:
        task = asyncio.current_task()
        return [blocker(task, pool("letters", object()), pool("parcels")), blocker(task), blocker(None)]

    with_handlers, without, outside = await asyncio.create_task(fetch(), name="Task-7")

    named = f"task Task-7 ({fetch.__qualname__}) of group mail"
    assert with_handlers == f"{named} (running: handler tasks:letters of queue letters)"
    assert (without, outside) == (named, "code outside of tasks of group mail")


async def test_what_blocks_the_event_loop_is_reported_to_the_worker() -> None:
    reading, writing = os.pipe()
    app = SimpleNamespace(_blocker=lambda task: "handler mail:send of queue mail", reporter=Reporter(writing))

    blocker = await asyncio.to_thread(HandlersApp._report_blocker, app, None)  # type: ignore[arg-type]
    os.close(writing)
    async with asyncio.timeout(60):
        told = [report async for report in reports(reading) if report]

    assert blocker == "handler mail:send of queue mail"
    assert told == [{"blocked_by": blocker}]


@pytest.mark.parametrize(("wanted", "cancelled"), [(None, []), ("t/0/1", [("letters", "t/0/1", True)]), ("t/0/2", [])])
async def test_the_worker_is_told_what_handlers_do_and_may_cancel_one(
    wanted: str | None, cancelled: list[tuple[str, str, bool]]
) -> None:
    message = SimpleNamespace(queue="letters", id="t/0/1", attempt=3)
    done = asyncio.Event()
    asked = []

    def cancel(identity: str, *, counted: bool) -> None:
        asked.append(("letters", identity, counted))
        done.set()

    # Others have run for longer, so that the worker is not told of the message otherwise.
    others = [SimpleNamespace(queue="letters", id=f"t/1/{number}", attempt=1) for number in range(MAX_CALLS)]
    running = [(message, 4.0), *((other, 5.0) for other in others if wanted is not None)]
    pool = SimpleNamespace(queue="letters", cancellable=lambda _: True, calls=lambda: running, cancel=cancel)
    group = HandlerGroup("mail", {"letters": HandledQueue("tasks:write", 1)})
    handlers = RunningHandlers(group)
    handlers.session = SimpleNamespace(pools=[pool])  # type: ignore[assignment]
    app: Any = SimpleNamespace(handlers=handlers, running_loop=asyncio.get_running_loop())
    question = {} if wanted is None else {"cancel": {"queue": "letters", "id": wanted, "counted": True}}

    # In a thread, because a handler may block the event loop.
    told = await asyncio.to_thread(HandlersApp.answer, app, question)
    if cancelled:
        await asyncio.wait_for(done.wait(), 60)

    call = {"queue": "letters", "handler": "tasks:write", "id": "t/0/1", "attempt": 3, "seconds": 4.0,
            "cancellable": True}  # fmt: skip
    assert told == {"calls": [] if wanted == "t/0/2" else [call]}
    assert asked == cancelled


@pytest.mark.parametrize(("untyped", "other"), [("tasks:other", "tasks:other"), (None, "tasks:bill")])
async def test_each_call_is_named_by_the_handler_of_its_type(untyped: str | None, other: str) -> None:
    messages = [SimpleNamespace(queue="mail", id=kind, attempt=1, type=kind) for kind in ("bill", "welcome", "new")]
    pool = SimpleNamespace(cancellable=lambda _: True, calls=lambda: [(message, 4.0) for message in messages])
    types = {"bill": "tasks:bill", "welcome": "tasks:welcome"}
    handlers = RunningHandlers(HandlerGroup("mail", {"mail": HandledQueue(untyped, 1, types=types)}))
    handlers.session = SimpleNamespace(pools=[pool])  # type: ignore[assignment]

    assert [call["handler"] for call in handlers.calls()] == ["tasks:bill", "tasks:welcome", other]
