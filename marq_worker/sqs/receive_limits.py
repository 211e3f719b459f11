"""Messages that clients don't receive: too old ones, and those received more than ``maxReceiveCount`` times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError, MessageTooLarge
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.dead_letters import DeadLetterSender
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.outcomes import Outcomes
from marq_worker.sqs.sqs_queues import Directory

log = logging.getLogger("marq.sqs")

#: Time limit of a stop.
STOP_S = 2.0
#: How many polls may be answered while their old and dead messages are still being deleted or moved.
MAX_BEGUN = 100
#: Minimum lease of a message that is being moved; the default visibility timeout needs no further marker.
LEAST_LEASE_S = 30
#: Minimum time between two log lines about the old messages of a queue.
LOG_S = 60.0
#: How many messages that can't be moved to remember, and for how long; the dead-letter queue may change meanwhile.
MAX_UNMOVABLE, UNMOVABLE_S = 10_000, 3_600.0


class Divided(NamedTuple):
    """Messages to deliver, old ones to delete, and those that were received too often, to move to ``target``."""

    deliverable: list[SqsDelivery]
    old: list[SqsDelivery]
    dead: list[SqsDelivery]
    target: str


def without_old(
    deliveries: Sequence[SqsDelivery], attributes: QueueAttributes
) -> tuple[list[SqsDelivery], list[SqsDelivery]]:
    """Return the messages that are too old, and the others."""
    old = [delivery for delivery in deliveries if attributes.is_too_old(delivery.age_s)]
    return old, [delivery for delivery in deliveries if delivery not in old] if old else list(deliveries)


class OldMessages:
    """Deletes messages that are too old, and logs how many."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        #: Deleted messages since the last log line, by queue, until the next line is due.
        self._unlogged: dict[str, int] = {}

    async def delete(self, queue: str, old: Sequence[SqsDelivery]) -> None:
        """Delete messages of a queue; same errors as :class:`Outcomes`."""
        await self._outcomes.ack(old)
        if queue in self._unlogged:
            self._unlogged[queue] += len(old)
        else:
            self._log(queue, len(old))

    def stop(self) -> None:
        """Write the lines that are not due yet."""
        for queue in list(self._unlogged):
            self._log_rest(queue)
        self._unlogged.clear()

    def _log(self, queue: str, count: int) -> None:
        log.warning("messages older than MessageRetentionPeriod were deleted: queue=%s messages=%d", queue, count)
        self._unlogged[queue] = 0
        asyncio.get_running_loop().call_later(LOG_S, self._log_rest, queue)

    def _log_rest(self, queue: str) -> None:
        if count := self._unlogged.pop(queue, 0):
            self._log(queue, count)


class ReceiveLimits:
    """Deletes messages that are too old; moves those received too often to the dead-letter queue."""

    def __init__(
        self,
        directory: Directory,
        outcomes: Outcomes,
        dead_letters: DeadLetterSender,
        old_messages: OldMessages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._outcomes = outcomes
        self._dead_letters = dead_letters
        self._old_messages = old_messages
        self._clock = clock
        self._ending: set[asyncio.Task[None]] = set()
        self._stopped = False
        #: The time of the failed move, by target and message id.
        self._unmovable: OrderedDict[tuple[str, str], float] = OrderedDict()

    def divide(self, deliveries: Sequence[SqsDelivery], attributes: QueueAttributes) -> Divided:
        old, others = without_old(deliveries, attributes)
        most, target = attributes.max_receive_count, attributes.dead_letter_queue or ""
        if most is not None and not self._directory.exists(target):
            most = None
        divided = Divided([], old, [], target)
        for delivery in others:
            if most is not None and delivery.attempt > most and not self._is_unmovable(target, delivery):
                divided.dead.append(delivery)
            else:
                divided.deliverable.append(delivery)
        return divided

    async def end(self, queue: str, divided: Divided) -> None:
        """Start to delete and move messages in the background: a poll does not wait for a slow dead-letter queue.

        If that fails, the messages stay hidden until their leases end. A later poll then tries again. If MAX_BEGUN
        calls are unfinished, a poll with messages to deliver leaves the others to a later poll. A poll without such
        messages waits until its own are deleted and moved.
        """
        is_full = len(self._ending) >= MAX_BEGUN
        if not (divided.old or divided.dead) or (divided.deliverable and is_full):
            return
        ending = asyncio.create_task(self._end(queue, divided), name="marq-sqs-limits")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if is_full:
            await asyncio.shield(ending)

    async def stop(self) -> None:
        """Finish moves whose clients do not wait: a message that was copied but not deleted would be moved again."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=STOP_S)
        # Copies that are made later could not be acked.
        self._stopped = True
        self._old_messages.stop()

    def _is_unmovable(self, target: str, delivery: SqsDelivery) -> bool:
        """Return whether a move failed for good: clients get the message, as without a redrive policy."""
        tried_s = self._unmovable.get((target, delivery.id))
        return tried_s is not None and self._clock() - tried_s < UNMOVABLE_S

    def _note_unmovable(self, target: str, delivery: SqsDelivery) -> None:
        self._unmovable[target, delivery.id] = self._clock()
        self._unmovable.move_to_end((target, delivery.id))
        if len(self._unmovable) > MAX_UNMOVABLE:
            self._unmovable.popitem(last=False)

    async def _end(self, queue: str, divided: Divided) -> None:
        dead = await self._lease(queue, divided)
        try:
            if divided.old:
                await self._old_messages.delete(queue, divided.old)
        except (MarqError, SqsError) as error:
            log.warning("queue %r: %d old messages were not deleted: %s", queue, len(divided.old), error)
        for delivery in dead:
            if self._stopped:
                break
            if not delivery.is_leased:
                # Another poll may have it by now, and would copy it a second time.
                continue
            try:
                # First the copy: a crash in between leaves two dead letters instead of none.
                await self._dead_letters.move(delivery, queue, divided.target)
                await self._outcomes.ack([delivery])
            except (MarqError, SqsError) as error:
                log.warning(
                    "queue %r: a message was not moved to %r: message=%s %s", queue, divided.target, delivery.id, error
                )
                # First, because Forbidden is a ConfigError, too.
                if isinstance(error, BrokerUnavailable):
                    break
                if isinstance(error, (ConfigError, MessageTooLarge)):
                    self._note_unmovable(divided.target, delivery)
                    await self._release(delivery)

    async def _lease(self, queue: str, divided: Divided) -> Sequence[SqsDelivery]:
        """Make leases last until their messages are moved; return the messages, none if that failed."""
        until_s = time.monotonic() + LEAST_LEASE_S
        try:
            if not divided.dead or self._directory.get(queue).attributes.visibility_timeout_s >= LEAST_LEASE_S:
                return divided.dead
            await self._outcomes.renew(divided.dead, LEAST_LEASE_S * 1000)
        except (MarqError, SqsError) as error:
            log.warning(
                "queue %r: %d messages were not moved to %r: %s", queue, len(divided.dead), divided.target, error
            )
            return []
        return [delivery._replace(until_s=until_s) for delivery in divided.dead]

    async def _release(self, delivery: SqsDelivery) -> None:
        try:
            await self._outcomes.release([delivery], counted=False)
        except (MarqError, SqsError) as error:
            log.debug("a message was not released, its lease will expire: %s", error)
