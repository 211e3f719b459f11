"""How the event loop of a worker ends."""

from __future__ import annotations

import asyncio

from marq_worker.app.faust_worker import MarqWorker


def test_a_task_that_is_cancelled_at_the_end_of_a_stop_can_end() -> None:
    ended = []

    async def last_task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # Several turns of the event loop, as for closing a connection.
            await asyncio.sleep(0.01)
            ended.append(True)

    async def stop() -> None:
        task = asyncio.create_task(last_task())
        await asyncio.sleep(0)
        task.cancel()
        await MarqWorker.__new__(MarqWorker)._sentinel_task()
        assert ended == [True]

    asyncio.run(stop())
