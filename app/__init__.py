"""The application that ``faust -A app`` finds: a worker's, or that of one of its handler processes."""

import os

from app.ending import end_with
from app.faust_app import MarqApp
from config.settings import load_client_settings, load_settings
from marq.core.errors import MarqError


def create_app() -> MarqApp:
    """Create the application of this process, and import only what that one needs.

    Raises:
        marq.ConfigError: a setting is wrong.
    """
    from app import handlers_process

    settings = load_settings()
    client = load_client_settings(settings)
    process = handlers_process.HandlersProcess.take(os.environ)
    if process is not None:
        return handlers_process.create_handlers_app(settings, client, process)
    # Commands, pages and tables are half of the imports: a handler process starts 0.3 s sooner without them.
    from app.application import create_worker_app

    return create_worker_app(settings, client)


try:
    app = create_app()
except MarqError as error:
    end_with(error)
