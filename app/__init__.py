"""The module that ``faust -A app`` loads: ``app.app`` is the application of a worker or of a handler process.

It is created at first use, so that other modules can be imported without it.
"""

import asyncio
import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from marq.wire.errors import MarqError

if TYPE_CHECKING:
    from marq_worker.app.faust_app import MarqApp


#: When the process began, about: this module is imported first.
IMPORTED_S = time.monotonic()


def create_app() -> "MarqApp":
    """Create the application of this process, and import only what that one needs."""
    import uvloop

    from marq_worker.config.settings import HANDLERS_PROCESS, load_client_settings, load_settings
    from marq_worker.handlers.handlers_process import HandlersProcess

    # The loop that Faust runs. uvloop's timers and sockets use less CPU time than those of asyncio's own loop.
    asyncio.set_event_loop(uvloop.new_event_loop())
    settings = load_settings()
    client = load_client_settings(settings)
    process = HandlersProcess.read(os.environ)
    if process is not None:
        from marq_worker.app.handlers_app import create_handlers_app

        app = create_handlers_app(settings, client, process)
        # Only now: after a failed import, Faust imports this module again, and without the variable it would start a
        # worker, with more processes, instead of a handler process.
        del os.environ[HANDLERS_PROCESS]
        return app
    # Commands, pages and tables are half of the imports: a handler process starts 0.3 s sooner without them.
    from marq_worker.app.worker_app import create_worker_app

    return create_worker_app(settings, client)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from marq_worker.fatal_errors import end_with

    try:
        app = globals()["app"] = create_app()
    except MarqError as error:
        end_with(error)
    return app


if __name__ == "app":
    # In a checkout. All modules have one name and one copy, that of the installed package.
    sys.modules["app"] = importlib.import_module("marq_worker.app")
    importlib.import_module("marq_worker.commands").attach()
