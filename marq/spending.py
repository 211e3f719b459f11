"""At-most-once delivery: a message is spent right before user code sees it, and never earlier.

Step 4 of the flow, for queues that deliver at most once. Messages that are taken from a shelf go through
:func:`seen_once`. It writes a SPEND marker, waits until the marker is durable, and returns the messages whose leases
have not ended meanwhile. Messages that are taken at the same time share a write.

A crash before the marker is durable loses nothing: the tracker redelivers. A crash after it abandons the message. So a
crash abandons only messages whose handlers run or are about to begin, never the ones that are prefetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import encode
from marq.core.markers import Source, Spend
from marq.core.names import markers_partition
from marq.flow_settings import FlowSettings
from marq.message import Message
from marq.writer import MarkerRecord, MarkerWriter

log = logging.getLogger("marq")

#: Pause between two attempts to write a SPEND marker.
RETRY_S = 0.2


async def seen_once(messages: list[Message]) -> list[Message]:
    """Return the messages that user code may see now, in their order.

    Returns all of them without waiting, unless one is from a queue that delivers at most once.
    """
    for message in messages:
        if message._lease.spending is not None:
            return await message._lease.spending.spend(messages)
    return messages


class _Asked(NamedTuple):
    """Messages of one caller, and those of them whose SPEND is durable."""

    messages: Sequence[Message]
    spent: asyncio.Future[set[Message]]


class Spending:
    """Writes the SPEND markers of one consumer: one write at a time, for all callers that wait."""

    def __init__(
        self,
        writer: MarkerWriter,
        settings: FlowSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._waiting: list[_Asked] = []
        self._writing: list[_Asked] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    async def spend(self, messages: Sequence[Message]) -> list[Message]:
        """Spend messages that deliver at most once, and return all that may be seen now.

        Messages whose leases have ended are left out, because another consumer may have them. If the call is cancelled,
        or the consumer stops, the messages are released and the attempt does not count: user code never saw them.
        """
        if self._stopped:
            release_unseen(messages)
            return []
        asked = _Asked(messages, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="marq-spending")
        try:
            spent = await asked.spent
        except BaseException:
            release_unseen(messages)
            raise
        if self._stopped:
            release_unseen(messages)
            return []
        now_s = self._clock()
        # A SPEND that came after the end of the lease may not have counted: another consumer may have the message.
        return [
            each
            for each in messages
            if (each._lease.spending is None or each in spent)
            and each._expiry_s > now_s
            and each.offset in each._lease.open
        ]

    async def stop(self) -> None:
        """Stop spending; waiting callers receive no messages."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            # A task that is cancelled before its first step answers nobody.
            self._end(set())

    async def _run(self) -> None:
        """Write until no caller waits. Callers of the same turn of the event loop share the first write."""
        end: set[Message] | Exception = set()
        try:
            while self._waiting:
                self._writing, self._waiting = self._waiting, []
                spent = await self._written([each for asked in self._writing for each in asked.messages])
                _answer(self._writing, spent)
        except Exception as error:
            # An unavailable broker is retried; anything else ends the calls that wait.
            end = error
        finally:
            self._end(end)

    def _end(self, answer: set[Message] | Exception) -> None:
        left, self._writing, self._waiting, self._task = [*self._writing, *self._waiting], [], [], None
        _answer(left, answer)

    async def _written(self, messages: Sequence[Message]) -> set[Message]:
        """Write SPEND markers until they are durable, or all leases are over; return the messages that are spent."""
        while live := self._live(messages):
            left_s = min([message._expiry_s for message in live]) - self._clock()
            try:
                await self._writer.write(list(self._records(live)), max(left_s, RETRY_S))
                return set(live)
            except BrokerUnavailable as error:
                # The marker may have been written. Spending a message twice has the same effect as spending it once.
                log.warning("messages not handed out: messages=%d error=%s", len(live), error)
            await self._sleep(RETRY_S)
        return set()

    def _live(self, messages: Sequence[Message]) -> list[Message]:
        now_s = self._clock()
        return [
            each
            for each in messages
            if each._lease.spending is not None and each.offset in each._lease.open and each._expiry_s > now_s
        ]

    def _records(self, messages: Sequence[Message]) -> Iterator[MarkerRecord]:
        lanes: dict[tuple[str, int, Source], list[int]] = {}
        for message in messages:
            lease = message._lease
            lanes.setdefault((lease.queue, lease.holder, lease.source), []).append(message.offset)
        for (queue, holder, source), offsets in lanes.items():
            batch = Spend(queue, holder, source, sorted(offsets), self._settings.lease_of(queue))
            yield MarkerRecord(markers_partition(*source, self._settings.markers_partitions), encode(batch))


def _answer(asked: Iterable[_Asked], answer: set[Message] | Exception) -> None:
    for each in asked:
        if each.spent.done():
            continue
        if isinstance(answer, Exception):
            each.spent.set_exception(answer)
        else:
            each.spent.set_result(answer)


def release_unseen(messages: Iterable[Message]) -> None:
    """Release messages that user code has not seen; the attempt does not count."""
    for message in messages:
        if message.offset in message._lease.open:
            message._lease.release(message.offset, 0, counted=False)
