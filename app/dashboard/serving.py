"""Puts the dashboard together for a worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import faust

from app.dashboard.actions import ClusterActor, Doing
from app.dashboard.installation import WorkersInstallation
from app.dashboard.pages import Pages
from app.dashboard.tasks import Tasks
from app.web import Figures
from config.settings import AppSettings
from marq.core.errors import MarqError
from marq.dead_letters import DeadLetters
from marq.queues import Queues
from marq.settings import ClientSettings

log = logging.getLogger("marq.web")


class Dashboard:
    """The pages of a worker, with what they read and do it with."""

    def __init__(
        self, app: faust.App, figures: Figures, settings: AppSettings, client: ClientSettings, queues: Queues
    ) -> None:
        self._letters = DeadLetters.of(client)
        self._installation = WorkersInstallation(
            app, figures, settings, client, lambda: queues.definitions, self._letters
        )
        self._queues = queues
        actor = ClusterActor(client, self._letters, queues, self._look)
        self.pages = Pages(self._installation, Doing(actor, Tasks()))

    async def start(self) -> None:
        """Begin to keep the history, and learn what is defined, which a worker that only serves pages does not know."""
        self._installation.start()
        try:
            await self._queues.start()
        except MarqError as error:
            log.warning("pages show no settings of queues: %s", error)

    async def stop(self) -> None:
        """End what runs, and the clients."""
        await self.pages.stop()
        await self._letters.stop()

    async def _look(self, place: str) -> Mapping[str, Any] | None:
        found = await self._installation.open_message({"place": place})
        if not found["complete"]:
            raise MarqError(
                f"message {place}: whether it is open is not known, for a worker did not answer, or workers are joining"
                " and leaving; try again"
            )
        message: Mapping[str, Any] | None = found["message"]
        return message
