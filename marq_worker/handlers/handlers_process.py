"""What a worker passes to a handler process that it starts (app/handlers_app.py)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from marq.wire.errors import ConfigError
from marq_worker.config.settings import HANDLERS_PROCESS
from marq_worker.handlers.handler_groups import HandlerGroup


@dataclass(frozen=True, slots=True)
class HandlersProcess:
    """The parameters that a worker passes to a process that it starts."""

    group: HandlerGroup
    #: The socket for questions.
    pipe: int
    #: The pipe for reports.
    reports: int

    def encode(self) -> str:
        return json.dumps({"pipe": self.pipe, "reports": self.reports, "group": self.group.document()})

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> HandlersProcess | None:
        """Read the parameters from the environment; None for a worker."""
        text = environment.get(HANDLERS_PROCESS)
        if text is None:
            return None
        document = json.loads(text)
        return cls(HandlerGroup.read(document["group"]), document["pipe"], document["reports"])


def trace_handlers() -> None:
    """Trace handlers; OpenTelemetry's own settings choose the exporter."""
    try:
        importlib.import_module("marq.tracing").instrument()
    except ImportError as error:
        raise ConfigError(f"MARQ_TRACING: {error}") from error
