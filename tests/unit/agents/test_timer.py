"""The turns that owners give to the timer agent."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from marq.owner.engine import OwnerTransaction
from marq_worker.owner.turns import redeliver
from marq_worker.transport.turns import Turn


def write(number: int) -> OwnerTransaction:
    return OwnerTransaction(now_ms=number, appended_ms=0, markers=[])


class Writer:
    """An owner with some writes, of which it carries out those that it may."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self._left = [write(number) for number in range(1, count)]
        self._error = error
        self.may = asyncio.Event()
        self.performed: list[int] = []
        self.cancelled = asyncio.Event()
        self.engine = SimpleNamespace(next_write=lambda now_ms: self._left.pop(0) if self._left else None)

    async def perform(self, write: OwnerTransaction) -> None:
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self._error is not None:
            raise self._error
        self.performed.append(write.now_ms)


def begun(writer: Any) -> Turn:
    turn = Turn(partial(redeliver, writer, write(0)))
    turn.begin()
    # A channel with two readers would deliver it twice.
    turn.begin()
    return turn


async def test_a_turn_is_over_when_there_is_nothing_more_to_write() -> None:
    writer = Writer(3)
    turn = begun(writer)
    writer.may.set()

    async with asyncio.timeout(60):
        await turn.over

    assert writer.performed == [0, 1, 2]


async def test_an_error_is_the_owners() -> None:
    """It takes its partition over again; the agent goes on."""
    writer = Writer(3, OSError("the disk is full"))
    turn = begun(writer)
    writer.may.set()

    with pytest.raises(OSError, match="full"):
        async with asyncio.timeout(60):
            await turn.over

    assert writer.performed == []


async def test_what_an_owner_that_stops_was_writing_is_given_up() -> None:
    """A transaction that continued could be fenced by the next owner without any notice."""
    writer = Writer(1)
    turn = begun(writer)
    await asyncio.sleep(0)

    turn.over.cancel()
    async with asyncio.timeout(60):
        await writer.cancelled.wait()

    assert writer.performed == []
