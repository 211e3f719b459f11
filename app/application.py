"""The Faust application: wires settings, topics, tables and agents; ``faust -A app worker`` runs it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import faust
from faust.types import TP

import agents.handlers
import agents.statistics
import agents.tracker
import tables.leases
from agents.ownership import Surroundings
from agents.stream_reader import Partitions
from app import commands
from app.batching import BatchSchema, BatchTransport
from app.web import MarqWeb
from app.web import attach as attach_web
from app.worker import MarqWorker
from config.queues import Queues, load_queues
from config.settings import AppSettings, load_settings
from marq.connection import client_options
from marq.core.errors import MarqError
from marq.settings import ClientSettings
from marq.topics import Topics, ensure_topics

#: How often to look whether a rebalance is over, for which Faust has no event.
_POLL_SECONDS = 0.02


class MarqApp(faust.App):
    """A Faust app on the batching transport, whose topics are right before its consumer starts."""

    settings: AppSettings
    queues: Queues
    owners: agents.tracker.TrackerOwners
    handlers: agents.handlers.Handlers
    leases: tables.leases.LeaseTable

    def _new_transport(self) -> BatchTransport:
        return BatchTransport(self.conf.broker_consumer, self, loop=self.loop)

    def _new_web(self) -> MarqWeb:
        return MarqWeb(self)

    async def on_first_start(self) -> None:
        await super().on_first_start()
        try:
            client = ClientSettings.read(self.settings.bootstrap_servers, {"prefix": self.settings.prefix})
            topics = await ensure_topics(client, changelog=True)
            await self.handlers.start(client, topics, self._message_partitions())
        except MarqError as error:
            # One sentence that says what to do; a traceback would only hide it.
            sys.exit(f"marq: {error}")
        self.owners.around = self._surroundings(client, topics)

    async def on_stop(self) -> None:
        # First, while the connection to the broker is still there: handlers end and say so, owners write what they
        # have folded.
        await self.handlers.stop()
        await self.owners.stop()
        await super().on_stop()

    def _seek_in(self, topic: str) -> Callable[[int, int], Awaitable[None]]:
        async def seek(partition: int, offset: int) -> None:
            await self.consumer.seek_wait({TP(topic, partition): offset})

        return seek

    def _message_partitions(self) -> Partitions:
        messages = self.settings.names.messages

        async def settled() -> None:
            while self.rebalancing:  # noqa: ASYNC110 (it is set in the consumer's thread, where an Event may not be)
                await asyncio.sleep(_POLL_SECONDS)

        return Partitions(
            seek=self._seek_in(messages),
            settled=settled,
            pause=lambda partitions: self.consumer.pause_partitions({TP(messages, p) for p in partitions}),
            resume=lambda partitions: self.consumer.resume_partitions({TP(messages, p) for p in partitions}),
            commit=lambda offsets: self.consumer.thread.commit_exactly(
                {TP(messages, p): o for p, o in offsets.items()}
            ),
            committed=lambda partition: self.consumer.thread.committed(TP(messages, partition)),
        )

    def _surroundings(self, client: ClientSettings, topics: Topics) -> Surroundings:
        markers = self.settings.names.markers

        async def log_range(partition: int) -> tuple[int, int]:
            tp = TP(markers, partition)
            return int((await self.consumer.earliest_offsets(tp))[tp]), int((await self.consumer.highwaters(tp))[tp])

        return Surroundings(
            names=self.settings.names,
            table=self.leases,
            settings=self.queues,
            client=client_options(client),
            messages_partitions=topics.messages_partitions,
            max_message_bytes=topics.messages_limit_bytes,
            flush_seconds=self.settings.flush_interval,
            seek=self._seek_in(markers),
            log_range=log_range,
            pause=lambda partition: self.consumer.pause_partitions({TP(markers, partition)}),
        )


def create_app(settings: AppSettings | None = None, queues: Queues | None = None) -> MarqApp:
    """Return the application.

    Raises:
        marq.ConfigError: a setting or a queue definition is wrong.
    """
    settings = settings or load_settings()
    names = settings.names
    app = MarqApp(
        names.app_id,
        broker=[f"kafka://{address}" for address in settings.bootstrap_servers.split(",")],
        store="rocksdb://",
        Worker=MarqWorker,
        TableManager=tables.leases.Tables,
        datadir=str(settings.data_dir),
        value_serializer="raw",
        topic_disable_leader=True,
        table_standby_replicas=0,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=8 << 20,
        consumer_group_instance_id=settings.instance_id,
        broker_session_timeout=settings.session_timeout,
        broker_heartbeat_interval=settings.session_timeout / 4,
        broker_max_poll_records=4_000,
        stream_wait_empty=False,
        stream_buffer_maxsize=64,
        stream_recovery_delay=0.0,
        worker_redirect_stdouts=False,
        web_bind=settings.web_bind,
        web_port=settings.web_port,
        web_host=settings.web_bind,
    )
    app.settings = settings
    app.queues = queues if queues is not None else load_queues(settings.queues_file)
    app.leases = tables.leases.attach(app)
    markers = app.topic(names.markers, schema=BatchSchema())
    app.owners = agents.tracker.attach(app, markers, names.markers)
    with_handlers = app.queues.with_handlers
    messages = app.topic(names.messages, schema=BatchSchema()) if with_handlers else None
    app.handlers = agents.handlers.attach(app, messages, names.messages, with_handlers)
    attach_web(app, agents.statistics.attach(app, app.owners))
    commands.attach(app)
    app.on_partitions_assigned.connect(_on_assigned)
    app.on_partitions_revoked.connect(_on_revoked)
    return app


async def _on_assigned(app: MarqApp, assigned: set[TP], **_: Any) -> None:
    app.owners.assigned(assigned)
    await app.handlers.assigned(assigned)


async def _on_revoked(app: MarqApp, revoked: set[TP], **_: Any) -> None:
    await app.handlers.revoked()
    await app.owners.revoked(revoked)
