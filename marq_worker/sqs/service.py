"""The SQS endpoint of a worker (role ``sqs``): its parts, from start to stop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from mode import Service

from marq.admin.purge import Extent, extent_now, purge
from marq.kafka.topics import ensure_topics, topic_id
from marq.producer.shared import SharedProducer
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings
from marq_worker.fatal_errors import or_exit
from marq_worker.message_uuids import MessageIds
from marq_worker.sqs.attributes import MAX_MESSAGE_BYTES
from marq_worker.sqs.authentication import access_keys
from marq_worker.sqs.aws_json import operations
from marq_worker.sqs.characters import is_fifo
from marq_worker.sqs.counts import QueueCounts
from marq_worker.sqs.dead_letters import DeadLetterSender
from marq_worker.sqs.fifo import FifoReceiver, KeptReceiver
from marq_worker.sqs.handles import Handles
from marq_worker.sqs.message_operations import MessageOperations
from marq_worker.sqs.move_operations import MoveOperations
from marq_worker.sqs.moving import Mover
from marq_worker.sqs.operations import Operations
from marq_worker.sqs.outcomes import Outcomes
from marq_worker.sqs.peers import Peers
from marq_worker.sqs.polling import LeaseLookup, TokenSettler
from marq_worker.sqs.queue_operations import QueueOperations
from marq_worker.sqs.receive_limits import OldMessages, ReceiveLimits
from marq_worker.sqs.receiving import QueueReceiver, Receivers
from marq_worker.sqs.server import SqsServer
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.task_runner import TaskRunner
from marq_worker.sqs.tasks import PurgeTask, QueueTasks
from marq_worker.sqs.visibility import VisibilityChanges
from marq_worker.web.addresses import reachable_name
from marq_worker.web.dashboard.groups import Groups
from marq_worker.web.sqs_metrics import CallMetrics

log = logging.getLogger("marq.sqs")

#: Room for the headers that redelivery adds and for attributes.
_HEADER_ROOM_BYTES = 16_384
#: Interval between checks for idle queues.
_IDLE_LOOK_S = 10.0


class SqsEndpoint(Service):
    """Serves the SQS API.

    Args:
        queues: the definitions, which the worker starts and stops.
        statistics: returns the statistics of all queues.
        metrics: counts the calls.
    """

    def __init__(
        self,
        settings: AppSettings,
        client: ClientSettings,
        queues: Queues,
        statistics: Callable[[], Awaitable[dict[str, Any]]],
        metrics: CallMetrics,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._client = client
        self._queues = queues
        self._counts = QueueCounts(statistics)
        self._metrics = metrics
        self._server: SqsServer | None = None

    async def on_start(self) -> None:
        await or_exit(self._start())

    async def _start(self) -> None:
        settings, client = self._settings, self._client
        # Load the model now, not at the first request; this also shows whether botocore is missing.
        operations()
        keys, secret = access_keys(settings), _secret(settings)
        topics = await ensure_topics(client)
        maximum_bytes = min(MAX_MESSAGE_BYTES, topics.messages_limit_bytes - _HEADER_ROOM_BYTES)
        url = f"http://{settings.web_host or reachable_name(settings.sqs_bind)}:{settings.sqs_port}"
        self._producer, self._settler = SharedProducer.of(client), TokenSettler(client)
        names = client.names
        self._peers = Peers(
            url, secret, lambda queue: self._queues.definitions.consumer_group(queue, names), Groups(client)
        )
        self._questions = LeaseLookup(client)
        self._outcomes = outcomes = Outcomes(
            url, self._settler, self._questions, self._peers, lambda queue: self._receivers.known(queue)
        )
        self._receivers = Receivers(partial(self._new_receiver, url), self._keeps)
        self._markers_partitions = topics.markers_partitions
        self._directory = directory = Directory(self._queues, maximum_bytes)
        self._queue_tasks = tasks = QueueTasks(self._queues)
        count = self._counts.of
        dead_letters, old_messages = DeadLetterSender(self._producer, self._queues), OldMessages(outcomes)
        self._limits = limits = ReceiveLimits(directory, outcomes, dead_letters, old_messages)
        mover = Mover(tasks, directory, self._receivers, dead_letters.move_back, outcomes, old_messages, count)
        self._runner = runner = TaskRunner(tasks, self._purge, mover.run)
        calls = Operations(
            QueueOperations(directory, tasks, runner, self._extent, count),
            MessageOperations(
                producer=self._producer,
                queues=self._queues,
                directory=directory,
                receivers=self._receivers,
                outcomes=outcomes,
                limits=limits,
                visibility=VisibilityChanges(self._settler, self._questions),
                handles=Handles(secret),
                ids=MessageIds(names.messages, await topic_id(client, names.messages)),
            ),
            MoveOperations(directory, tasks, runner, count),
            directory,
            maximum_bytes,
        )
        self._server = SqsServer(
            calls, self._receivers, self._outcomes, self._peers, keys, settings.sqs_url, self._metrics
        )
        await self._producer.start()
        await self._settler.start()
        await self._questions.start()
        self._peers.start()
        self._runner.start()
        await self._server.start(settings.sqs_bind, settings.sqs_port)
        log.info("SQS endpoint started: url=%s keys=%d", settings.sqs_url or url, len(keys))

    async def on_stop(self) -> None:
        if self._server is None:
            # A wrong setting has kept it from starting.
            return
        for parts in (
            # Polls before the server, because clients treat a closed connection as an error.
            (self._runner.stop, self._receivers.end_polls),
            (self._server.stop,),
            # Then the work that calls have started. Moves release messages, and a release is an outcome, which needs
            # the remaining parts.
            (self._limits.stop,),
            (self._receivers.stop,),
            (self._outcomes.stop,),
            (self._peers.stop,),
            (self._settler.stop, self._questions.stop, self._producer.stop),
        ):
            for error in await asyncio.gather(*[stop() for stop in parts], return_exceptions=True):
                if isinstance(error, BaseException):
                    # Continue, because the other parts still have outcomes to write.
                    log.error("a part of the SQS endpoint was not stopped: %r", error)

    def _keeps(self, queue: str) -> bool:
        """Return whether the endpoint keeps the messages of a queue until they are settled."""
        return is_fifo(queue) or self._queues.definitions.settings(queue).by_key

    def _new_receiver(self, url: str, queue: str) -> QueueReceiver:
        kind = FifoReceiver if is_fifo(queue) else KeptReceiver if self._keeps(queue) else QueueReceiver
        return kind(queue, self._client, url, self._outcomes, self._peers)

    @Service.task
    async def _drop_idle(self) -> None:
        while not self.should_stop:
            await self.sleep(_IDLE_LOOK_S)
            await self._receivers.drop_idle()

    async def _extent(self, queue: str) -> str:
        """Return which messages a queue has now."""
        # Delayed messages are compared by time only, with this machine's clock.
        clocks = dict.fromkeys(range(self._markers_partitions), round(time.time() * 1000))
        return str(await extent_now(self._client, self._queues.definitions, queue, clocks))

    async def _purge(self, queue: str, task: PurgeTask) -> None:
        """End the messages of a queue; delete the queue if the task says so."""
        if task.deletes:
            await self._receivers.drop(queue)
        purged = await purge(
            self._client,
            queue,
            delayed=True,
            in_flight=True,
            extent=None if task.extent is None else Extent.parse(task.extent),
        )
        log.info("queue purged: queue=%s messages=%d deleted=%s", queue, purged.total, task.deletes)
        if not task.deletes:
            await self._queue_tasks.end_purge(queue, task)
            return
        # In this order: after a crash in between, another endpoint purges and deletes the queue again.
        await self._directory.forget(queue, task.requested_s)
        await self._queue_tasks.forget(queue)


def _secret(settings: AppSettings) -> bytes:
    """Return the secret that all endpoints of the namespace share. Raises ConfigError."""
    if settings.sqs_secret is not None:
        return settings.sqs_secret.get_secret_value().encode()
    if settings.sqs_keys is not None:
        raise ConfigError(
            "MARQ_SQS_SECRET is missing: with access keys, receipt handles need a secret that clients do not know."
            " Set it to at least 16 random characters, the same for all endpoints"
        )
    # Clients of an endpoint without keys may do anything with its queues.
    return hashlib.sha256(f"marq sqs {settings.prefix}".encode()).digest()
