"""Moves the messages of a dead-letter queue: the work of StartMessageMoveTask."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from marq.wire.errors import BrokerUnavailable, MarqError
from marq_worker.sqs.arns import queue_of_arn
from marq_worker.sqs.counts import MessageCounts
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_answers import SOURCE_HEADER
from marq_worker.sqs.outcomes import Outcomes
from marq_worker.sqs.receive_limits import OldMessages, without_old
from marq_worker.sqs.receiving import QueueReceiver, Receivers
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.tasks import CANCELLED, CANCELLING, COMPLETED, FAILED, RENEWAL_S, SKEW_S, MoveTask, QueueTasks

log = logging.getLogger("marq.sqs")

#: Maximum number of messages to move at a time.
BATCH = 100
#: Lease of a message that is being moved: longer than the time limit of its send (MARQ_REQUEST_TIMEOUT, 30 s). If the
#: endpoint dies, another one gets the message after this time.
LEASE_S = 45
#: How long a poll for messages waits, and the pause after an error of the broker.
POLL_S, RETRY_S = 1.0, 1.0
#: A move is complete when it has found nothing for this long and no message waits.
QUIET_S = 8.0
#: After this time it fails if this endpoint cannot receive the waiting messages, or does not know whether any wait.
MAX_QUIET_S = 120.0

#: Reasons of failures, as SQS names them.
NO_QUEUE, NO_SOURCE = "AWS.SimpleQueueService.NonExistentQueue", "CouldNotDetermineMessageSource"
#: Further reasons.
NOT_RECEIVED = f"The queue has messages that could not be received for {MAX_QUIET_S:g} s."
NOT_COUNTED = f"It is unknown whether the queue has more messages: they were not counted for {MAX_QUIET_S:g} s."

#: Sends a message to a queue; returns when it is durable.
Send = Callable[[str, SqsDelivery], Awaitable[Any]]


class _MoveFailed(Exception):
    """A move can't continue; its text is the reason for the client."""


class Mover:
    """Moves messages.

    Args:
        send: sends a message to its new queue.
        outcomes: deletes the moved messages.
        old_messages: deletes those that are too old.
        count: returns how many messages a queue has.
    """

    def __init__(
        self,
        tasks: QueueTasks,
        directory: Directory,
        receivers: Receivers,
        send: Send,
        outcomes: Outcomes,
        old_messages: OldMessages,
        count: Callable[[str], Awaitable[MessageCounts]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tasks
        self._directory = directory
        self._receivers = receivers
        self._send = send
        self._outcomes = outcomes
        self._old_messages = old_messages
        self._count = count
        self._clock = clock

    async def run(self, queue: str, task: MoveTask, stopping: asyncio.Event) -> None:
        """Move messages until there are none, the task is cancelled or fails, or ``stopping`` is set."""
        log.info("messages are being moved: queue=%s task=%s", queue, task.id)
        progress = _Progress(self._tasks, queue, task.id, self._clock)
        state: str | None
        reason = None
        try:
            state = await self._move(queue, task, progress, stopping)
        except _MoveFailed as failure:
            state, reason = FAILED, str(failure)
        finally:
            await progress.write()
        if state is not None:
            await self._tasks.end_move(queue, task.id, state, reason)
            log.info("the move has ended: queue=%s task=%s state=%s reason=%s", queue, task.id, state, reason)

    async def _move(self, queue: str, task: MoveTask, progress: _Progress, stopping: asyncio.Event) -> str | None:
        """Return the final state, None if the move continues later, here or at another endpoint."""
        quiet = _Quiet(self._clock())
        most = BATCH if task.rate is None else min(BATCH, task.rate)
        while not stopping.is_set():
            current = self._tasks.move(queue, task.id)
            if current is None or current.state == CANCELLING:
                return CANCELLED
            if not self._directory.exists(queue):
                raise _MoveFailed(NO_QUEUE)
            purge = self._tasks.purge(queue)
            if purge is not None and not purge.done:
                return None
            began_s = self._clock()
            receiver = self._receivers.of(queue)
            if deliveries := await receiver.poll(most, POLL_S):
                found = await self._move_batch(queue, task, receiver, deliveries, progress)
                pause_s = 0.0 if task.rate is None else len(deliveries) / task.rate - (self._clock() - began_s)
                if found:
                    quiet = _Quiet(self._clock())
                else:
                    quiet.newer, pause_s = True, max(pause_s, POLL_S)
                await _wait(stopping, pause_s)
            if await self._is_empty(queue, quiet):
                return COMPLETED
        return None

    async def _is_empty(self, queue: str, quiet: _Quiet) -> bool:
        """Return whether a queue without messages to move has none at other endpoints either.

        Raises _MoveFailed if that remains unclear for too long.
        """
        quiet_s = self._clock() - quiet.since_s
        if quiet_s < QUIET_S:
            return False
        counts = await self._count(queue)
        quiet.in_flight |= counts.in_flight > 0
        if quiet.newer or (counts.known and not counts.waiting):
            # An endpoint that died may have been moving the messages in flight. Newer ones hide whether others wait.
            return quiet_s >= LEASE_S + QUIET_S or not (quiet.newer or quiet.in_flight)
        if quiet_s > MAX_QUIET_S:
            raise _MoveFailed(NOT_RECEIVED if counts.waiting else NOT_COUNTED)
        return False

    async def _move_batch(
        self,
        queue: str,
        task: MoveTask,
        receiver: QueueReceiver,
        deliveries: Sequence[SqsDelivery],
        progress: _Progress,
    ) -> bool:
        """Move messages; return whether any of them existed when the task began."""
        attributes, newest_ms = self._directory.get(queue).attributes, task.started_ms + SKEW_S * 1000
        # Later messages stay. Otherwise, a message that fails again would be moved again and again.
        receiver.release([delivery for delivery in deliveries if delivery.sent_ms > newest_ms])
        older = [delivery for delivery in deliveries if delivery.sent_ms <= newest_ms]
        expired, rest = without_old(older, attributes)
        try:
            await self._outcomes.renew(rest, LEASE_S * 1000)
            # The previous lease applies until the renewal is durable. Once it has ended, another client may have the
            # message, and a move would duplicate it.
            receiver.release([delivery for delivery in rest if not delivery.is_leased])
            rest = [delivery for delivery in rest if delivery.is_leased]
            targets = [self._target(task, delivery) for delivery in rest]
        except SqsError as error:
            # A lease has ended, so the message is delivered again.
            receiver.release([*expired, *rest])
            log.warning("queue %r: %d messages were not moved, trying again: %s", queue, len(rest), error.message)
            await asyncio.sleep(RETRY_S)
            return True
        except BaseException:
            receiver.release([*expired, *rest])
            raise
        # First the copies, on all replicas, then the acknowledgements: a crash in between moves a message twice; in
        # the other order, it would lose it.
        outcomes = await asyncio.gather(
            *[self._send(target, delivery) for target, delivery in zip(targets, rest, strict=True)],
            return_exceptions=True,
        )
        moved = [
            delivery for delivery, outcome in zip(rest, outcomes, strict=True) if not isinstance(outcome, BaseException)
        ]
        progress.add(len(moved))
        if moved:
            await self._end(queue, self._outcomes.ack(moved))
        if expired:
            await self._end(queue, self._old_messages.delete(queue, expired))
        await progress.write_now_and_then()
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            receiver.release([delivery for delivery in rest if delivery not in moved])
            await self._judge(queue, errors)
        return bool(expired or rest)

    async def _end(self, queue: str, ending: Awaitable[None]) -> None:
        """Delete messages that were moved or are too old."""
        try:
            await ending
        except SqsError as error:
            # A lease has ended, so its message is delivered again. If it was moved, the FIFO queue drops the duplicate.
            log.info("queue %r: a message is delivered again: %s", queue, error.message)

    async def _judge(self, queue: str, errors: Sequence[BaseException]) -> None:
        """Raise the error that ends a move; wait a moment if a retry may succeed."""
        for error in errors:
            if isinstance(error, BrokerUnavailable):
                continue
            if isinstance(error, SqsError):
                raise _MoveFailed(error.message)
            if isinstance(error, MarqError):
                raise _MoveFailed(str(error))
            raise error
        log.warning("queue %r: %d messages were not moved, trying again: %s", queue, len(errors), errors[0])
        await asyncio.sleep(RETRY_S)

    def _target(self, task: MoveTask, delivery: SqsDelivery) -> str:
        """Return the queue of a message. Raises _MoveFailed if there is none."""
        target = task.destination
        if target is None:
            source = delivery.headers.get(SOURCE_HEADER)
            try:
                target = queue_of_arn((source or b"").decode("utf-8", "replace"))
            except SqsError:
                raise _MoveFailed(NO_SOURCE) from None
            if target not in task.allowed:
                # The client may not send there, or the header was not written by an endpoint.
                raise _MoveFailed(NO_SOURCE)
        if not self._directory.exists(target):
            raise _MoveFailed(NO_QUEUE)
        return target


@dataclass(slots=True)
class _Quiet:
    """A time without messages to move."""

    since_s: float
    #: Whether newer messages were received meanwhile, and whether any were in flight.
    newer: bool = False
    in_flight: bool = False


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    """Wait for this time, or until the stop."""
    if seconds > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stopping.wait()


class _Progress:
    """Writes the number of moved messages now and then."""

    def __init__(self, tasks: QueueTasks, queue: str, task_id: str, clock: Callable[[], float]) -> None:
        self._tasks = tasks
        self._queue = queue
        self._task_id = task_id
        self._clock = clock
        self._moved = 0
        self._written_s = clock()

    def add(self, moved: int) -> None:
        self._moved += moved

    async def write_now_and_then(self) -> None:
        if self._clock() - self._written_s > RENEWAL_S:
            await self.write()

    async def write(self) -> None:
        self._written_s = self._clock()
        moved, self._moved = self._moved, 0
        if moved:
            await self._tasks.count_moved(self._queue, self._task_id, moved)
