"""Durable tasks of queues: their record, and who runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from marq.queues.queues import Queues
from marq_worker.sqs import task_runner
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.task_runner import TaskRunner
from marq_worker.sqs.tasks import CANCELLING, CLAIM_S, MAX_MOVES, PURGED_S, RENEWAL_S, MoveTask, PurgeTask, QueueTasks
from tests.unit.app.sqs.conftest import EmptyQueues
from tests.unit.client.fakes import Clock

LIMIT_S = 10


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tasks(queues: Queues, clock: Clock) -> QueueTasks:
    return QueueTasks(queues, clock, clock)


@pytest.fixture
def other(queues: Queues, clock: Clock) -> QueueTasks:
    """The same tasks, seen by another endpoint."""
    return QueueTasks(queues, clock, clock)


def move(task_id: str = "a") -> MoveTask:
    return MoveTask(id=task_id, started_ms=1, allowed=["emails"])


async def refused(call: Callable[[], object]) -> str:
    with pytest.raises(SqsError) as caught:
        await call()  # type: ignore[misc]
    return caught.value.shape


async def test_a_task_belongs_to_the_endpoint_that_began_it_until_its_claim_ends(
    tasks: QueueTasks, other: QueueTasks, clock: Clock
) -> None:
    await tasks.start_move("dead", move())

    assert (tasks.unclaimed(), other.unclaimed()) == (["dead"], [])
    assert not await other.claim("dead")
    clock.now_s += CLAIM_S - 1
    assert await tasks.claim("dead")
    assert other.unclaimed() == []
    clock.now_s += CLAIM_S - 1
    assert other.unclaimed() == []
    clock.now_s += 1
    assert await other.claim("dead")
    assert not await tasks.claim("dead")


@pytest.mark.parametrize("ahead_s", [-3_600, 3_600])
async def test_endpoints_whose_clocks_differ_leave_each_other_their_claims(
    tasks: QueueTasks, queues: Queues, clock: Clock, ahead_s: float
) -> None:
    """Otherwise, both would run a purge, and each would end that of the other."""
    other = QueueTasks(queues, lambda: clock() + ahead_s, clock)
    await other.start_move("dead", move())

    for _ in range(10):
        assert tasks.unclaimed() == []
        assert not await tasks.claim("dead")
        clock.now_s += RENEWAL_S
        assert await other.claim("dead")
    # It dies.
    assert tasks.unclaimed() == []
    clock.now_s += CLAIM_S - 1
    assert not await tasks.claim("dead")
    clock.now_s += 1
    assert tasks.unclaimed() == ["dead"]
    assert await tasks.claim("dead")
    assert not await other.claim("dead")


async def test_claims_of_forgotten_tasks_take_no_memory(tasks: QueueTasks, other: QueueTasks) -> None:
    await other.start_move("dead", move())
    assert tasks.unclaimed() == []
    assert len(tasks._claims) == 1

    await other.forget("dead")

    assert tasks.unclaimed() == []
    assert not tasks._claims


async def test_a_released_task_is_continued_at_once_and_a_finished_one_never(
    tasks: QueueTasks, other: QueueTasks, clock: Clock
) -> None:
    await tasks.start_move("dead", move())
    await tasks.release("dead")
    assert other.unclaimed() == ["dead"]
    assert await other.claim("dead")

    await tasks.release("dead")
    assert other.is_mine("dead")
    await other.end_move("dead", "a", "COMPLETED")
    clock.now_s += CLAIM_S

    assert tasks.unclaimed() == other.unclaimed() == []


async def test_a_queue_has_one_active_move(tasks: QueueTasks, other: QueueTasks) -> None:
    await tasks.start_move("dead", move("a"))

    assert await refused(lambda: other.start_move("dead", move("b"))) == "InvalidParameterValue"
    await tasks.cancel_move("dead", "a")
    assert await refused(lambda: other.start_move("dead", move("b"))) == "InvalidParameterValue"
    assert await refused(lambda: other.cancel_move("dead", "a")) == "InvalidParameterValue"
    assert await refused(lambda: other.cancel_move("dead", "b")) == "ResourceNotFoundException"
    assert tasks.moves("dead") == [replace(move("a"), state=CANCELLING)]
    await tasks.end_move("dead", "a", "CANCELLED")
    await other.start_move("dead", move("b"))
    assert [task.id for task in tasks.moves("dead")] == ["b", "a"]


async def test_of_two_moves_that_start_at_the_same_time_one_is_refused(
    tasks: QueueTasks, other: QueueTasks, log: EmptyQueues
) -> None:
    """Neither endpoint knows of the other's task when it writes its own."""
    before = log.before_write

    def write_another() -> None:
        log.before_write = before
        log.append(b"sqs-tasks:dead", {"moves": [{"id": "first", "started_ms": 1}], "runner": {}})

    log.before_write = write_another

    assert await refused(lambda: tasks.start_move("dead", move("second"))) == "InvalidParameterValue"
    assert [task.id for task in other.moves("dead")] == ["first"]


async def test_the_last_moves_are_remembered(tasks: QueueTasks) -> None:
    for number in range(MAX_MOVES + 2):
        await tasks.start_move("dead", move(str(number)))
        await tasks.count_moved("dead", str(number), 3)
        await tasks.count_moved("dead", str(number), 4)
        await tasks.end_move("dead", str(number), "FAILED", "why")

    assert [task.id for task in tasks.moves("dead")] == [str(number) for number in range(MAX_MOVES + 1, 1, -1)]
    assert {(task.moved, task.state, task.reason) for task in tasks.moves("dead")} == {(7, "FAILED", "why")}


async def test_a_queue_is_purged_once_a_minute_and_deleted_at_any_time(tasks: QueueTasks, clock: Clock) -> None:
    first = PurgeTask(requested_s=clock())
    await tasks.start_purge("emails", first)
    again = PurgeTask(requested_s=clock() + PURGED_S)
    # It is not done.
    assert await refused(lambda: tasks.start_purge("emails", again)) == "PurgeQueueInProgress"
    await tasks.end_purge("emails", first)
    early = replace(again, requested_s=again.requested_s - 1)
    assert await refused(lambda: tasks.start_purge("emails", early)) == "PurgeQueueInProgress"

    await tasks.start_purge("emails", again)
    await tasks.start_purge("emails", PurgeTask(requested_s=clock(), deletes=True))

    # The end of an earlier one is not that of the deletion.
    await tasks.end_purge("emails", again)
    assert tasks.unclaimed() == ["emails"]
    await tasks.forget("emails")
    assert tasks.purge("emails") is None


async def test_a_purge_by_a_clock_that_is_far_ahead_refuses_no_other(tasks: QueueTasks, clock: Clock) -> None:
    purge = PurgeTask(requested_s=clock() + 3_600)
    await tasks.start_purge("emails", purge)
    await tasks.end_purge("emails", purge)

    await tasks.start_purge("emails", PurgeTask(requested_s=clock()))

    after = tasks.purge("emails")
    assert after is not None
    assert (after.requested_s, after.done) == (clock(), False)


async def test_members_of_a_newer_version_are_ignored(tasks: QueueTasks, log: EmptyQueues, queues: Queues) -> None:
    purge = {"requested_s": 5.0, "deletes": False, "done": False, "imagined": 1}
    log.append(b"sqs-tasks:emails", {"purge": purge, "moves": [{"id": "a", "started_ms": 1, "imagined": 1}]})
    await queues.sync(LIMIT_S)

    assert tasks.purge("emails") == PurgeTask(requested_s=5.0)
    assert tasks.moves("emails") == [MoveTask(id="a", started_ms=1)]


# --- the runner -------------------------------------------------------------------------------------------------------


class Work:
    """Records what a runner runs."""

    def __init__(self, tasks: QueueTasks) -> None:
        self.tasks = tasks
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.errors: list[Exception] = []

    async def purge(self, queue: str, task: PurgeTask) -> None:
        await self.begun.put(f"purge {queue}")
        if self.errors:
            raise self.errors.pop()
        await self.tasks.end_purge(queue, task)

    async def move(self, queue: str, task: MoveTask, stopping: asyncio.Event) -> None:
        await self.begun.put(f"move {queue} {task.id}")
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            await self.begun.put("cancelled")
            raise
        await self.tasks.end_move(queue, task.id, "COMPLETED")

    async def next(self) -> str:
        async with asyncio.timeout(LIMIT_S):
            return await self.begun.get()


@pytest.fixture
def work(tasks: QueueTasks, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setattr(task_runner, "LOOK_S", 0.01)
    monkeypatch.setattr(task_runner, "RENEWAL_S", 0.01)
    monkeypatch.setattr(task_runner, "STOP_S", 0.01)
    return Work(tasks)


@pytest.fixture
async def runner(tasks: QueueTasks, work: Work) -> AsyncIterator[TaskRunner]:
    runner = TaskRunner(tasks, work.purge, work.move)
    runner.start()
    yield runner
    await runner.stop()


async def test_a_runner_purges_before_it_moves_and_tries_again_after_an_error(
    tasks: QueueTasks, work: Work, runner: TaskRunner, clock: Clock
) -> None:
    work.errors = [ZeroDivisionError()]
    await tasks.start_move("dead", move())
    assert await work.next() == "move dead a"
    work.may_end.set()
    await tasks.start_purge("emails", PurgeTask(requested_s=clock()))
    runner.wake()

    assert await work.next() == await work.next() == "purge emails"


async def test_a_stopped_runner_leaves_its_task_to_another(
    tasks: QueueTasks, other: QueueTasks, work: Work, runner: TaskRunner
) -> None:
    await tasks.start_move("dead", move())
    assert await work.next() == "move dead a"

    await runner.stop()

    assert other.unclaimed() == ["dead"]


async def test_a_stop_does_not_wait_forever_until_tasks_are_released(
    tasks: QueueTasks, work: Work, runner: TaskRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker does not respond, another endpoint continues them when the claims have expired."""
    monkeypatch.setattr(task_runner, "END_S", 0.01)
    monkeypatch.setattr(tasks, "release", lambda queue: asyncio.Event().wait())
    await tasks.start_move("dead", move())
    assert await work.next() == "move dead a"

    await asyncio.wait_for(runner.stop(), LIMIT_S)


async def test_a_runner_that_lost_its_claim_stops(
    tasks: QueueTasks, other: QueueTasks, work: Work, runner: TaskRunner, clock: Clock
) -> None:
    await tasks.start_move("dead", move())
    assert await work.next() == "move dead a"
    await tasks.release("dead")
    assert await other.claim("dead")

    assert await work.next() == "cancelled"

    clock.now_s += CLAIM_S
    assert await work.next() == "move dead a"
