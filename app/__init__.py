"""The application that ``faust -A app`` finds."""

import sys

from app.application import create_app
from marq.core.errors import MarqError

try:
    app = create_app()
except MarqError as error:
    # One sentence that says what to change; a traceback would only hide it.
    sys.exit(f"marq: {error}")
