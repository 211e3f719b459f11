"""Calls in threads report every error to their callers."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from marq.client.threads import in_thread

LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError, KeyError),
        (SystemExit, RuntimeError),
        (StopIteration, RuntimeError),
        (CancelledError, RuntimeError),
    ],
)
async def test_a_call_that_raises_ends(error: type[BaseException], expected: type[Exception]) -> None:
    def work() -> None:
        raise error("why")

    with pytest.raises(expected, match="why"):
        async with asyncio.timeout(LIMIT_S):
            await in_thread(work)
