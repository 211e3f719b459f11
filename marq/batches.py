"""Runs handlers over batches of messages: a call for each list, so that bulk work costs little for each message.

A batch is what is there, up to a limit; nobody waits for it to fill up. While a handler works on one the next is
prefetched, so where there is a backlog the batches are full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from marq.crew import Crew
from marq.lease import Lease
from marq.message import Message
from marq.outbox import Outbox
from marq.shelf import Shelf
from marq.spending import seen_once

BatchHandler = Callable[[list[Message]], Awaitable[Any]] | Callable[[list[Message]], Any]

DEFAULT_MAX_MESSAGES = 1_000
DEFAULT_CONCURRENCY = 1

_lease: Callable[[Message], Lease] = attrgetter("_lease")


class BatchWorkers(Crew[list[Message]]):
    """``concurrency`` workers of a handler that takes up to ``max_messages``; ``most`` are held at a time."""

    def __init__(
        self, shelf: Shelf, outbox: Outbox, handler: BatchHandler, concurrency: int, max_messages: int, most: int
    ) -> None:
        # Twice as many as run, so that the next batch is there when a handler is done.
        super().__init__(shelf, outbox, handler, concurrency, min(2 * concurrency * max_messages, most))
        self._max_messages = max_messages

    def _messages(self, work: list[Message]) -> Sequence[Message]:
        return work

    async def _work(self, index: int) -> None:
        shelf, outbox = self._shelf, self._outbox
        while not (self._stopping or shelf.closed):
            batch = self._take()
            if not batch:
                outbox.flush_soon()
                await shelf.wait()
                continue
            # Right before the call, so that a crash abandons only messages that a handler was about to process.
            batch = await seen_once(batch)
            if not batch:
                continue
            self._current[index] = batch
            try:
                # A list of its own: it may take messages out as it goes, and they are acked all the same.
                await self._handler(batch.copy())
            except BaseException as error:
                self._failed(index, batch, error)
            else:
                self._resumed(index)
                self._ack(batch)
            self._current[index] = None
            await asyncio.sleep(0)

    def _take(self) -> list[Message]:
        """Take what is there, without messages whose leases are over."""
        batch, now_s = self._shelf.ready.take(self._max_messages), self._outbox.clock()
        over = {lease for lease in set(map(_lease, batch)) if lease.expires_s <= now_s}
        return [message for message in batch if message._lease not in over] if over else batch

    def _ack(self, batch: Sequence[Message]) -> None:
        """Ack all that have no outcome yet, whole leases at once."""
        for breaker in {message._lease.breaker for message in batch}:
            if breaker is not None:
                breaker.succeeded(batch)
        for lease, messages in groupby(batch, _lease):
            offsets = [message._offset for message in messages]
            if lease.decided:
                offsets = [offset for offset in offsets if offset not in lease.decided]
            if offsets:
                lease.acked += offsets
                self._outbox.touch(lease)
