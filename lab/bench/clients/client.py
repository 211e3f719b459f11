"""Shared parts of the clients: how a row calls them, how they report to it, and how they handle all messages.

A client writes lines of JSON to the row that started it, and waits for empty lines.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import marq

_STAMP = struct.Struct(">Qd")


def call(*functions: Callable[..., Any]) -> None:
    """Call a function with the command line's arguments, converted by its annotations (and by their `read`, if any).

    If there are several functions, the first argument names one.
    """
    words = sys.argv[1:]
    by_name = {function.__name__: function for function in functions}
    function = by_name[words.pop(0)] if len(functions) > 1 else functions[0]
    hints = get_type_hints(function)
    kinds = [getattr(hints[name], "read", hints[name]) for name in inspect.signature(function).parameters]
    result = function(*(kind(word) for kind, word in zip(kinds, words, strict=False)))
    if inspect.iscoroutine(result):
        asyncio.run(result)


def say(**measurements: object) -> None:
    """Send a line to the row."""
    print(json.dumps(measurements), flush=True)


async def told() -> None:
    """Wait until the row says to continue, or has ended."""
    await asyncio.to_thread(sys.stdin.readline)


async def until_handled(consumer: marq.Consumer, running: Awaitable[None], done: asyncio.Event) -> float:
    """Await a call of `run` until ``done`` is set and every ack is durable; return the monotonic time then."""
    task, waiting = asyncio.ensure_future(running), asyncio.ensure_future(done.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    await consumer.flush()
    ended_s = time.monotonic()
    task.cancel()
    await asyncio.wait([task])
    return ended_s


def stamped(number: int, intended_s: float, size: int) -> bytes:
    """Return a message of ``size`` bytes with its number and intended time, by the machine's monotonic clock."""
    return _STAMP.pack(number, intended_s).ljust(size, b"x")


def read_stamp(value: bytes) -> tuple[int, float]:
    """Return the number and the intended time of a message."""
    number, intended_s = _STAMP.unpack_from(value)
    return number, intended_s


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum of a list that is not empty."""
    ordered = sorted(milliseconds)
    return {
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[len(ordered) * 99 // 100],
        "max_ms": ordered[-1],
    }
