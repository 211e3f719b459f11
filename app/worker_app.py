"""The Faust application of a worker: wires settings, topics, tables, agents and pages; ``faust -A app worker`` runs it.

Its parts depend on its roles. A tracker joins the group ``PREFIX-app`` and owns markers partitions; without that role a
worker must not join, or it would be assigned some. Handlers run in processes of their own, which are Faust applications
too (app/handlers_app.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from faust.app import BootStrategy
from faust.types import TP
from mode import Service

from marq.kafka.connection import client_options
from marq.kafka.topics import Topics, ensure_topics, missing_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq_worker import client_id, former_member
from marq_worker.agents import queue_consumer, timer, tracker
from marq_worker.app import IMPORTED_S
from marq_worker.app.faust_app import MarqApp, new_app
from marq_worker.backlog.backlog_counter import BacklogCounter
from marq_worker.backlog.consumer_watch import ConsumerLookup, ConsumerWatch
from marq_worker.check.permissions import Use
from marq_worker.check.permissions_at_start import ensure_permissions
from marq_worker.config.queues import QueuesFile, load_queues
from marq_worker.config.settings import AppSettings, Role, misspelt_variables, stop_limit_s
from marq_worker.fatal_errors import or_exit
from marq_worker.former_member import TrackerAssignor
from marq_worker.handlers.handler_watch import RemovedHandlers
from marq_worker.handlers.handlers_role import HandlersRole
from marq_worker.handlers.supervisor import HandlersProcesses, command
from marq_worker.memory import Heap, look_for_garbage_rarely
from marq_worker.owner.owner_context import OwnerContext
from marq_worker.owner.placement_keeper import PlacementKeeper, synced
from marq_worker.owner.source_reader import SourceReader
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.process_usage import ProcessUsage
from marq_worker.progress import ProgressReport
from marq_worker.publication import differences, publish
from marq_worker.redaction import Redaction
from marq_worker.start_report import StartReport, introduction
from marq_worker.tables import leases
from marq_worker.tables.standby import Standby
from marq_worker.transport.batch_transport import BatchSchema
from marq_worker.watchdog.broker_probe import BrokerProbe, MarkersPartition, Rebalance
from marq_worker.watchdog.watchdog import Watchdog
from marq_worker.web import partition_statistics, probes
from marq_worker.web import security as web_security
from marq_worker.web.addresses import reachable_name
from marq_worker.web.dashboard.views import Dashboard
from marq_worker.web.peers import TrackersGroup, authorization
from marq_worker.web.sqs_metrics import CallMetrics
from marq_worker.web.statistics import MarqWeb, NamespaceStatistics
from marq_worker.web.statistics import attach as attach_web

log = logging.getLogger("marq.worker")


class WorkerApp(MarqApp):
    queues: Queues
    owners: TrackerOwners
    #: Only with the role tracker.
    leases: leases.LeaseTable
    #: To the timer agent; only with the role tracker.
    timer_channel: timer.Owners
    #: The trackers.
    group: TrackersGroup
    #: Only with the role handlers, while it runs.
    handlers: HandlersRole | None = None
    #: Only with the role tracker, unless switched off.
    backlog: BacklogCounter | None = None
    #: Only with a backlog counter.
    consumer_watch: ConsumerWatch | None = None
    #: Only with the role tracker.
    removed_handlers: RemovedHandlers | None = None
    #: Only with the role sqs.
    sqs: Service | None = None
    #: The calls that its endpoint has answered.
    sqs_calls: CallMetrics
    watchdog: Watchdog | None = None
    #: True once the group has assigned partitions, possibly none; False without the role tracker.
    assigned = False
    probes: probes.Probes
    dashboard: Dashboard
    usage: ProcessUsage
    _own_parts: Sequence[Service] = ()

    def _new_web(self) -> MarqWeb:
        return MarqWeb(self)

    async def on_first_start(self) -> None:
        await super().on_first_start()
        await or_exit(self._begin())

    async def _begin(self) -> None:
        roles, settings = self.settings.roles, self.settings
        look_for_garbage_rarely()
        for name, setting in misspelt_variables().items():
            log.warning("%s is not a setting of Marq, so it has no effect; did you mean %s?", name, setting)
        if Role.HANDLERS in roles:
            processes = HandlersProcesses(
                stop_limit_s(settings.stop_timeout), command(self.log_level, faust_log=self.faust_log), self.end
            )
            missing = partial(missing_topics, self.client)
            self.handlers = HandlersRole(settings.handlers, processes, self.queues, missing)
        decorated = None if self.handlers is None else self.handlers.documents
        file = load_queues(settings.queues_file, decorated, settings.project)
        if self.handlers is not None:
            self.handlers.project = file.runs_project
        client_id.show(self, self.client.client_id, file)
        topics = await ensure_topics(self.client, changelog=Role.TRACKER in roles)
        if roles != {Role.WEB}:
            await self._ensure_permissions(file)
            await self._define(file)
        if Role.TRACKER in roles:
            self.owners.context = self._surroundings(topics)
            self.owners.standby = Standby(self.leases, client_options(self.client), topics.markers_partitions)
            if settings.instance_id is None:
                # A static member replaces the dead one by its name.
                folder = Path(self.conf.datadir)
                self.add_future(former_member.expel(self.client, folder, settings.session_timeout))
        self.watchdog = Watchdog(settings.watchdog, self._standings, BrokerProbe(self.client).ask)
        self._own_parts = self._parts()
        for part in self._own_parts:
            await self.add_runtime_dependency(part)
        if not self.quiet:
            # Only now: a start that fails prints nothing but its error.
            self._introduce()

    def _introduce(self) -> None:
        groups = None if self.handlers is None else self.handlers.groups()
        dashboard = str(self.conf.canonical_url) if self.conf.web_enabled else ""
        for line in introduction(self.settings, groups, dashboard):
            log.info("%s", line)

    def _parts(self) -> list[Service]:
        """Return the long-lived parts besides Faust's own, in start order."""
        parts: list[Service | None] = [Heap()]
        if Role.TRACKER in self.settings.roles:
            parts += [
                self.owners.standby,
                self.owners,
                PlacementKeeper(self.client, self.queues, self.owners.keeps_placements),
                self.backlog,
                self.consumer_watch,
                self.removed_handlers,
            ]
        parts += [self.handlers, self.watchdog, self.dashboard, self.usage, self.sqs]
        parts.append(StartReport(IMPORTED_S, self.probes.not_ready, lambda: len(self.owners.owned)))
        return [part for part in parts if part is not None]

    async def _ensure_permissions(self, file: QueuesFile) -> None:
        ours = file.definitions
        if self.handlers is not None:
            ours = ours.after(self.handlers.publication(ours))
        await ensure_permissions(self.client, Use.of(ours, self.client.names, self.settings))

    async def _define(self, file: QueuesFile) -> None:
        """Follow the definitions, and publish this worker's."""
        await self.queues.start()
        self.queues.listen(self.owners.wake)
        handlers, definitions = self.handlers, self.queues.definitions
        if handlers is not None:
            # Check before publishing.
            after = definitions.after(differences(definitions, file))
            handlers.check(after.after(handlers.publication(after)))
        await publish(self.queues, self.client.names, file)
        if handlers is not None:
            await handlers.publish()

    def has_handlers(self) -> bool:
        return self.handlers is not None

    async def handlers_calls(self) -> list[dict[str, Any]]:
        return [] if self.handlers is None else await self.handlers.processes.calls()

    async def cancel_handler(self, queue: str, message_id: str, *, counted: bool) -> None:
        if self.handlers is not None:
            await self.handlers.processes.cancel(queue, message_id, counted=counted)

    def set_quiet(self, quiet: bool) -> None:
        if self.handlers is not None:
            self.handlers.processes.set_quiet(quiet)

    async def on_stop(self) -> None:
        # Before Faust stops the consumer and the tables.
        if self.watchdog is not None:
            await self.watchdog.stop()
        if self.handlers is not None:
            # Before the owners, which still fold the handlers' RELEASEs.
            await self.handlers.stop()
        # Concurrently, because each stop is slow without a broker. Owners write their pending rows.
        await asyncio.gather(*(part.stop() for part in self._own_parts))
        await self.queues.stop()
        await self.group.stop()
        await super().on_stop()

    def markers_end(self, partition: int) -> int | None:
        """Return where a markers partition of this worker ended at the last fetch; None if not known."""
        return self.consumer.thread.log_end(TP(self.settings.names.markers, partition))

    def handlers_metrics(self) -> list[dict[str, Any]]:
        return [] if self.handlers is None else self.handlers.processes.metrics()

    def handlers_pids(self) -> list[int]:
        return [process["pid"] for process in self.handlers_metrics() if process["pid"] is not None]

    def _standings(self) -> dict[Hashable, ProgressReport]:
        """Return the progress of everything that must not stall."""
        count = self.rebalancing_count
        reports: dict[Hashable, ProgressReport] = {}
        if self.rebalancing:
            reports[Rebalance(self.conf.id)] = ProgressReport((count,), owes="it does not end")
        for partition, owner in self.owners.owned.items():
            standing = owner.standing()
            if standing is not None:
                markers = MarkersPartition(partition, self.settings.names.changelog)
                reports[markers] = replace(standing, progress=(count, *standing.progress))
        return reports

    def _surroundings(self, topics: Topics) -> OwnerContext:
        markers = self.settings.names.markers

        async def seek(partition: int, offset: int) -> None:
            await self.consumer.seek_wait({TP(markers, partition): offset})

        async def log_range(partition: int) -> tuple[int, int]:
            range_: tuple[int, int] = await self.consumer.thread.log_range(TP(markers, partition))
            return range_

        return OwnerContext(
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
            turn=self.timer_channel.turn,
            markers_partitions=topics.markers_partitions,
            schedules=lambda: self.queues.definitions.schedules,
            placement=self.queues.definitions.placement,
            heard=partial(synced, self.queues),
            due_copier=self.owners.read_by(SourceReader(self.client)),
            copier=self.owners.read_by(SourceReader(self.client)),
            worker=f"{self.conf.broker_client_id} on {socket.gethostname()} ({self.conf.canonical_url})",
        )


def create_worker_app(settings: AppSettings, client: ClientSettings) -> WorkerApp:
    app = new_app(
        WorkerApp,
        settings.names.app_id,
        settings,
        client,
        store="rocksdb://",
        TableManager=leases.Tables,
        PartitionAssignor=TrackerAssignor,
        datadir=str(settings.data_dir),
        # Workers ask each other with this client.
        HttpClient=partial(ClientSession, headers=authorization(settings)),
        web_bind=settings.web_bind,
        web_port=settings.web_port,
        web_host=settings.web_host or reachable_name(settings.web_bind),
        web_application_options=web_security.options(settings),
    )
    app.queues = Queues.of(client)
    app.sqs_calls = CallMetrics()
    app.group = TrackersGroup(client)
    app.owners = TrackerOwners(settings.names.markers)
    if Role.TRACKER in settings.roles:
        attach_tracker(app)
    else:
        app.boot_strategy = BootStrategy(app, enable_kafka=False)
    if Role.HANDLERS in settings.roles:
        queue_consumer.attach(app, listed=True)
    if Role.TRACKER in settings.roles and settings.count_waiting:
        app.backlog = BacklogCounter(client, app.owners, lambda: app.queues.definitions)
        lookup = ConsumerLookup(client, lambda: app.queues.definitions)
        app.consumer_watch = ConsumerWatch(app.owners, app.backlog, lambda: app.queues.definitions, lookup)
    app_statistics = partition_statistics.attach(app, app.owners, app.backlog)
    if app.consumer_watch is not None:
        app_statistics.watched = app.consumer_watch.metrics
    if Role.TRACKER in settings.roles:
        app.removed_handlers = RemovedHandlers(app.queues, app.owners.keeps_placements)
        app_statistics.removed_handlers = app.removed_handlers.metrics
    app_statistics.paces.end_of = app.markers_end
    app.probes = probes.attach(app, app_statistics)
    app.usage = ProcessUsage(app.handlers_pids)
    totals = NamespaceStatistics(
        app, app_statistics, app.group, app.handlers_metrics, Redaction(settings.redact), app.usage, app.handlers_calls
    )
    attach_web(app, totals)
    if Role.SQS in settings.roles:
        # Imported only here: it needs botocore.
        from marq_worker.sqs.service import SqsEndpoint

        app.sqs = SqsEndpoint(settings, client, app.queues, totals.all, app.sqs_calls)
    app.dashboard = Dashboard(app, totals, settings, client, app.queues, app)
    return app


def attach_tracker(app: WorkerApp) -> None:
    app.keeps_tables = True
    app.leases = leases.attach(app)
    app.timer_channel = timer.attach(app)
    tracker.attach(app, app.topic(app.settings.names.markers, schema=BatchSchema()), app.owners)
    app.on_partitions_assigned.connect(_on_assigned)  # type: ignore[arg-type]  # mode does not type what a signal passes
    app.on_partitions_revoked.connect(_on_revoked)  # type: ignore[arg-type]


async def _on_assigned(app: WorkerApp, assigned: set[TP], **_: Any) -> None:
    former_member.remember(Path(app.conf.datadir), app.consumer.member)
    app.owners.assigned(assigned)
    app.assigned = True


async def _on_revoked(app: WorkerApp, revoked: set[TP], **_: Any) -> None:
    await app.owners.revoked(revoked)
