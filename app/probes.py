"""What watches a worker from outside: ``/healthz``, ``/readyz`` for supervisors, ``/metrics`` for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp.web import Response
from faust.web.views import View

from agents.lateness import Lateness
from agents.statistics import Statistics
from app import health
from app.metrics import Exposition, Snapshot
from app.witness import Markers

if TYPE_CHECKING:
    from app.application import WorkerApp


class Probes:
    """Looks at one worker."""

    def __init__(self, app: WorkerApp, statistics: Statistics) -> None:
        self._app = app
        self._statistics = statistics
        self._exposition = Exposition()

    async def not_ready(self) -> list[health.Reason]:
        """Ask the broker, if nobody did within the last second, and return what is not being done."""
        members = await self._app.group.members()
        unassigned = await self._app.group.unassigned(self._without_partitions()) if members.answered else []
        return health.not_ready(self.condition(broker_answers=members.answered, unassigned=unassigned))

    def _without_partitions(self) -> list[str]:
        """Return the groups in which this worker has no partition; another worker may have all of them."""
        app = self._app
        # A process that does not run, and a tracker without an assignment, have reasons of their own.
        idle = [each["group"] for each in app.handlers_figures() if each["pid"] is not None and not each["partitions"]]
        groups = [app.client.names.named_group(group) for group in idle]
        return [app.conf.id, *groups] if app.assigned and not app.owners.owned else groups

    def condition(self, *, broker_answers: bool = True, unassigned: Sequence[str] = ()) -> health.Condition:
        """Return what is known of the worker now."""
        app, statistics = self._app, self._statistics
        owned, handlers = app.owners.owned, app.handlers_figures()
        return health.Condition(
            roles=app.settings.roles,
            stopping=app.should_stop,
            assigned=app.assigned,
            rebalancing=app.rebalancing,
            broker_answers=broker_answers,
            partitions={partition: (owner.state, owner.alarm) for partition, owner in owned.items()},
            paces={partition: statistics.paces.of(partition) for partition in owned},
            wedged=sorted(map(str, self._suspects)),
            loop_lag_seconds=statistics.loop_lag_seconds,
            handlers={each["group"]: each["pid"] is not None for each in handlers},
            blocked={each["group"]: each["blocked_seconds"] for each in handlers},
            unassigned=[f"group {name}" for name in unassigned],
        )

    async def snapshot(self) -> Snapshot:
        """Return all figures of the worker."""
        app, statistics, definitions = self._app, self._statistics, self._app.queues.definitions
        return Snapshot(
            roles=sorted(app.settings.roles),
            ready=not await self.not_ready(),
            loop_lag_seconds=statistics.loop_lag_seconds,
            rebalances=app.rebalancing_count,
            queues=await statistics.open_now(),
            census=None if statistics.census is None else statistics.census.figures(),
            totals=statistics.totals.by_queue(),
            partitions=statistics.partitions(),
            wedged=frozenset(each.partition for each in self._suspects if isinstance(each, Markers)),
            lateness=Lateness() if app.owners.around is None else app.owners.around.lateness,
            handling=statistics.handling,
            handlers=app.handlers_figures(),
            paused={queue: definitions.settings(queue).paused for queue in definitions.names()},
        )

    async def metrics(self, accept: str) -> Response:
        """Return the text that Prometheus reads."""
        snapshot = await self.snapshot()
        # Of a thousand queues it is a megabyte of text, which the event loop need not wait for.
        body, content_type = await asyncio.to_thread(self._exposition.write, snapshot, accept)
        return Response(body=body, headers={"Content-Type": content_type})

    @property
    def _suspects(self) -> frozenset[Any]:
        return frozenset() if self._app.watchdog is None else self._app.watchdog.suspects


def attach(app: WorkerApp, statistics: Statistics) -> None:
    """Add the pages to an application."""
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


def _answer(view: View, verdict: str, reasons: list[health.Reason]) -> Any:
    return view.json(health.document(verdict, reasons), status=503 if reasons else 200)
