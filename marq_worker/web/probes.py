"""Endpoints for supervisors (``/healthz``, ``/readyz``) and for Prometheus (``/metrics``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp.web import Response
from faust.web.views import View

from marq_worker.progress import Lateness
from marq_worker.watchdog.broker_probe import MarkersPartition
from marq_worker.web import liveness_and_readiness as health
from marq_worker.web.metrics import Exposition, WorkerMetrics
from marq_worker.web.partition_statistics import Statistics

if TYPE_CHECKING:
    from marq_worker.app.worker_app import WorkerApp


class Probes:
    def __init__(self, app: WorkerApp, statistics: Statistics) -> None:
        self._app = app
        self._statistics = statistics
        self._exposition = Exposition()

    async def not_ready(self) -> list[health.Reason]:
        """Query the broker, unless its last answer is fresh; return which work is not being done."""
        members = await self._app.group.members()
        unassigned = await self._app.group.unassigned(self._without_partitions()) if members.answered else []
        return health.not_ready(self.condition(broker_answers=members.answered, unassigned=unassigned))

    def _without_partitions(self) -> list[str]:
        """Return the groups in which this worker has no partition; another worker may have all of them."""
        app = self._app
        # A process that does not run, and a tracker without an assignment, have reasons of their own.
        idle = [
            process["group"]
            for process in app.handlers_metrics()
            if process["pid"] is not None and not process["partitions"]
        ]
        groups = [app.client.names.named_group(group) for group in idle]
        return [app.conf.id, *groups] if app.assigned and not app.owners.owned else groups

    def condition(self, *, broker_answers: bool = True, unassigned: Sequence[str] = ()) -> health.Condition:
        app, statistics = self._app, self._statistics
        owned, handlers = app.owners.owned, app.handlers_metrics()
        return health.Condition(
            roles=app.settings.roles,
            stopping=app.should_stop,
            assigned=app.assigned,
            rebalancing=app.rebalancing,
            broker_answers=broker_answers,
            partitions={partition: (owner.state, owner.alarm) for partition, owner in owned.items()},
            paces={partition: statistics.paces.of(partition) for partition in owned},
            stalled=sorted(map(str, self._suspects)),
            loop_lag_seconds=statistics.loop_lag_seconds,
            handlers={process["group"]: process["pid"] is not None for process in handlers},
            blocked={process["group"]: process["blocked_seconds"] for process in handlers},
            unassigned=[f"group {name}" for name in unassigned],
        )

    async def snapshot(self) -> WorkerMetrics:
        app, statistics, definitions = self._app, self._statistics, self._app.queues.definitions
        return WorkerMetrics(
            roles=sorted(app.settings.roles),
            ready=not await self.not_ready(),
            loop_lag_seconds=statistics.loop_lag_seconds,
            rebalances=app.rebalancing_count,
            queues=await statistics.open_now(),
            backlog=None if statistics.backlog is None else statistics.backlog.metrics(),
            totals=statistics.totals.by_queue(),
            partitions=statistics.partitions(),
            stalled=frozenset(subject.partition for subject in self._suspects if isinstance(subject, MarkersPartition)),
            lateness=Lateness() if app.owners.context is None else app.owners.context.lateness,
            handling=statistics.handling,
            waiting=statistics.waiting,
            sqs=app.sqs_calls,
            handlers=app.handlers_metrics(),
            paused={queue: definitions.settings(queue).paused for queue in definitions.names()},
            pause_ends={
                queue: end_ms / 1000
                for queue in definitions.names()
                if (end_ms := definitions.settings(queue).paused_until_ms) is not None
            },
        )

    async def metrics(self, accept: str) -> Response:
        snapshot = await self.snapshot()
        # For a thousand queues this is a megabyte of text; do not block the event loop.
        body, content_type = await asyncio.to_thread(self._exposition.write, snapshot, accept)
        return Response(body=body, headers={"Content-Type": content_type})

    @property
    def _suspects(self) -> frozenset[Any]:
        return frozenset() if self._app.watchdog is None else self._app.watchdog.suspects


def attach(app: WorkerApp, statistics: Statistics) -> Probes:
    probes = Probes(app, statistics)

    @app.page("/metrics", name="metrics")
    async def metrics(self: View, request: Any) -> Any:
        return await probes.metrics(request.headers.get("Accept", ""))

    @app.page("/healthz", name="healthz")
    async def healthz(self: View, request: Any) -> Any:
        return _answer(self, "live", health.not_live(probes.condition()))

    @app.page("/readyz", name="readyz")
    async def readyz(self: View, request: Any) -> Any:
        return _answer(self, "ready", await probes.not_ready())

    return probes


def _answer(view: View, verdict: str, reasons: list[health.Reason]) -> Any:
    return view.json(health.document(verdict, reasons), status=503 if reasons else 200)
