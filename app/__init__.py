"""The application that ``faust -A app`` finds: a worker's, or that of one of its handler processes."""

import os

from app.faust_app import MarqApp
from app.readable import end_with
from config.settings import load_client_settings, load_settings
from marq.wire.errors import MarqError


def create_app() -> MarqApp:
    """Create the application of this process, and import only what that one needs."""
    from app.handlers import process as handlers_process

    settings = load_settings()
    client = load_client_settings(settings)
    process = handlers_process.HandlersProcess.read(os.environ)
    if process is not None:
        app = handlers_process.create_handlers_app(settings, client, process)
        # Only now: Faust imports a module that failed again, and a worker in place of a handlers process starts more.
        del os.environ[handlers_process.VARIABLE]
        return app
    # Commands, pages and tables are half of the imports: a handler process starts 0.3 s sooner without them.
    from app.worker.application import create_worker_app

    return create_worker_app(settings, client)


try:
    app = create_app()
except MarqError as error:
    end_with(error)
