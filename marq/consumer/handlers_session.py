"""The session of a worker's handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf

from marq.backend.cluster import Cluster
from marq.client.current_producer import HandlersProducer
from marq.consumer.handler_pool import HandlerPool, HandlerTasks
from marq.consumer.session import ConsumerSession
from marq.handlers.lifespan import Resources
from marq.handlers.middleware import Middleware
from marq.handlers.typed import HandlersByType
from marq.kafka.acquire_strategies import MARKED, TRANSACTIONAL
from marq.kafka.group_reader import GroupMember
from marq.kafka.queue_records import Serving
from marq.kafka.topics import Topics
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings

#: For a worker's handlers: maximum messages in flight per process, and how long a stop waits for handlers in tests.
WORKER_MAX_IN_FLIGHT, TESTS_SHUTDOWN_S = 10_000, 3.0


class HandlersSession(ConsumerSession):
    """The session of a worker's handlers: a pool for each queue, a producer for ``handler.send``, and resources.

    ``group`` is the Kafka group of a transactional session, whose reader can commit in transactions. A stop waits for
    handlers for ``shutdown_s``, or for the ``shutdown_timeout`` of their queue, but at most for ``shutdown_limit_s``.
    While it is ``quiet``, it takes no more messages, as if all queues were paused.
    """

    def __init__(
        self,
        cluster: Cluster,
        topics: Topics,
        serving: Serving,
        reader: GroupMember,
        definitions: Definitions,
        handlers: Mapping[str, HandlersByType],
        producer: HandlersProducer,
        chain: Sequence[Middleware],
        resources: Resources,
        *,
        group: str | None = None,
        instance_id: str | None = None,
        shutdown_s: float = TESTS_SHUTDOWN_S,
        shutdown_limit_s: float = inf,
        quiet: bool = False,
    ) -> None:
        self._definitions = definitions
        self._quiet = quiet
        codecs = {queue: by_type.codec for queue, by_type in handlers.items() if by_type.codec is not None}
        settings = ReceiverSettings(
            max_in_flight=WORKER_MAX_IN_FLIGHT,
            markers_partitions=topics.markers_partitions,
            limit_bytes=topics.markers_limit_bytes,
            codecs=codecs,
            queue=self._settings,
            skipped=definitions.skipped,
            partitions=lambda queue: definitions.placement(queue).reads,
        )
        how = MARKED if group is None else TRANSACTIONAL
        super().__init__(cluster, topics, serving, reader, settings, group=group, how=how, instance_id=instance_id)
        self._producer = producer
        self._handlers = handlers
        self._chain = chain
        self._resources = resources
        self._shutdown_s, self._shutdown_limit_s = shutdown_s, shutdown_limit_s

    def _settings(self, queue: str) -> QueueSettings:
        settings = self._definitions.settings(queue)
        return replace(settings, paused=True) if self._quiet else settings

    def set_quiet(self, quiet: bool) -> None:
        """Take no more messages, or take messages again."""
        self._quiet = quiet
        self.receiver.apply_pauses()

    async def connect(self) -> None:
        """Connect, and open the resources."""
        await super().connect()
        with self._producer.current():
            self.receiver.writer.state = await self._resources.open(self.receiver.fail)

    def start(self) -> None:
        super().start()
        for queue, handlers in self._handlers.items():
            concurrency = self._definitions.settings(queue).concurrency
            buffer = self.prefetch.buffers[queue]
            with self._producer.current():
                self.add(HandlerTasks(buffer, self.receiver, handlers, concurrency, chain=self._chain))

    def shutdown_s_of(self, pool: HandlerPool, shutdown_s: float) -> float:
        # As the settings are now: a change applies to processes that run already.
        own_ms = self._definitions.settings(pool.queue).shutdown_timeout_ms
        return min(shutdown_s if own_ms is None else own_ms / 1000, self._shutdown_limit_s)

    async def close(self) -> None:
        """Stop, close the resources when no handler needs them, and disconnect.

        Raises:
            MarqError: a lifespan raised.
        """
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.disconnect)
            ends.push_async_callback(self._producer.stop)
            ends.push_async_callback(self._resources.close)
            await self.unfollow()
            await self.stop(self._shutdown_s)
