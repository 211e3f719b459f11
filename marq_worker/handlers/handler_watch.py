"""Reports decorated handlers that no worker runs any more, and removes their definitions after a while.

Each tracker measures the time; the one that maintains the placements removes the definitions
(:mod:`marq.settings.removed_handlers` has the rule).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mode import Service

from marq.queues.following import SYNC_S
from marq.queues.queues import Queues
from marq.settings.removed_handlers import (
    EXPIRY_S,
    REMOVED_S,
    Confirmations,
    decorated,
    module_of,
    removal,
)
from marq.wire.errors import MarqError

log = logging.getLogger("marq.worker")

#: Seconds between two checks, and the maximum time that counts between them: a suspended process sees nothing.
LOOK_S, MAX_STEP_S = 10.0, 20.0


class RemovedHandlers(Service):
    """Watches the decorated handlers of a namespace; removes definitions while ``keeps`` returns True."""

    def __init__(self, queues: Queues, keeps: Callable[[], bool]) -> None:
        super().__init__()
        self._queues = queues
        self._keeps = keeps
        self._confirmations = Confirmations()
        self._removed: dict[str, dict[str, Any]] = {}

    def metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the removed handlers by queue: ``handler``, and for how many ``seconds`` no worker confirmed it."""
        return self._removed

    @Service.task
    async def _watch(self) -> None:
        before_s = time.monotonic()
        while not self.should_stop:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            passed_s, before_s = min(now_s - before_s, MAX_STEP_S), now_s
            # Confirmations may be unread while no broker answers.
            synced = now_s - self._queues.synced_s <= 2 * SYNC_S
            try:
                await self.look(passed_s if synced else 0.0)
            except MarqError as error:
                log.warning("the definitions of removed handlers could not be removed, retrying: %s", error)
            except Exception:
                log.exception("cannot look for removed handlers")

    async def look(self, passed_s: float) -> None:
        """Note the confirmations that were read; report and remove what was not confirmed for long enough.

        ``passed_s``: seconds since the last check in which confirmations could be read.
        """
        definitions = self._queues.definitions
        handlers = decorated(definitions)
        unconfirmed_s = self._confirmations.look(definitions, handlers, passed_s)
        before, self._removed = self._removed, {}
        for queue, handler in handlers.items():
            seconds = unconfirmed_s[queue]
            # A handler that another layer names runs in all workers.
            if seconds >= REMOVED_S and definitions.origin(queue, "handler") == "handler":
                self._removed[queue] = {"handler": handler, "seconds": seconds}
                if queue not in before:
                    log.warning("queue %s: %s", queue, removed(queue, handler, seconds))
        expired = [queue for queue, seconds in unconfirmed_s.items() if seconds >= EXPIRY_S]
        if expired and self._keeps():
            await self._queues.publish(removal(expired))
            gone = [f"{queue} ({handlers[queue]})" for queue in expired]
            log.warning(
                "handlers that no worker has run for %.0f min were removed from the settings of their queues, which"
                " consumers may serve from now on: %s",
                EXPIRY_S / 60, ", ".join(gone),
            )  # fmt: skip


def merged(answers: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Merge the reports of several workers; the one that has watched longest counts."""
    reports: dict[str, Mapping[str, Any]] = {}
    for answer in answers:
        for queue, report in answer.get("removed_handlers", {}).items():
            if queue not in reports or report["seconds"] > reports[queue]["seconds"]:
                reports[queue] = report
    return reports


def removed(queue: str, handler: str, seconds: float) -> str:
    """Explain that no worker has run the handler of a queue for some time, and what happens."""
    left_s = max(0.0, EXPIRY_S - seconds)
    return (
        f"no worker has run its handler {handler} for {seconds / 60:.0f} min. Start a worker with the module"
        f" {module_of(handler)} in MARQ_HANDLERS. If the handler was removed, consumers may serve the queue in"
        f" {left_s / 60:.0f} min, or after `marq queue {queue} --forget`"
    )
