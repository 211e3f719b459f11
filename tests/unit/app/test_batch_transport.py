"""Commits of a handler process, in the thread of its consumer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import CommitFailedError, UnknownTopicOrPartitionError
from aiokafka.structs import OffsetAndMetadata
from faust.types import TP

from marq.kafka.protocol import Generation
from marq_worker.transport.batch_transport import BatchThread

P0 = TP("messages", 0)
MINE = Generation(3, "member", None)


class Coordinator:
    """aiokafka's way to commit; the topic does not exist when the first commits arrive."""

    generation, member_id, _group_instance_id = MINE
    _retry_backoff_ms = 0

    def __init__(self, refusals: int = 0) -> None:
        self._commit_lock = asyncio.Lock()
        self._refusals = refusals
        self.known = asyncio.Event()
        self.known.set()
        #: The generation and the offsets of each attempt.
        self.attempts: list[tuple[int, object]] = []

    async def ensure_coordinator_known(self) -> None:
        await self.known.wait()

    async def _do_commit_offsets(self, assignment: object, offsets: object) -> None:
        self.attempts.append((self.generation, offsets))
        if len(self.attempts) <= self._refusals:
            raise UnknownTopicOrPartitionError

    async def commit(self, offsets: object) -> None:
        await GroupCoordinator.commit_offsets(self, None, offsets)


def thread_of(coordinator: Coordinator) -> BatchThread:
    thread = object.__new__(BatchThread)
    subscription = SimpleNamespace(subscription=SimpleNamespace(assignment=None))
    thread._consumer = SimpleNamespace(_coordinator=coordinator, _subscription=subscription, commit=coordinator.commit)
    return thread


@pytest.fixture(autouse=True)
def same_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_thread(self: BatchThread, function: Any, *args: object) -> Any:
        return await function(*args)

    monkeypatch.setattr(BatchThread, "call_thread", call_thread)


async def test_a_commit_is_one_attempt() -> None:
    """The thread once repeated a commit to a deleted topic for good, and set back later commits of its partition."""
    coordinator = Coordinator(refusals=2)

    with pytest.raises(UnknownTopicOrPartitionError):
        await thread_of(coordinator).commit_exactly({P0: (5, "metadata")}, MINE, 10.0)

    assert coordinator.attempts == [(3, {TopicPartition(*P0): OffsetAndMetadata(5, "metadata")})]


async def test_a_commit_that_waited_for_the_coordinator_ends_with_its_limit() -> None:
    coordinator = Coordinator()
    coordinator.known.clear()

    with pytest.raises(TimeoutError):
        await thread_of(coordinator).commit_exactly({P0: (5, "")}, MINE, 0.0)

    assert coordinator.attempts == []


@pytest.mark.parametrize("generation", [Generation(4, "member", None), Generation(-1, "", None)])
async def test_a_commit_of_a_former_generation_is_not_sent(generation: Generation) -> None:
    """Another member may own the partition since, and may have read further."""
    coordinator = Coordinator()
    coordinator.known.clear()
    committing = asyncio.create_task(thread_of(coordinator).commit_exactly({P0: (5, "")}, MINE, 10.0))
    await asyncio.sleep(0)

    coordinator.generation, coordinator.member_id, _ = generation
    coordinator.known.set()

    with pytest.raises(CommitFailedError):
        await committing
    assert coordinator.attempts == []


async def test_a_member_without_a_generation_commits_nothing() -> None:
    """The group would accept it like an administrator's commit."""
    coordinator, nobody = Coordinator(), Generation(-1, "", None)
    coordinator.generation, coordinator.member_id, _ = nobody

    with pytest.raises(CommitFailedError):
        await thread_of(coordinator).commit_exactly({P0: (5, "")}, nobody, 10.0)

    assert coordinator.attempts == []
