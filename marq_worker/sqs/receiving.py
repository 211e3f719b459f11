"""Receives messages for polls: one consumer per queue, which all polls of this endpoint share.

The consumers of a queue's endpoints are one Kafka group, so a message may be in a partition of another endpoint. While
polls wait here, this endpoint asks the others on their behalf (:mod:`marq_worker.sqs.peers`). So a poll finds each
message, whichever endpoint a load balancer chose.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

from marq.client.background import until_set
from marq.leases.message import Message
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.sqs.deleted_messages import DeletedMessages
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.outcomes import Outcomes, SettleRequest
from marq_worker.sqs.peers import Peers
from marq_worker.sqs.polling import PolledConsumer

log = logging.getLogger("marq.sqs")

#: The endpoint leaves a queue that was not polled for this long, so that others get its partitions.
IDLE_S = 300.0
#: Pause before another attempt to receive a queue's messages.
RETRY_S = 1.0
#: Least time for which a poll looks for messages, because they are acquired only when a poll asks; the second number is
#: for polls whose consumer has not joined its group yet.
SHORT_POLL_S, FIRST_POLL_S = 0.5, 1.5
#: How long a poll waits for its consumer to join. By default, brokers let a new group wait for 3 s.
JOIN_S = 8.0
#: Polls of at least this length end together, at the next multiple of the second number: waking up for each of them
#: costs more than the rest of an idle poll.
LONG_POLL_S, TOGETHER_S = 5.0, 0.5
#: Maximum number of messages to ask another endpoint for, and how long they may wait here while all polls are busy.
MAX_ASKED, MAX_WAIT_S = 100, 1.0
#: How long a stop waits for polls that cannot renew leases, and then for releases. It outlasts a short outage of the
#: brokers: a message that was not released counts as received when its lease ends, although no client has seen it.
STOP_S = 4.0
#: An answer to another endpoint ends with the message that reaches this size. The others stay in the consumer's buffer,
#: because the tracker would have to write each released message again.
MAX_ANSWER_BYTES = 4 << 20


def end_of_poll_s(now_s: float, wait_s: float) -> float:
    """Return when a poll without messages ends."""
    until_s = now_s + wait_s
    return until_s if wait_s < LONG_POLL_S else ceil(until_s / TOGETHER_S) * TOGETHER_S


def _end_waits(limits: Iterable[asyncio.Timeout]) -> None:
    """End these waits now."""
    now_s = asyncio.get_running_loop().time()
    for limit in limits:
        limit.reschedule(now_s)


class QueueReceiver:
    """Receives the messages of one queue."""

    #: Whether it keeps messages until they are settled.
    keeps = False

    def __init__(self, queue: str, client: ClientSettings, url: str, outcomes: Outcomes, peers: Peers) -> None:
        self._queue = queue
        self._client = client
        self._url = url
        self._outcomes = outcomes
        self._peers = peers
        self.deleted = DeletedMessages()
        #: Polls that wait now, how many messages they want, and when the last one ended.
        self._polls = self._wanted = 0
        #: Polls on behalf of other endpoints.
        self._peer_polls = 0
        self._poll_ended = asyncio.Event()
        #: The time limit of each waiting poll, and whether the poll may return other endpoints' messages. Moving a
        #: limit to the present wakes its poll.
        self._waiting: dict[asyncio.Timeout, bool] = {}
        self._idle_since_s = asyncio.get_running_loop().time()
        #: Messages that other endpoints sent and that no poll has taken yet.
        self._foreign: deque[SqsDelivery] = deque()
        self._asking: dict[str, asyncio.Task[None]] = {}
        #: Tasks that release or end messages.
        self._settling: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._consumer: PolledConsumer | None = None
        self._started = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(), name=f"marq-sqs-{queue}")

    @property
    def idle_s(self) -> float:
        """For how long no poll has waited."""
        return 0.0 if self._polls else asyncio.get_running_loop().time() - self._idle_since_s

    async def poll(self, most: int, wait_s: float) -> list[SqsDelivery]:
        """Return up to ``most`` messages as soon as any are available, or [] after ``wait_s``.

        A wait shorter than SHORT_POLL_S is extended to it.
        """
        self._polls += 1
        self._wanted += most
        try:
            return await self._poll(most, wait_s, alone=False)
        finally:
            self._polls -= 1
            self._wanted -= most
            self._poll_ended.set()
            self._idle_since_s = asyncio.get_running_loop().time()
            # This poll may have been woken for another endpoint's message and then cancelled.
            self._offer_foreign()

    async def poll_for_peer(self, most: int, wait_s: float) -> list[SqsDelivery]:
        """Poll for another endpoint, without asking further ones; limit the size."""
        self._peer_polls += 1
        try:
            return await self._poll(most, wait_s, alone=True)
        finally:
            self._peer_polls -= 1
            self._poll_ended.set()

    def release(self, deliveries: Sequence[SqsDelivery]) -> None:
        """Release messages that no client has seen, in the background; their attempts do not count."""
        if deliveries:
            self._in_background(self._release(deliveries))

    def _in_background(self, settling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(settling)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _release(self, deliveries: Sequence[SqsDelivery]) -> None:
        try:
            await self._outcomes.release(deliveries, counted=False)
        except (MarqError, SqsError) as error:
            log.warning(
                "queue %r: %d messages were not released, their leases will expire: %s",
                self._queue, len(deliveries), error,
            )  # fmt: skip

    async def end_polls(self) -> None:
        """Answer the waiting polls; wait up to STOP_S for those that renew leases."""
        self._stopping = True
        _end_waits([limit for limit in self._waiting if not limit.expired()])
        clock = asyncio.get_running_loop().time
        until_s = clock() + STOP_S
        while self._polls + self._peer_polls and (left_s := until_s - clock()) > 0:
            self._poll_ended.clear()
            await until_set(self._poll_ended, left_s, asyncio.sleep)

    async def stop(self) -> None:
        """Answer the polls, release the messages that no client has received, and leave the group."""
        await self.end_polls()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        until_s = asyncio.get_running_loop().time() + STOP_S
        # Another endpoint may already have answered. If this closed the connection now, no client would receive those
        # messages before their leases end.
        await self._ended(self._asking.values(), until_s)
        for task in self._asking.values():
            task.cancel()
        self._release_foreign(self._foreign)
        # Before the consumer stops: while it has the messages of a FIFO queue, releases need not ask a tracker.
        await self._ended(self._settling, until_s)
        if self._consumer is not None:
            with suppress(MarqError):
                await self._consumer.put_back(max(0.0, until_s - asyncio.get_running_loop().time()))
            await self._consumer.stop()

    async def _ended(self, tasks: Iterable[asyncio.Task[None]], until_s: float) -> None:
        """Wait for tasks, but only until this time."""
        if waited := list(tasks):
            await asyncio.wait(waited, timeout=max(0.0, until_s - asyncio.get_running_loop().time()))

    # --- what differs for FIFO queues ---------------------------------------------------------------------------------

    def _new_consumer(self) -> PolledConsumer:
        return PolledConsumer(self._queue, self._client, self._url)

    async def _receive(self, consumer: PolledConsumer, most: int, max_bytes: int | None) -> list[SqsDelivery]:
        """Return messages of the consumer. Raises MarqError if it can no longer receive."""
        return [self._delivery(message, consumer) for message in await consumer.poll(most, max_bytes=max_bytes)]

    def _delivery(self, message: Message, consumer: PolledConsumer) -> SqsDelivery:
        return SqsDelivery.of(message, consumer)

    def _check(self) -> None:
        """Do periodic work."""

    async def settle(self, outcome: SettleRequest) -> bool:
        """Settle a message that is kept here; return False if this delivery is not."""
        return False

    # --- the consumer -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Start a consumer, and another one after an error that ends it."""
        failing = False
        while True:
            self._consumer = consumer = self._new_consumer()
            try:
                await consumer.start()
                self._started.set()
                failing = False
                while consumer.error is None:
                    self._check()
                    if self._polls:
                        self._ask_others()
                    await asyncio.sleep(RETRY_S)
                raise consumer.error
            except MarqError as error:
                if not failing:
                    log.warning("queue %r: receiving failed, retrying: %s", self._queue, error)
                failing = True
            except Exception:
                log.exception("queue %r: receiving failed with an unexpected error, retrying", self._queue)
            self._started.clear()
            await consumer.stop()
            await asyncio.sleep(RETRY_S)

    async def _poll(self, most: int, wait_s: float, *, alone: bool) -> list[SqsDelivery]:
        clock = asyncio.get_running_loop().time
        joined_s = clock()
        joins = not self._started.is_set()
        until_s = end_of_poll_s(joined_s, max(wait_s, FIRST_POLL_S if joins else SHORT_POLL_S))
        # Even a short poll waits. Otherwise, each poll of a client that rarely polls would end during the join.
        join_s = joined_s + JOIN_S
        while not self._stopping:
            if deliveries := await self._take(most, alone=alone):
                return deliveries
            if self._foreign and not alone:
                # Other endpoints' messages arrived while the consumer renewed leases.
                continue
            if joins and self._started.is_set():
                joins, until_s = False, max(until_s, clock() + SHORT_POLL_S)
            left_s = max(until_s, join_s if joins else 0.0) - clock()
            if left_s <= 0 or self._stopping:
                break
            if not alone:
                self._ask_others()
            consumer = self._consumer
            if consumer is None or not self._started.is_set():
                await self._wait(self._started.wait(), min(left_s, RETRY_S), alone=alone)
            elif consumer.error is None:
                await self._wait(consumer.wait(most, left_s), left_s, alone=alone)
            else:
                # Another consumer is about to start.
                await self._wait(asyncio.sleep(RETRY_S), left_s, alone=alone)
        return []

    async def _wait(self, waiting: Awaitable[object], limit_s: float, *, alone: bool) -> None:
        """Wait up to ``limit_s``; another endpoint's message also ends the wait of a client's poll."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                self._waiting[limit] = not alone
                try:
                    await waiting
                finally:
                    self._waiting.pop(limit, None)
        except TimeoutError:
            return
        except MarqError:
            # The consumer was stopped meanwhile.
            await asyncio.sleep(min(limit_s, RETRY_S))

    def _wake(self, count: int) -> None:
        """Wake the client polls that have waited longest."""
        clients = (limit for limit, of_client in self._waiting.items() if of_client and not limit.expired())
        _end_waits(list(islice(clients, count)))

    async def _take(self, most: int, *, alone: bool) -> list[SqsDelivery]:
        """Return available messages whose leases have not ended; end those that were deleted meanwhile."""
        deliveries: list[SqsDelivery] = []
        consumer = self._consumer
        if self._foreign and not alone:
            # Return them at once: the consumer may have to renew leases first, and a later poll gets its messages.
            deliveries = [self._foreign.popleft() for _ in range(min(most, len(self._foreign)))]
        elif consumer is not None and self._started.is_set():
            # _serve() logs why a consumer fails.
            with suppress(MarqError):
                deliveries = await self._receive(consumer, most, MAX_ANSWER_BYTES if alone else None)
        # Most of these releases have no effect. If one has, the attempt does not count: no client saw the message.
        ended = [delivery for delivery in deliveries if not delivery.is_leased]
        self.release(ended)
        deliveries = [delivery for delivery in deliveries if delivery not in ended]
        late = [delivery for delivery in deliveries if self.deleted.concerns(delivery)]
        if late:
            self._in_background(self._end(late))
            deliveries = [delivery for delivery in deliveries if delivery not in late]
        return deliveries

    async def _end(self, deliveries: Sequence[SqsDelivery]) -> None:
        """Delete redeliveries of deleted messages; if that fails, the next redelivery is deleted."""
        try:
            await self._outcomes.ack(deliveries)
        except (MarqError, SqsError) as error:
            log.info("queue %r: redeliveries of deleted messages were not deleted: %s", self._queue, error)

    # --- other endpoints ----------------------------------------------------------------------------------------------

    def _ask_others(self) -> None:
        """Ask each other endpoint with partitions of the queue, one request at a time."""
        for url in self._peers.of(self._queue):
            if url not in self._asking:
                self._asking[url] = task = asyncio.create_task(self._ask(url), name="marq-sqs-ask")
                task.add_done_callback(partial(self._asked, url))

    def _asked(self, url: str, task: asyncio.Task[None]) -> None:
        del self._asking[url]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("queue %r: the endpoint %s gave an unexpected answer: %r", self._queue, url, error)

    async def _ask(self, url: str) -> None:
        asked_s = time.monotonic()
        documents = await self._peers.ask(url, self._queue, min(max(self._wanted, 1), MAX_ASKED))
        arrived = [SqsDelivery.read(document, asked_s) for document in documents]
        if arrived:
            self._foreign.extend(arrived)
            self._offer_foreign()
            asyncio.get_running_loop().call_later(MAX_WAIT_S, self._release_foreign, arrived)

    def _offer_foreign(self) -> None:
        """Wake a poll for each message of other endpoints; release the messages if there is no poll."""
        if not self._foreign:
            # At each end of a poll: looking at all that wait would take seconds when thousands end together.
            return
        if self._polls:
            self._wake(len(self._foreign))
        else:
            self._release_foreign(self._foreign)

    def _release_foreign(self, deliveries: Iterable[SqsDelivery]) -> None:
        """Release these messages unless a poll has taken them; otherwise, they would stay hidden."""
        arrived = {id(delivery) for delivery in deliveries}
        self.release([delivery for delivery in self._foreign if id(delivery) in arrived])
        self._foreign = deque([delivery for delivery in self._foreign if id(delivery) not in arrived])


class Receivers:
    """The queues that are polled here.

    ``new_receiver`` returns the receiver of a queue, ``keeps`` whether it should keep messages until they are settled.
    """

    def __init__(
        self, new_receiver: Callable[[str], QueueReceiver], keeps: Callable[[str], bool] = lambda queue: False
    ) -> None:
        self._new_receiver, self._keeps = new_receiver, keeps
        self._receivers: dict[str, QueueReceiver] = {}
        #: Tasks that stop the dropped receivers.
        self._dropping: set[asyncio.Task[None]] = set()
        #: True once the endpoint is stopping: polls get no more messages.
        self.stopped = False

    def of(self, queue: str) -> QueueReceiver:
        """Return the receiver of a queue, a new one at its first poll. Raises SqsError if the endpoint is stopping."""
        if self.stopped:
            # Nothing would stop a new consumer, and it would keep partitions until the process ends.
            raise SqsError("ServiceUnavailable", "the endpoint is stopping; try again")
        receiver = self.known(queue)
        if receiver is None:
            if queue in self._receivers:
                # The queue's settings have changed.
                self._drop(queue)
            self._receivers[queue] = receiver = self._new_receiver(queue)
        return receiver

    def known(self, queue: str) -> QueueReceiver | None:
        """Return the receiver of a queue if it is polled, unless the queue needs another one now."""
        receiver = self._receivers.get(queue)
        return receiver if receiver is not None and receiver.keeps is self._keeps(queue) else None

    async def drop_idle(self) -> None:
        """Stop receiving from queues that are no longer polled, and stop receivers that no longer fit their queues."""
        for queue, receiver in list(self._receivers.items()):
            ends = receiver.idle_s > IDLE_S or self.known(queue) is None
            # A client may poll it by now, because each stop takes a moment.
            if ends and self._receivers.get(queue) is receiver:
                await self.drop(queue)

    async def drop(self, queue: str) -> None:
        """Stop receiving from a queue."""
        if queue in self._receivers:
            # The endpoint's stop cancels this call, but the receiver must still release its messages.
            await asyncio.shield(self._drop(queue))

    def _drop(self, queue: str) -> asyncio.Task[None]:
        dropping = asyncio.create_task(self._receivers.pop(queue).stop(), name="marq-sqs-drop")
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)
        return dropping

    async def end_polls(self) -> None:
        """Answer the waiting polls; later polls get no messages."""
        self.stopped = True
        await asyncio.gather(*[receiver.end_polls() for receiver in self._receivers.values()])

    async def stop(self) -> None:
        """Stop receiving from all queues."""
        self.stopped = True
        stopped = [receiver.stop() for receiver in self._receivers.values()]
        for error in await asyncio.gather(*stopped, *self._dropping, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("a queue's receiver was not stopped: %r", error)
        # Not earlier: until they have stopped, receivers need the outcomes of the FIFO messages that they have.
        self._receivers = {}
