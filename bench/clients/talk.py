"""How a client of the benchmark talks with the row that has started it: lines of JSON out, empty lines in."""

from __future__ import annotations

import asyncio
import json
import sys


def say(**figures: object) -> None:
    """Tell the row."""
    print(json.dumps(figures), flush=True)


async def told() -> None:
    """Return when the row has said to go on, or has ended."""
    await asyncio.to_thread(sys.stdin.readline)
