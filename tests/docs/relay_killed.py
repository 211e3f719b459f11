"""The relay of examples/recipes/outbox.py; dies when the broker has confirmed a batch, before its rows are deleted."""

import asyncio
import os
import signal
from typing import Any

import marq
from examples.recipes import outbox

send_many = marq.Producer.send_many


async def killed_after_the_send(self: marq.Producer, *arguments: Any, **options: Any) -> None:
    await send_many(self, *arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


marq.Producer.send_many = killed_after_the_send  # type: ignore[assignment, method-assign]

asyncio.run(outbox.relay())
