"""The handlers of a group: they join it, and leave it when they have ended."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

from marq.consumer.session import HandlersSession
from marq.kafka.queue_records import Serving
from marq.settings.definitions import Definitions
from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup
from marq_worker.handlers.running_handlers import RunningHandlers

LIMIT_S = 60.0
GROUP = HandlerGroup("mail", {"letters": HandledQueue("tasks:write", 1)})


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
    handlers, parts = RunningHandlers(GROUP), Parts()
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


class Moving(HandlersSession):
    """The shipped session without connections; it notes which partitions it is told to read."""

    def __init__(self, serving: Serving) -> None:
        self.reads: list[Any] = []
        self.moved = asyncio.Event()
        self.receiver = self.cluster = self._reader = self  # type: ignore[assignment]
        self.sleep = asyncio.sleep
        self.error: BaseException | None = None
        self._serving, self.changed, self._background = serving, asyncio.Event(), []
        self._ending = False

    def start(self) -> None:
        """Nothing is received here."""

    async def done(self) -> None:
        await asyncio.Event().wait()

    def apply_settings(self) -> None:
        """No queue is paused here."""

    async def serve(self, serving: Serving, begin: Any) -> None:
        self.reads.append(serving.partitions)
        self.moved.set()

    def fail(self, error: BaseException) -> None:
        self.error = error

    async def close(self) -> None:
        await self.unfollow()

    async def stop(self, *_: Any, **__: Any) -> None:
        """It is in no group."""


def moving(definitions: Definitions) -> tuple[RunningHandlers, Moving]:
    """Return handlers that are about to run, and their session."""
    handlers = RunningHandlers(GROUP)
    handlers._wanted = functools.partial(GROUP.serving, "messages", GROUP.queues, definitions)
    session = Moving(handlers._wanted())
    reader: Any = session
    handlers.session, handlers.reader = session, reader
    return handlers, session


async def test_running_handlers_follow_the_partitions_of_their_queues() -> None:
    # given: a queue that has just been defined is read in all partitions
    definitions = Definitions()
    handlers, session = moving(definitions)
    running = asyncio.create_task(handlers.run())

    # when: a minute later, only its own are read; the next change is one of other settings
    definitions.fold(b"placement:letters", {"sends": [3], "reads": [3]})
    handlers.apply_definitions()
    await asyncio.wait_for(session.moved.wait(), LIMIT_S)
    handlers.apply_definitions()
    session.moved.clear()
    definitions.fold(b"placement:letters", {"sends": [3], "reads": [1, 3]})
    handlers.apply_definitions()
    await asyncio.wait_for(session.moved.wait(), LIMIT_S)

    # then
    assert session.reads == [(3,), (1, 3)]
    await asyncio.wait_for(handlers.stop(), LIMIT_S)
    assert session.error is None
    running.cancel()
    await asyncio.wait([running], timeout=LIMIT_S)


async def test_handlers_follow_a_change_from_before_they_run() -> None:
    # given: a change while they join the group
    definitions = Definitions()
    handlers, session = moving(definitions)
    definitions.fold(b"placement:letters", {"sends": [3], "reads": [3]})
    handlers.apply_definitions()

    # when
    running = asyncio.create_task(handlers.run())
    await asyncio.wait_for(session.moved.wait(), LIMIT_S)

    # then
    assert session.reads == [(3,)]
    await asyncio.wait_for(handlers.stop(), LIMIT_S)
    running.cancel()
    await asyncio.wait([running], timeout=LIMIT_S)


async def test_handlers_that_can_not_follow_their_queues_fail() -> None:
    """They would read too few partitions from then on."""
    definitions = Definitions()
    handlers, session = moving(definitions)
    failed = asyncio.Event()
    session.fail = lambda error: failed.set()  # type: ignore[method-assign]
    running = asyncio.create_task(handlers.run())
    await asyncio.sleep(0)
    handlers._wanted = functools.partial(int, "not a number")

    handlers.apply_definitions()

    await asyncio.wait_for(failed.wait(), LIMIT_S)
    await asyncio.wait_for(handlers.stop(), LIMIT_S)
    running.cancel()
    await asyncio.wait([running], timeout=LIMIT_S)
