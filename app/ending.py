"""How a process ends that cannot start."""

from __future__ import annotations

import sys
from typing import NoReturn

from marq.core.errors import MarqError


def end_with(error: MarqError) -> NoReturn:
    """End the process with one sentence that says what to change.

    A traceback of Marq would only hide it. The notes come first: the traceback of a handler module whose import failed.
    """
    sys.exit("\n".join([*getattr(error, "__notes__", ()), f"marq: {error}"]))
