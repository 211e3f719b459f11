"""Handlers for tests: a worker imports a copy of this file, from a directory of the test's own.

Each start of a handler is a line of the journal, a JSON object. A handler that is to work long works until a file with
its message's name is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import marq

HERE = Path(__file__).parent
POLL_SECONDS = 0.02


def note(message: marq.Message) -> None:
    line = {
        "queue": message.queue,
        "id": message.id,
        "value": message.body.decode(),
        "attempt": message.attempt,
        "worker": os.getpid(),
        "parent": os.getppid(),
    }
    # One write of a whole line to the end: several workers share the file.
    with (HERE / "journal").open("a") as journal:
        journal.write(json.dumps(line) + "\n")


async def coroutine(message: marq.Message) -> None:
    note(message)


async def slow(message: marq.Message) -> None:
    note(message)
    await asyncio.sleep(POLL_SECONDS)


def plain(message: marq.Message) -> None:
    note(message)


async def failing(message: marq.Message) -> None:
    note(message)
    raise ValueError("broken for good")


async def patient(message: marq.Message) -> None:
    note(message)
    while not (HERE / message.value.decode()).exists():  # noqa: ASYNC110 - the test is another process
        await asyncio.sleep(POLL_SECONDS)


def plain_patient(message: marq.Message) -> None:
    note(message)
    while not (HERE / message.value.decode()).exists():
        time.sleep(POLL_SECONDS)


async def blocking(message: marq.Message) -> None:
    """Block the event loop for as many seconds as the message says."""
    note(message)
    time.sleep(float(message.value))  # noqa: ASYNC251 - that is what it is for


@marq.handler("decorated", concurrency=2, group="decorated handlers", codec=marq.JSON)
async def decorated(message: marq.Message) -> None:
    assert message.value == {"decoded": True}
    note(message)


@dataclass
class Parcel:
    number: int


@marq.handler("parcels", group="decorated handlers")
async def forward(parcel: Parcel) -> None:
    await arrive.send(Parcel(parcel.number + 1))


@marq.handler("arrivals", group="decorated handlers")
def arrive(parcel: Parcel, message: marq.Message[Parcel]) -> None:
    assert parcel == message.value == Parcel(2)
    note(message)


@marq.handler("typed", type="parcel", group="decorated handlers", max_attempts=2)
async def typed_parcel(parcel: Parcel, message: marq.Message[Parcel]) -> None:
    assert parcel == Parcel(7)
    note(message)


@marq.handler("typed", type="text")
def typed_text(text: str, message: marq.Message[str]) -> None:
    assert text == message.value == "seven"
    note(message)
