"""Handlers with lifespans and a middleware, which a worker runs for the conformance suite.

They write what happens to files in the folder that a message names, so that the test can read it in another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import marq

POLL_SECONDS = 0.02
open_resources: list[str] = []
opened_by: ContextVar[str] = ContextVar("opened_by")


def note(folder: Path, line: str) -> None:
    with (folder / "journal").open("a") as journal:
        journal.write(f"{line} {' '.join(open_resources)}".rstrip() + "\n")


@marq.lifespan
async def pool() -> AsyncIterator[dict[str, Any]]:
    # It can't be reset in another task, as many resources can't be closed there.
    token = opened_by.set("pool")
    open_resources.append("pool")
    folders: set[Path] = set()
    yield {"folders": folders}
    opened_by.reset(token)
    open_resources.remove("pool")
    for folder in folders:
        note(folder, "pool closed")


@marq.lifespan
async def cache() -> AsyncIterator[dict[str, Any]]:
    open_resources.append("cache")
    yield {"name": "of the lifespan"}
    open_resources.remove("cache")


@marq.middleware
async def noting(message: marq.Message, call_next: marq.CallNext) -> None:
    folder = Path(message.body.decode())
    message.state["folders"].add(folder)
    try:
        await call_next(message)
    finally:
        note(folder, f"handled {message.state['name']}")


async def handle(message: marq.Message) -> None:
    """Work until there is a file ``go``."""
    folder = Path(message.body.decode())
    note(folder, "begun")
    while not (folder / "go").exists():  # noqa: ASYNC110 - the test is another process
        await asyncio.sleep(POLL_SECONDS)
