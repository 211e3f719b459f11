"""Queues as SQS clients see them: what a repeated or a later CreateQueue does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import marq.queues.following
from marq.queues.queues import Queues
from marq.settings.definitions import Definitions
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.sqs_queues import DELETED_S, Directory
from tests.unit.client.test_queues import ListLog

MAXIMUM_BYTES = 1_000_000


class EmptyQueues(ListLog):
    async def messages_of(self, queue: str, definitions: Definitions) -> str:
        return ""


@pytest.fixture
async def queues(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Queues]:
    log = EmptyQueues()
    monkeypatch.setattr(marq.queues.following, "definition_log", lambda _: log)
    async with Queues("none:1") as queues:
        yield queues


async def test_creating_a_queue_again_with_the_largest_size_changes_nothing(queues: Queues) -> None:
    directory = Directory(queues, MAXIMUM_BYTES)
    for _ in range(2):
        await directory.create("emails", {"MaximumMessageSize": "1048576"}, {})

    assert directory.get("emails").attributes.maximum_message_bytes == MAXIMUM_BYTES
    with pytest.raises(SqsError, match="another MaximumMessageSize"):
        await directory.create("emails", {"MaximumMessageSize": "1024"}, {})
    for size in ("1048577", "9" * 5_000, "\u00b2"):
        with pytest.raises(SqsError, match="MaximumMessageSize"):
            await directory.create("others", {"MaximumMessageSize": size}, {})


async def test_a_queue_with_the_name_of_a_deleted_one_is_told_from_it(queues: Queues) -> None:
    now_s = 1_700_000_000.0
    directory = Directory(queues, MAXIMUM_BYTES, lambda: now_s)
    fifo = {"FifoQueue": "true"}
    await directory.create("orders.fifo", fifo, {})
    generations = [directory.get("orders.fifo").generation]
    for _ in range(2):
        await directory.forget("orders.fifo", now_s)
        now_s += DELETED_S
        await directory.create("orders.fifo", fifo, {})
        generations.append(directory.get("orders.fifo").generation)
        await directory.tag("orders.fifo", {"a": "b"})
        assert directory.get("orders.fifo").generation == generations[-1]

    assert generations == [0, 1_700_000_060, 1_700_000_120]
