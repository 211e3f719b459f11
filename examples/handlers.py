"""Handlers that the worker runs, as examples/queues.toml says."""

import asyncio
import logging

import marq

log = logging.getLogger("examples")


async def send_email(message: marq.Message) -> None:
    """A coroutine function runs in the worker's event loop: it waits, and never blocks."""
    address = message.headers.get("to")
    if address is None:
        raise marq.Reject("no address")
    await asyncio.sleep(0.01)  # stands for a call to a mail server
    log.info("sent %d bytes to %s, attempt %d", len(message.value), address.decode(), message.attempt)


def make_thumbnail(message: marq.Message) -> None:
    """A plain function runs in a thread, so it may block or compute."""
    if message.attempt == 1:
        raise marq.Retry(delay=0.1)
    log.info("thumbnail of %d bytes, attempt %d", len(message.value), message.attempt)
