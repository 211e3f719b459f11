"""The starts of handlers in the log: what a tracker has to know if this process dies.

:class:`Starts` writes two markers, both for messages that user code is about to see or has:

* DISPATCH, for queues that deliver at most once: written right before user code sees a message, never for prefetched
  ones. A crash before it is durable loses nothing, because the tracker redelivers the message. A crash after that
  abandons the message.
* RENEW with ``started``, for all other queues: the attempt counts if the lease expires. Prefetched messages have no
  start, so a process that dies uses up no attempt of theirs. Handlers that return soon cost nothing: the start is
  written only when user code has had the message for :data:`NOTED_AFTER_S`. That of a suspect, a message whose previous
  lease has expired, is written before user code sees it. So no message can end its process again and again without
  using up its attempts.

This is part of step 4 of :mod:`marq.consumer.receiver`. Concurrent callers share a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from math import ceil

from marq.client.background import Time, failure_of
from marq.consumer.prefetch import Prefetch, SuspectTurn
from marq.consumer.writer import Listener
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter, marker_records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Dispatch, Renew, Source
from marq.wire.record_headers import expired

#: Pause between two attempts to write a marker.
RETRY_S = 0.2
#: How long user code has had a message before its start is written.
NOTED_AFTER_S = 0.1


def is_suspect(message: Message) -> bool:
    """Return whether the previous lease of a message has expired: its handler may have ended the process."""
    return not message._batch.at_most_once and expired(message._record.headers) > 0


def turn_of(suspect: Message, max_attempts: int) -> SuspectTurn:
    """Return when a suspect runs.

    Its last attempt is always alone: otherwise suspects would use up their last attempts together whenever one of them
    ends the process.
    """
    if suspect.attempt >= max_attempts:
        return SuspectTurn.ALONE
    return SuspectTurn.TOGETHER if suspect.attempt == 1 else SuspectTurn.GROUPED


class _StartBatch:
    """Messages whose starts are written together, and those of them whose start is durable."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.started: asyncio.Future[set[Message]] = asyncio.get_running_loop().create_future()


class Starts:
    """Writes the starts of one consumer's messages; ``listener`` learns if it cannot go on."""

    def __init__(
        self,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        prefetch: Prefetch,
        time: Time,
        listener: Listener,
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._prefetch = prefetch
        self._listener = listener
        self._clock, self._sleep = time.now_s, time.sleep
        #: The batch that is being written, then the one that callers add to.
        self._batches: list[_StartBatch] = []
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        #: Messages that calls have returned since the last look, and those whose starts are noted next.
        self._returned: list[Message] = []
        self._noting: list[Message] = []
        self._stopped = False
        self._not_written = RepeatedWarning("starts of handlers not written: messages=%d error=%s")

    def begin(self) -> None:
        """Write the starts of messages that user code has for a while."""
        if not self._settings.prefetch:
            # Their attempts count from the beginning.
            return
        self._watch = asyncio.create_task(self._note(), name="marq-starts")
        self._watch.add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if (error := failure_of(task, stopping=self._stopped)) is not None:
            self._listener.fail(error)

    def returned(self, messages: Sequence[Message]) -> None:
        """Note that a call returns messages to user code."""
        if self._watch is not None:
            self._returned += messages
            self._prefetch.taken.set()

    async def started(self, messages: list[Message]) -> list[Message]:
        """Return the messages that user code may see now, in their order.

        Returns all of them without waiting, unless the start of one has to be written first.
        """
        if any(message._batch.starts_first for message in messages):
            return await self.start(messages)
        return messages

    async def start(self, messages: Sequence[Message]) -> list[Message]:
        """Write the starts that must come first, and return all messages that user code may see now.

        Messages whose leases have ended are left out, because another consumer may have them. If the call is cancelled,
        or the consumer stops, the messages are released and the attempt does not count: user code never saw them.
        """
        if self._stopped:
            put_back(messages)
            return []
        try:
            written = await asyncio.shield(self._add(messages).started)
        except BaseException:
            put_back(messages)
            raise
        if self._stopped:
            put_back(messages)
            return []
        now_s = self._clock()
        # A marker after the end of the lease may not have counted: another consumer may have the message.
        return [
            message
            for message in messages
            if (message in written or not _comes_first(message)) and is_leased(message, now_s)
        ]

    async def stop(self) -> None:
        """Write no more starts; waiting callers receive no messages."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            # A task that is cancelled before its first step never answers its callers.
            self._end(None)

    async def end(self, limit_s: float) -> None:
        """Write the starts of messages that stay leased after a stop, because calls have returned them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            await self._write_late([*self._noting, *self._returned], limit_s)

    # --- starts that come first ---------------------------------------------------------------------------------------

    def _add(self, messages: Sequence[Message]) -> _StartBatch:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="marq-start")
            self._batches = [_StartBatch()]
        batch = self._batches[-1]
        batch.messages += messages
        return batch

    async def _run(self) -> None:
        """Write until no caller is waiting. Callers in the same iteration of the event loop share the first write."""
        failure: Exception | None = None
        try:
            while self._batches[0].messages:
                batch = self._batches[0]
                self._batches.append(_StartBatch())
                batch.started.set_result(await self._written(batch.messages))
                del self._batches[0]
        except Exception as error:
            # An unavailable broker is retried; any other error is raised to the callers.
            failure = error
        finally:
            self._end(failure)

    def _end(self, failure: Exception | None) -> None:
        batches, self._batches, self._task = self._batches, [], None
        for batch in batches:
            if batch.started.done():
                continue
            if failure is not None and batch.messages:
                batch.started.set_exception(failure)
            else:
                batch.started.set_result(set())

    async def _written(self, messages: Sequence[Message]) -> set[Message]:
        """Write starts until they are durable or all leases have ended; return the messages whose starts are."""
        first = [message for message in messages if _comes_first(message)]
        while live := self._live(first):
            left_s = min([message._expiry_s for message in live]) - self._clock()
            try:
                await self._write(live, max(left_s, RETRY_S))
                return set(live)
            except BrokerUnavailable as error:
                # The marker may have been written. A second one for the same message changes nothing.
                self._not_written.write(self._clock(), len(live), error)
            await self._sleep(RETRY_S)
        return set()

    def _live(self, messages: Sequence[Message]) -> list[Message]:
        now_s = self._clock()
        return [message for message in messages if is_leased(message, now_s)]

    # --- starts that may come late ------------------------------------------------------------------------------------

    async def _note(self) -> None:
        """Write the starts of messages that user code has had for a while."""
        while True:
            self._prefetch.taken.clear()
            if not self._returned and not any(map(_lacks_start, self._running())):
                await self._prefetch.taken.wait()
            before, self._noting, self._returned = set(self._running()), self._returned, []
            await self._sleep(NOTED_AFTER_S)
            late = [*[message for message in self._running() if message in before], *self._noting]
            await self._write_late(late, self._settings.default_lease_ms / 3000)
            self._noting = []

    def _running(self) -> list[Message]:
        return [message for pool in self._prefetch.pools for message in pool.running]

    async def _write_late(self, messages: Sequence[Message], limit_s: float) -> None:
        now_s = self._clock()
        # Each once: during an outage, messages of handlers come again and again.
        late = list(
            dict.fromkeys([message for message in messages if _lacks_start(message) and is_leased(message, now_s)])
        )
        for message in late:
            message._batch.note_unconfirmed_start(message._offset)
        try:
            if late:
                await self._write(late, limit_s)
        except BrokerUnavailable as error:
            self._not_written.write(self._clock(), len(late), error)
            # Those of handlers are found again.
            self._returned += late

    # --- the markers --------------------------------------------------------------------------------------------------

    async def _write(self, messages: Sequence[Message], limit_s: float) -> None:
        """Write the starts of messages, and note that they are durable."""
        started = [(message._batch, message._offset) for message in messages]
        await self._writer.write(list(self._records(messages)), limit_s)
        for batch, offset in started:
            batch.note_start(offset)

    def _records(self, messages: Sequence[Message]) -> Iterator[MarkerRecord]:
        now_s = self._clock()
        groups: dict[tuple[str, int, Source, bool], list[Message]] = {}
        for message in messages:
            batch = message._batch
            groups.setdefault((batch.queue, batch.holder, batch.source, batch.at_most_once), []).append(message)
        for (queue, holder, source, at_most_once), group in groups.items():
            expiries_s = [message._expiry_s for message in group]
            offsets = sorted({message.offset for message in group})
            # The shortest: longer leases stay as they are, and a longer start would hide the other messages for that
            # time if this process died.
            left_ms = ceil((min(expiries_s) - now_s) * 1000)
            marker: Dispatch | Renew = Renew(queue, holder, source, offsets, max(left_ms, 0), started=True)
            if at_most_once:
                marker = Dispatch(queue, holder, source, offsets, self._settings.lease_of(queue))
            yield from marker_records(marker, self._settings.markers_partitions, self._settings.limit_bytes)


def _lacks_start(message: Message) -> bool:
    """Return whether a message is open, and its attempt would not count if its lease expired."""
    batch, offset = message._batch, message._offset
    return offset in batch.open and offset not in batch.decided and not (batch.at_most_once or offset in batch.started)


def _comes_first(message: Message) -> bool:
    """Return whether user code may see a message only when its start is durable."""
    batch = message._batch
    return batch.at_most_once or (batch.starts_first and is_suspect(message))


def still_leased(messages: Sequence[Message], now_s: float) -> list[Message]:
    """Return the messages whose leases have not ended before their renewal was confirmed; release the others.

    The tracker may have renewed those, too. They would stay hidden, and then count an attempt that no program saw.
    """
    for message in messages:
        if not is_leased(message, now_s):
            message._batch.release(message._offset, 0, counted=False)
    return [message for message in messages if is_leased(message, now_s)]


def is_leased(message: Message, now_s: float) -> bool:
    return message._expiry_s > now_s and message.offset in message._batch.open
