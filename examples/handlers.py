"""Handlers that a worker runs, with the settings of examples/queues.toml.

``MARQ_HANDLERS=examples.handlers MARQ_QUEUES_FILE=examples/queues.toml marq worker -l info``
"""

import asyncio
import logging
from dataclasses import dataclass

import marq

log = logging.getLogger("examples")


@dataclass
class Email:
    subject: str
    to: str = ""


@marq.handler("emails")
async def send_email(email: Email, message: marq.Message[Email]) -> None:
    """A coroutine function must not block; many share one thread.

    Senders such as examples/fastapi_service.py send JSON. A value that is not an Email is dead-lettered.
    """
    if not email.to:
        raise marq.Reject("no address")  # another attempt would not help: dead-letter it
    await asyncio.sleep(0.01)  # stands for a call to a mail server; its exceptions cause a redelivery
    log.info("sent %r to %s, attempt %d", email.subject, email.to, message.attempt)


@marq.handler("thumbnails", concurrency=4)
def make_thumbnail(picture: bytes, message: marq.Message[bytes]) -> None:
    """A plain function runs in a thread, so it may block or compute."""
    if message.attempt == 1:
        raise marq.Retry(delay=0.1)  # redeliver in 0.1 s instead of after the queue's backoff
    log.info("thumbnail of %d bytes, attempt %d", len(picture), message.attempt)
