"""The owner of a markers partition, as far as it can be looked at without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from agents.fetched import Fetched
from agents.ownership import MAX_INBOX_BATCHES, Ownership, Surroundings
from marq.core.names import Names
from marq.core.queue import QueueSettings


def event(start: int) -> Any:
    return SimpleNamespace(value=Fetched(start, start + 1, []))


async def test_an_owner_that_goes_back_lets_in_who_waits_for_room() -> None:
    """Else no batch of any partition would be delivered any more: one agent delivers them all."""
    sought: list[tuple[int, int]] = []

    async def seek(partition: int, offset: int) -> None:
        sought.append((partition, offset))

    async def log_range(partition: int) -> tuple[int, int]:
        return 0, 100

    around = Surroundings(
        Names("t"), table=None, settings=lambda queue: QueueSettings(), client={}, messages_partitions=1,
        max_message_bytes=1, flush_seconds=1, seek=seek, log_range=log_range, pause=lambda partition: None,
    )  # type: ignore[arg-type]  # fmt: skip
    owner = Ownership(3, around, state="owner")
    owner._position = 0
    for start in range(MAX_INBOX_BATCHES):
        await owner.deliver(event(6 + start))
    waiting = asyncio.create_task(owner.deliver(event(90)))
    await asyncio.sleep(0)
    assert not waiting.done()

    first = owner._inbox[0]
    await owner._read(*first)
    async with asyncio.timeout(10):
        await waiting

    assert sought == [(3, 0)]
