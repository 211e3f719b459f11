"""The Faust application of a worker: wires settings, topics, tables, agents and pages; ``faust -A app worker`` runs it.

What it does depends on its roles. As a tracker it joins the group ``PREFIX-app`` and owns markers partitions; without
that role it must not join, or it would be assigned some. Handlers run in processes of their own, which are Faust
applications, too (app/handlers_process.py).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from faust.app import BootStrategy
from faust.types import TP

import agents.statistics
import agents.tracker
import tables.leases
from agents.census import Census
from agents.consumer_watch import ConsumerWatch
from agents.placements import PlacementKeeper
from agents.shown import Redaction
from agents.standing import Standing
from agents.surroundings import Surroundings
from app import commands, former_member, identity, probes, web_security
from app.batching import BatchSchema
from app.checkup.preflight import ensure_rights
from app.checkup.rights import Use
from app.consumers import ConsumerLook
from app.dashboard.serving import Dashboard
from app.faust_app import MarqApp, new_app, or_exit
from app.handlers_processes import HandlersProcesses, stop_limit_s
from app.handlers_role import HandlersRole
from app.members import Group
from app.memory import Heap, look_for_garbage_rarely
from app.peers import authorization
from app.publication import differences, publish
from app.tracker_assignor import TrackerAssignor
from app.watchdog import Watchdog
from app.web import Figures, MarqWeb
from app.web import attach as attach_web
from app.witness import Markers, Rebalance, Witness
from app.worker import reachable_name
from config.queues import QueuesFile, load_queues
from config.settings import AppSettings, Role
from marq.connection import client_options
from marq.core.errors import MarqError
from marq.core.spread import HEARD_S
from marq.queues import HEAR_LIMIT_S, Queues
from marq.settings import ClientSettings
from marq.topics import Topics, ensure_topics
from tables.standby import Standby


class WorkerApp(MarqApp):
    """The application of ``faust -A app worker``."""

    queues: Queues
    owners: agents.tracker.TrackerOwners
    #: Only with the role tracker.
    leases: tables.leases.LeaseTable
    #: The trackers.
    group: Group
    _expelling: asyncio.Task[None] | None = None
    _tidying: asyncio.Task[None] | None = None
    #: Only with the role handlers, and once it runs.
    handlers: HandlersRole | None = None
    #: Only with the role tracker, and once it runs.
    placements: PlacementKeeper | None = None
    #: Only with the role tracker, and unless it is switched off.
    census: Census | None = None
    #: Only with a census.
    consumer_look: ConsumerLook
    consumer_watch: ConsumerWatch | None = None
    #: Once it runs.
    watchdog: Watchdog | None = None
    #: Whether the group has said which partitions this worker owns, if any; one that is no tracker is in no group.
    assigned = False
    dashboard: Dashboard

    def _new_web(self) -> MarqWeb:
        return MarqWeb(self)

    @property
    def http_client(self) -> ClientSession:
        """What asks other workers, to which it makes itself known."""
        if self._http_client is None:
            self._http_client = ClientSession(headers=authorization(self.settings))
        return self._http_client

    async def on_first_start(self) -> None:
        await super().on_first_start()
        await or_exit(self._begin())

    async def _begin(self) -> None:
        roles, settings = self.settings.roles, self.settings
        look_for_garbage_rarely()
        self._tidying = asyncio.create_task(Heap().live(), name="heap")
        if Role.HANDLERS in roles:
            self.handlers = HandlersRole(settings.handlers, self._new_processes)
        file = load_queues(settings.queues_file, None if self.handlers is None else self.handlers.documents)
        identity.show(self, self.client.client_id, file)
        topics = await ensure_topics(self.client, changelog=Role.TRACKER in roles)
        if roles != {Role.WEB}:
            await self._ensure_rights(file)
            await self._define(file, topics)
        if Role.TRACKER in roles:
            self.owners.around = self._surroundings(topics)
            self.owners.standby = Standby(self.leases, client_options(self.client), topics.markers_partitions)
            if settings.instance_id is None:
                # A static member takes the place of the dead one by its name.
                self._expelling = asyncio.create_task(
                    former_member.expel(self.client, Path(self.conf.datadir), settings.session_timeout)
                )
            self.placements = PlacementKeeper(self.client, self.queues, self.owners.keeps_placements)
            self.placements.start()
        if self.census is not None:
            self.census.start()
        if self.consumer_watch is not None:
            self.consumer_watch.start()
        if self.handlers is not None:
            self.handlers.start(self.queues)
        self.watchdog = Watchdog(self.settings.watchdog, self._standings, Witness(self.client).ask)
        self.watchdog.start()
        await self.dashboard.start()

    async def _ensure_rights(self, file: QueuesFile) -> None:
        ours = file.definitions
        if self.handlers is not None:
            ours = ours.after(self.handlers.publication(ours))
        await ensure_rights(self.client, Use.of(ours, self.client.names, self.settings))

    async def _define(self, file: QueuesFile, topics: Topics) -> None:
        """Learn what is defined, and say what this worker knows."""
        await self.queues.start()
        self.queues.listen(self.owners.wake)
        handlers, definitions = self.handlers, self.queues.definitions
        if handlers is not None:
            # Before it is said to all others.
            after = definitions.after(differences(definitions, file))
            await handlers.check(after.after(handlers.publication(after)), self.client, topics)
        await publish(self.queues, self.client.names, file)
        if handlers is not None:
            await self.queues.publish(handlers.publication(definitions))

    def _new_processes(self) -> HandlersProcesses:
        return HandlersProcesses(stop_limit_s(self.settings.stop_timeout), self.log_level, self.end)

    async def on_stop(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
        # First, while the connection to the broker is still there: handlers end and say so, owners write what they
        # have folded.
        if self.handlers is not None:
            await self.handlers.stop()
        await self.dashboard.stop()
        for task in (self._expelling, self._tidying):
            if task is not None:
                task.cancel()
        if self.placements is not None:
            await self.placements.stop()
        if self.consumer_watch is not None:
            await self.consumer_watch.stop()
            await self.consumer_look.stop()
        # Together: where the broker is away, each takes its time.
        await asyncio.gather(self.owners.stop(), *([] if self.census is None else [self.census.stop()]))
        await self.queues.stop()
        await self.group.stop()
        await super().on_stop()

    def markers_end(self, partition: int) -> int | None:
        """Return where a markers partition that this worker reads ended at the last fetch; None: not known."""
        return self.consumer.thread.log_end(TP(self.settings.names.markers, partition))

    def handlers_figures(self) -> list[dict[str, Any]]:
        return [] if self.handlers is None else self.handlers.figures()

    def _standings(self) -> dict[Hashable, Standing]:
        """How far everything is that must not stand still."""
        count = self.rebalancing_count
        found: dict[Hashable, Standing] = {}
        if self.rebalancing:
            found[Rebalance(self.conf.id)] = Standing((count,), owes="it does not end")
        for partition, owner in self.owners.owned.items():
            standing = owner.standing()
            if standing is not None:
                markers = Markers(partition, self.settings.names.changelog)
                found[markers] = replace(standing, progress=(count, *standing.progress))
        return found

    async def _heard(self) -> None:
        if time.monotonic() - self.queues.heard_s > HEARD_S:
            try:
                await self.queues.hear(HEAR_LIMIT_S)
            except MarqError as error:
                raise TimeoutError(str(error)) from error

    def _surroundings(self, topics: Topics) -> Surroundings:
        markers = self.settings.names.markers

        async def seek(partition: int, offset: int) -> None:
            await self.consumer.seek_wait({TP(markers, partition): offset})

        async def log_range(partition: int) -> tuple[int, int]:
            found: tuple[int, int] = await self.consumer.thread.log_range(TP(markers, partition))
            return found

        return Surroundings(
            names=self.settings.names,
            table=self.leases,
            settings=self.queues.definitions,
            client=client_options(self.client),
            messages_partitions=topics.messages_partitions,
            max_message_bytes=topics.messages_limit_bytes,
            flush_seconds=self.settings.flush_interval,
            owned=lambda: len(self.owners.owned),
            seek=seek,
            log_range=log_range,
            pause=lambda partition: self.consumer.pause_partitions({TP(markers, partition)}),
            resume=lambda partition: self.consumer.resume_partitions({TP(markers, partition)}),
            quarantine=self.queues.definitions.quarantine,
            markers_partitions=topics.markers_partitions,
            schedules=lambda: self.queues.definitions.schedules,
            placement=self.queues.definitions.placement,
            heard=self._heard,
            worker=f"{self.conf.broker_client_id} on {socket.gethostname()} ({self.conf.canonical_url})",
        )


def create_worker_app(settings: AppSettings, client: ClientSettings) -> WorkerApp:
    """Return the application of a worker."""
    app = new_app(
        WorkerApp,
        settings.names.app_id,
        settings,
        client,
        store="rocksdb://",
        TableManager=tables.leases.Tables,
        PartitionAssignor=TrackerAssignor,
        datadir=str(settings.data_dir),
        web_bind=settings.web_bind,
        web_port=settings.web_port,
        web_host=settings.web_host or reachable_name(settings.web_bind),
        web_application_options=web_security.options(settings),
    )
    app.queues = Queues.of(client)
    app.group = Group(client)
    app.owners = agents.tracker.TrackerOwners(settings.names.markers)
    if Role.TRACKER in settings.roles:
        attach_tracker(app)
    else:
        app.boot_strategy = BootStrategy(app, enable_kafka=False)
    if Role.TRACKER in settings.roles and settings.census:
        app.census = Census(client, app.owners, lambda: app.queues.definitions)
        app.consumer_look = ConsumerLook(client, lambda: app.queues.definitions)
        app.consumer_watch = ConsumerWatch(
            app.owners, app.census, lambda: app.queues.definitions, app.consumer_look.unattended
        )
    statistics = agents.statistics.attach(app, app.owners, app.census)
    if app.consumer_watch is not None:
        statistics.watched = app.consumer_watch.figures
    statistics.paces.end_of = app.markers_end
    probes.attach(app, statistics)
    figures = Figures(statistics, app.group, app.handlers_figures, Redaction(settings.redact))
    attach_web(app, figures)
    app.dashboard = Dashboard(app, figures, settings, client, app.queues)
    app.dashboard.pages.attach(app.web.web_app)
    commands.attach(app)
    return app


def attach_tracker(app: WorkerApp) -> None:
    """Make the worker a tracker."""
    app.keeps_tables = True
    app.leases = tables.leases.attach(app)
    agents.tracker.attach(app, app.topic(app.settings.names.markers, schema=BatchSchema()), app.owners)
    app.on_partitions_assigned.connect(_on_assigned)
    app.on_partitions_revoked.connect(_on_revoked)


async def _on_assigned(app: WorkerApp, assigned: set[TP], **_: Any) -> None:
    former_member.remember(Path(app.conf.datadir), app.consumer.member)
    app.owners.assigned(assigned)
    app.assigned = True


async def _on_revoked(app: WorkerApp, revoked: set[TP], **_: Any) -> None:
    await app.owners.revoked(revoked)
