"""Middleware that kills its process after the first attempt's handler has returned, before the ack is written."""

import os
import signal
from typing import Any

import marq


@marq.middleware
async def killed_before_ack(message: marq.Message, call_next: marq.CallNext) -> Any:
    result = await call_next(message)
    if message.attempt == 1 and "kill" in message.headers:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
