"""Errors that end a process with one sentence, in the words of the settings as the user wrote them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from marq.wire.errors import MarqError
from marq_worker.config.settings import as_written

Found = TypeVar("Found")


def end_with(error: Exception) -> NoReturn:
    """End the process with the error's notes (such as the traceback of a failed import) and its text."""
    sys.exit("\n".join([*getattr(error, "__notes__", ()), f"marq: {as_written(str(error))}"]))


async def or_exit(starting: Awaitable[Found]) -> Found:
    """Await a step of the start; a MarqError ends the process with one sentence."""
    try:
        return await starting
    except MarqError as error:
        end_with(error)
