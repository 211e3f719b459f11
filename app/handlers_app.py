"""A handler process: the Faust application that runs the handlers of one group of queues.

A worker starts it (marq_worker/handlers/supervisor.py), so that handlers that block their event loop hold up neither
leases nor web pages nor the handlers of other groups.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Hashable, Mapping
from typing import Any

from faust.app import BootStrategy

from marq.kafka.topics import ensure_topics, own_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.agents import queue_consumer
from marq_worker.app.faust_app import MarqApp, new_app
from marq_worker.config.settings import AppSettings, shutdown_limit_s
from marq_worker.fatal_errors import or_exit
from marq_worker.handlers.handler_groups import HandlerGroup
from marq_worker.handlers.handlers_process import HandlersProcess, trace_handlers
from marq_worker.handlers.running_handlers import RunningHandlers
from marq_worker.handlers.worker_pipes import LOOK_SECONDS, Reporter, follow_parent
from marq_worker.memory import freeze_objects
from marq_worker.progress import ProgressReport
from marq_worker.redaction import Redaction
from marq_worker.watchdog.blocked_loop import describe_task
from marq_worker.watchdog.broker_probe import BrokerProbe, MessagesPartition, Rebalance
from marq_worker.watchdog.watchdog import Watchdog

log = logging.getLogger("marq.handlers")


class HandlersApp(MarqApp):
    """The Faust application of one group; its id is the group's consumer group."""

    leaves_threads = True
    group: HandlerGroup
    queues: Queues
    handlers: RunningHandlers
    #: To the queue consumer agent.
    acquirers: queue_consumer.Acquirers
    running_loop: asyncio.AbstractEventLoop
    reporter: Reporter
    watchdog: Watchdog | None = None

    async def on_first_start(self) -> None:
        await super().on_first_start()
        await or_exit(self._begin())

    async def _begin(self) -> None:
        self.running_loop = asyncio.get_running_loop()
        topics = await ensure_topics(self.client)
        await own_topics(self.client, self.group.topics.values(), topics)
        await self.queues.start()
        definitions, settings = self.queues.definitions, self.settings
        limit_s = shutdown_limit_s(settings.stop_timeout)
        shutdown_s = limit_s if settings.shutdown_timeout is None else settings.shutdown_timeout
        await self.handlers.start(
            self.client, self.acquirers.writer, topics, definitions, settings.instance_id, shutdown_s, limit_s
        )
        self.queues.listen(self.handlers.apply_definitions)
        # The worker's /healthz reports a handler that blocks the event loop. The watchdog only warns about it: it ends
        # the process only if its consumer reads nothing.
        ask = BrokerProbe(self.client).ask
        self.watchdog = Watchdog(
            settings.watchdog, self._standings, ask, watches_loop=False, describe=self._report_blocker
        )
        await self.add_runtime_dependency(self.watchdog)

    def _standings(self) -> dict[Hashable, ProgressReport]:
        reader = self.handlers.reader
        if reader is None:
            return {}
        if reader.rebalancing:
            return {Rebalance(self.conf.id): ProgressReport((reader.changes,), owes="it does not end")}
        return {
            MessagesPartition(*source, reader.reads_committed): ProgressReport((offset,), offset)
            for source, offset in reader.wanted().items()
        }

    async def handle(self) -> None:
        """Receive messages and run handlers until the stop."""
        try:
            await self.handlers.join()
            # Before the first message: its handler may block the event loop, which only shows after a report.
            self.report()
            freeze_objects()
            await self.handlers.run()
        except MarqError as error:
            self.failed(error)

    def set_quiet(self, quiet: bool) -> None:
        self.handlers.set_quiet(quiet)

    def _report_blocker(self, task: asyncio.Task[Any] | None) -> str:
        """Report to the worker what blocks the event loop, and return it; the watchdog's thread calls this."""
        blocker = self._blocker(task)
        self.reporter.tell({"blocked_by": blocker})
        return blocker

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question of the worker: cancel a handler, if it says so, and return those that run.

        A thread calls this, so that it is known what runs while a handler blocks the event loop.
        """
        wanted = question.get("cancel")
        calls = self.handlers.calls(wanted and (wanted["queue"], wanted["id"]))
        if wanted and calls:
            cancel = functools.partial(self.handlers.cancel, wanted["queue"], wanted["id"], counted=wanted["counted"])
            self.running_loop.call_soon_threadsafe(cancel)
        return {"calls": calls}

    def _blocker(self, task: asyncio.Task[Any] | None) -> str:
        """Name the handler that a task runs; for another task, the handlers that may have started it."""
        if task is not None and (handler := self.handlers.running(task)):
            return handler
        running = self.handlers.running()
        return f"{describe_task(task)} of group {self.group.name}{running and f' (running: {running})'}"

    async def on_stop(self) -> None:
        if self.watchdog is not None:
            await self.watchdog.stop()
        # First, while connected to the broker.
        await self.handlers.stop()
        await self.queues.stop()
        await super().on_stop()

    def report(self) -> None:
        handlers = self.handlers
        report = {"breakers": handlers.breakers, "keys": handlers.keys, "partitions": handlers.partitions}
        # It may have got a signal of its own.
        self.reporter.tell({**report, "blocked_by": None, "quiet": handlers.quiet, **handlers.holding})

    def failed(self, error: MarqError) -> None:
        """End the process; the worker restarts it, unless another client has its instance id."""
        if self.handlers.reader is not None and self.handlers.reader.fenced:
            self.fenced()
            return
        log.critical("group %s: its handlers cannot continue: %s", self.group.name, error)
        os.kill(os.getpid(), signal.SIGTERM)


def create_handlers_app(settings: AppSettings, client: ClientSettings, process: HandlersProcess) -> HandlersApp:
    """Return the application of a handler process, which ends when its parent does."""
    follow_parent(process.pipe, settings.stop_timeout, lambda question: app.answer(question))
    if settings.tracing:
        trace_handlers()
    group, names = process.group, client.names
    app = new_app(HandlersApp, names.named_group(group.name), settings, client)
    # Its session has clients of its own; Faust runs the agent.
    app.boot_strategy = BootStrategy(app, enable_kafka=False)
    app.group = group
    app.queues = Queues.of(client)
    app.handlers = RunningHandlers(group, Redaction(settings.redact))
    app.acquirers = queue_consumer.attach(app)
    app.reporter = Reporter(process.reports)

    @app.timer(LOOK_SECONDS, name="report")  # type: ignore[untyped-decorator]
    async def report(app: HandlersApp) -> None:
        app.report()

    # Only now, when the agent runs.
    app.task(app.handle)
    return app
