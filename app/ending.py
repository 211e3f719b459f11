"""Ends a process that can't start."""

from __future__ import annotations

import sys
from typing import NoReturn

from marq.core.errors import MarqError


def end_with(error: MarqError) -> NoReturn:
    """End the process with one sentence that says what to change.

    A traceback of Marq would only hide it. The error's notes come first, such as the traceback of a failed import.
    """
    sys.exit("\n".join([*getattr(error, "__notes__", ()), f"marq: {error}"]))
