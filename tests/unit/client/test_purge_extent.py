"""Which open messages a purge ends, by the rows of the trackers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from marq.admin.purge_extent import open_messages
from marq.kafka.inspector import Inspector
from tests.unit.core.batches import QUEUE, delay
from tests.unit.core.test_lease_book import T0, Log


async def kinds(log: Log, *, delayed: bool) -> dict[int, str]:
    """Return the kind of each open message that a purge ends, by number."""

    async def owned() -> dict[int, Any]:
        return {0: SimpleNamespace(tracker=SimpleNamespace(book=log.book))}

    held, _ = await open_messages(cast("Inspector", SimpleNamespace(owned=owned)), QUEUE, delayed=delayed)
    return {receipt.offset: kind for receipt, kind in held}


async def test_a_message_with_a_deduplication_id_and_without_a_delay_waits() -> None:
    log = Log()
    # The queue is paused, so the message is still with its tracker.
    log.fold(delay([1, 2], [0, 60_000]))

    assert await kinds(log, delayed=False) == {1: "waiting"}
    assert await kinds(log, delayed=True) == {1: "waiting", 2: "delayed"}


async def test_a_delayed_message_that_becomes_due_during_the_pause_of_a_purge_is_still_a_delayed_one() -> None:
    log = Log()
    log.fold(delay([1], [1_000]))
    log.book.clock.advance(T0 + 2_000)

    assert await kinds(log, delayed=True) == {1: "delayed"}
