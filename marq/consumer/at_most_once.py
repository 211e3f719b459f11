"""At-most-once delivery: a message is dispatched right before user code sees it, and never earlier.

This is part of step 4 of :mod:`marq.consumer.receiver`. :func:`dispatched` writes a DISPATCH marker for messages taken
from a prefetch buffer, waits until it is durable, and returns the messages whose leases have not ended by then.
Concurrent callers share a write.

A crash before the marker is durable loses nothing, because the tracker redelivers the message. A crash after that
abandons the message. So a crash only abandons messages whose handlers are running or about to start, never prefetched
ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import ceil

from marq.consumer.message import Message
from marq.consumer.receiver_settings import ReceiverSettings
from marq.consumer.repeated_warnings import RepeatedWarning
from marq.consumer.settlement import put_back
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter, marker_records
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Dispatch, Source

#: Pause between two attempts to write a DISPATCH marker.
RETRY_S = 0.2


async def dispatched(messages: list[Message]) -> list[Message]:
    """Return the messages that user code may see now, in their order.

    Returns all of them without waiting, unless one is from a queue that delivers at most once.
    """
    for message in messages:
        if message._held.at_most_once is not None:
            return await message._held.at_most_once.dispatch(messages)
    return messages


class _Batch:
    """Messages that are dispatched by one write, and those of them whose DISPATCH is durable."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.dispatched: asyncio.Future[set[Message]] = asyncio.get_running_loop().create_future()


class AtMostOnce:
    """Writes the DISPATCH markers of one consumer, one batch at a time."""

    def __init__(
        self,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        #: The batch that is being written, then the one that callers add to.
        self._batches: list[_Batch] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._not_dispatched = RepeatedWarning("messages not dispatched: messages=%d error=%s")

    async def dispatch(self, messages: Sequence[Message]) -> list[Message]:
        """Dispatch the messages that are delivered at most once, and return all that user code may see now.

        Messages whose leases have ended are left out, because another consumer may have them. If the call is cancelled,
        or the consumer stops, the messages are released and the attempt does not count: user code never saw them.
        """
        if self._stopped:
            put_back(messages)
            return []
        try:
            written = await asyncio.shield(self._add(messages).dispatched)
        except BaseException:
            put_back(messages)
            raise
        if self._stopped:
            put_back(messages)
            return []
        now_s = self._clock()
        # A DISPATCH after the end of the lease may not have counted: another consumer may have the message.
        return [
            message
            for message in messages
            if (message._held.at_most_once is None or message in written) and is_leased(message, now_s)
        ]

    async def stop(self) -> None:
        """Stop dispatching; waiting callers receive no messages."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            # A task that is cancelled before its first step never answers its callers.
            self._end(None)

    def _add(self, messages: Sequence[Message]) -> _Batch:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="marq-dispatch")
            self._batches = [_Batch()]
        batch = self._batches[-1]
        batch.messages += messages
        return batch

    async def _run(self) -> None:
        """Write until no caller is waiting. Callers in the same iteration of the event loop share the first write."""
        failure: Exception | None = None
        try:
            while self._batches[0].messages:
                batch = self._batches[0]
                self._batches.append(_Batch())
                batch.dispatched.set_result(await self._written(batch.messages))
                del self._batches[0]
        except Exception as error:
            # An unavailable broker is retried; any other error is raised to the callers.
            failure = error
        finally:
            self._end(failure)

    def _end(self, failure: Exception | None) -> None:
        batches, self._batches, self._task = self._batches, [], None
        for batch in batches:
            if batch.dispatched.done():
                continue
            if failure is not None and batch.messages:
                batch.dispatched.set_exception(failure)
            else:
                batch.dispatched.set_result(set())

    async def _written(self, messages: Sequence[Message]) -> set[Message]:
        """Write DISPATCH markers until they are durable or all leases have ended; return the dispatched messages."""
        while live := self._live(messages):
            left_s = min([message._expiry_s for message in live]) - self._clock()
            try:
                await self._writer.write(list(self._records(live)), max(left_s, RETRY_S))
                return set(live)
            except BrokerUnavailable as error:
                # The marker may have been written. A second DISPATCH of a message changes nothing.
                self._not_dispatched.write(self._clock(), len(live), error)
            await self._sleep(RETRY_S)
        return set()

    def _live(self, messages: Sequence[Message]) -> list[Message]:
        now_s = self._clock()
        return [each for each in messages if each._held.at_most_once is not None and is_leased(each, now_s)]

    def _records(self, messages: Sequence[Message]) -> Iterator[MarkerRecord]:
        now_s = self._clock()
        groups: dict[tuple[str, int, Source], list[Message]] = {}
        for message in messages:
            held = message._held
            groups.setdefault((held.queue, held.holder, held.source), []).append(message)
        for (queue, holder, source), group in groups.items():
            # Never shorter than what is left of the lease: this consumer counts on that, even if the queue's lease has
            # become shorter.
            left_ms = ceil((max([message._expiry_s for message in group]) - now_s) * 1000)
            lease_ms = max(self._settings.lease_of(queue), left_ms)
            batch = Dispatch(queue, holder, source, sorted([message.offset for message in group]), lease_ms)
            yield from marker_records(batch, self._settings.markers_partitions, self._settings.limit_bytes)


def still_leased(messages: Sequence[Message], now_s: float) -> list[Message]:
    """Return the messages whose leases have not ended before their renewal was confirmed; release the others.

    The tracker may have renewed those, too. They would stay hidden, and then count an attempt that no program saw.
    """
    for message in messages:
        if not is_leased(message, now_s):
            message._held.release(message._offset, 0, counted=False)
    return [message for message in messages if is_leased(message, now_s)]


def is_leased(message: Message, now_s: float) -> bool:
    return message._expiry_s > now_s and message.offset in message._held.open
