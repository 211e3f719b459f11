"""The handlers of a group: they join it, and leave it when they have ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.running_handlers import RunningHandlers

LIMIT_S = 60.0


class Parts:
    """A reader that does not get into its group, and a session; both note what is asked of them."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.joining = asyncio.Event()
        self.receiver = object()

    async def start(self, assignee: object) -> None:
        assert assignee is self.receiver
        self.joining.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.noted.append("gave up joining")

    async def close(self) -> None:
        self.noted.append("session ended")

    async def stop(self, limit_s: float) -> None:
        self.noted.append("left the group")


async def test_a_stop_ends_a_join_that_does_not_end_and_leaves_the_group_last() -> None:
    """Leases are renewed, and offsets committed, until handlers have ended."""
    handlers, parts = RunningHandlers(HandlerGroup("mail", {"letters": HandledQueue("tasks:write", 1)})), Parts()
    session: Any = SimpleNamespace(receiver=parts.receiver, close=parts.close)
    reader: Any = parts
    handlers.session, handlers.reader = session, reader
    joining = asyncio.create_task(handlers.join())
    await asyncio.wait_for(parts.joining.wait(), LIMIT_S)

    await asyncio.wait_for(handlers.stop(), LIMIT_S)
    await asyncio.wait([joining], timeout=LIMIT_S)

    assert parts.noted == ["gave up joining", "session ended", "left the group"]
    assert joining.cancelled()
    # Nothing of a stopped one runs.
    await handlers.join()
    await handlers.run()
