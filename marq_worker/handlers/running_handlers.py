"""The running handlers of one group of queues, in a process of their own (app/handlers_app.py).

They run the same session as :class:`marq.Consumer`, with the same reader. They differ in who writes the ACQUIREs: the
queue consumer agent (agents/queue_consumer.py).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from marq.backend.cluster import KafkaCluster
from marq.client.current_producer import HandlersProducer
from marq.consumer.session import STOP_CLIENT_S, HandlersSession
from marq.handlers.lifespan import Resources, lifespans_in
from marq.handlers.middleware import middleware_in
from marq.kafka.group_reader import GroupReader
from marq.kafka.queue_positions import check_room
from marq.kafka.queue_records import Serving
from marq.kafka.topics import Topics
from marq.leases.message import Message
from marq.producer.producer import Producer
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import MarqError
from marq_worker import busy_keys
from marq_worker.handlers.handler_groups import HandlerGroup, check_transactional
from marq_worker.handlers.loaded_handlers import load_handlers, modules_around
from marq_worker.redaction import Redaction

log = logging.getLogger("marq.handlers")

#: Running handlers to tell of one process.
MAX_CALLS = 100
#: How often to look for busy keys, and for how many times as long as a look took to pause at least.
KEYS_S, KEYS_PAUSE = 5.0, 50
#: How long to try to join the group. The topics are checked before, so only an outage or a slow member takes long, and
#: a new process would wait for the same.
JOIN_LIMIT_MS = 24 * 3600 * 1000
#: A member learns of a rebalance with its next heartbeat, and the others receive nothing until all have joined again.
HEARTBEAT_MS = 500


class RunningHandlers:
    """Handlers of one group: call :meth:`start`, :meth:`join`, :meth:`run` and :meth:`stop` in this order."""

    def __init__(self, group: HandlerGroup, redaction: Redaction | None = None) -> None:
        self.group = group
        self._redaction = redaction or Redaction()
        #: The last answer of :attr:`keys`, and when to look again.
        self._keys: dict[str, Any] = {}
        self._keys_until_s = 0.0
        #: All values that the setting ``key`` of each queue has had.
        self._key_settings: dict[str, set[str]] = {}
        self.session: HandlersSession | None = None
        self.reader: GroupReader | None = None
        self.quiet = False
        self._joining: asyncio.Task[None] | None = None
        #: Returns what to read now.
        self._wanted: Callable[[], Serving]

    async def start(
        self,
        client: ClientSettings,
        acquirer: Callable[[Any], Any],
        topics: Topics,
        definitions: Definitions,
        instance_id: str | None,
        shutdown_s: float,
        shutdown_limit_s: float,
    ) -> None:
        """Load the handlers and connect.

        ``acquirer`` is that of :class:`marq.backend.cluster.KafkaCluster`; the time limits of a stop are those of
        :class:`marq.consumer.session.HandlersSession`.
        """
        group = self.group
        check_room(group.name, group.queues)
        check_transactional(group, definitions)
        handlers = load_handlers(group)
        self._wanted = functools.partial(group.serving, client.names.messages, handlers, definitions)
        served = self._wanted()
        name = client.names.named_group(group.name)
        patient = replace(client, connect_timeout_ms=JOIN_LIMIT_MS)
        self.reader = reader = GroupReader(
            patient,
            name,
            served,
            instance_id=instance_id,
            committed=group.transactional,
            heartbeat_ms=HEARTBEAT_MS,
        )
        modules = modules_around(group, handlers)
        chain, resources = middleware_in(*modules), Resources(lifespans_in(*modules))
        producer = HandlersProducer(functools.partial(Producer.of, client))
        session = HandlersSession(
            KafkaCluster(client, acquirer),
            topics,
            served,
            reader,
            definitions,
            handlers,
            producer,
            chain,
            resources,
            group=name if group.transactional else None,
            instance_id=instance_id,
            shutdown_s=shutdown_s,
            shutdown_limit_s=shutdown_limit_s,
            quiet=self.quiet,
        )
        self.session = session
        await session.connect()
        if self.session is not session:
            # Stopped meanwhile.
            await session.disconnect()

    async def join(self) -> None:
        """Join the group; return when it has assigned partitions, perhaps none. Raises MarqError."""
        if self.session is not None and self.reader is not None:
            self._joining = asyncio.create_task(self.reader.start(self.session.receiver), name="marq-join")
            await self._joining

    async def run(self) -> None:
        """Receive messages until :meth:`stop`. Raises MarqError if receiving has stopped for good."""
        session = self.session
        if session is not None:
            session.start()
            session.follow(self._plan)
            await session.done()

    async def _plan(self) -> tuple[Serving, float]:
        """Return in which partitions the queues have messages as the definitions are now.

        A new process would do, too, but it would end running handlers, even of queues that have just been defined.
        """
        return self._wanted(), inf

    def set_quiet(self, quiet: bool) -> None:
        """Take no more messages, or take messages again; running handlers continue, and the group stays as it is."""
        if quiet != self.quiet:
            self.quiet = quiet
            group = self.group.name
            if quiet:
                log.warning("group %s: quiet, taking no more messages until SIGCONT; running handlers continue", group)
            else:
                log.info("group %s: taking messages again", group)
            if self.session is not None:
                self.session.set_quiet(quiet)

    def apply_definitions(self) -> None:
        """Pause and resume queues as their settings say now, and read where their messages are now."""
        if self.session is not None:
            self.session.changed.set()
            self.session.receiver.apply_settings()

    @property
    def breakers(self) -> dict[str, dict[str, Any]]:
        """State and openings of each queue's circuit breaker."""
        breakers = {} if self.session is None else self.session.receiver.gate.breakers
        return {queue: {"state": breaker.state, "openings": breaker.openings} for queue, breaker in breakers.items()}

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that wait for their turns, by queue, at most some seconds ago: there may be very many."""
        if self.session is not None and (now_s := time.monotonic()) >= self._keys_until_s:
            self._keys, left = {}, busy_keys.MAX_TOLD_KEYS
            for queue, turns in self.session.receiver.ordering.turns.items():
                settings = self.session.receiver_settings.queue(queue)
                keys = self._key_settings.setdefault(queue, set())
                keys.add(settings.key)
                if settings.limited:
                    told = busy_keys.report(turns, keys, self._redaction, now_s, min(busy_keys.MAX_KEYS, left))
                    self._keys[queue], left = told, left - len(told["busiest"])
            self._keys_until_s = now_s + max(KEYS_S, KEYS_PAUSE * (time.monotonic() - now_s))
        return self._keys

    @property
    def partitions(self) -> int | None:
        """Number of assigned partitions; None before the first assignment."""
        return None if self.reader is None else self.reader.partitions

    @property
    def holding(self) -> dict[str, int]:
        """Messages in flight, and how many of them are in handlers."""
        session = self.session
        if session is None:
            return {"in_flight": 0, "processing": 0}
        return {"in_flight": session.prefetch.in_flight, "processing": session.prefetch.processing}

    def running(self, task: asyncio.Task[Any] | None = None) -> str:
        """Describe the handlers that are running now, or only the one that runs in a task; "" without any."""
        pools = [] if self.session is None else self.session.pools
        running = [pool for pool in pools if task is None or task in pool.busy_tasks]
        names = {(message.queue, self._name_of(message)) for pool in running for message in pool.running}
        return ", ".join(f"handler {name} of queue {queue}" for queue, name in sorted(names))

    def _name_of(self, message: Message) -> str:
        handled = self.group.queues[message.queue]
        kind = message.type if handled.types else None
        if kind is not None and kind in handled.types:
            return handled.types[kind]
        return handled.handler or handled.handlers[0]

    def calls(self, wanted: tuple[str, str] | None = None) -> list[dict[str, Any]]:
        """Return what handlers do now, those first that have run for longest; may be called in any thread.

        ``wanted``: only that with the message of this queue and id, even if many others have run for longer.
        ``cancellable``: not if it is a plain function, which runs in a thread.
        """
        session = self.session
        calls = [
            {
                "queue": message.queue,
                "handler": self._name_of(message),
                "id": message.id,
                "attempt": message.attempt,
                "seconds": round(seconds, 3),
                "cancellable": pool.cancellable(message),
            }
            for pool in (() if session is None else list(session.pools))
            for message, seconds in pool.calls()
            if wanted is None or (message.queue, message.id) == wanted
        ]
        return heapq.nlargest(MAX_CALLS, calls, key=lambda call: call["seconds"])

    def cancel(self, queue: str, message_id: str, *, counted: bool) -> None:
        """Cancel the handler of a message, as :meth:`marq.consumer.handler_pool.HandlerPool.cancel`."""
        for pool in () if self.session is None else self.session.pools:
            if pool.queue == queue:
                pool.cancel(message_id, counted=counted)

    async def stop(self) -> None:
        """Let handlers finish, write their outcomes, release prefetched messages, exit the lifespans, leave the group.

        The process stays a member until then, and its leases are renewed.
        """
        session, self.session = self.session, None
        if session is None or self.reader is None:
            return
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])
        try:
            await session.close()
        except MarqError as error:
            log.error("%s", error, exc_info=error.__cause__)
        finally:
            await self.reader.stop(STOP_CLIENT_S)
