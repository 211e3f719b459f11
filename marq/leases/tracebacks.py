"""The traceback of a handler's exception, for the dead letter of its message."""

from __future__ import annotations

import traceback
from types import TracebackType

#: Frames and chained exceptions beyond these are not formatted: a traceback is cut to a few kilobytes anyway.
_MAX_FRAMES, _MAX_CHARACTERS = 30, 16_384
#: Modules that call a handler; their frames say nothing about its error.
_CALLERS = ("marq", "concurrent", "asyncio", "contextlib")


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception without the frames that called the handler; empty if it has none."""
    if error.__traceback__ is None:
        return ""
    try:
        formatted = traceback.TracebackException(
            type(error), error, of_handler(error.__traceback__), limit=-_MAX_FRAMES, compact=True
        )
        return "".join(formatted.format()).rstrip()[-_MAX_CHARACTERS:]
    except Exception:
        # User code runs in it: the exception's __str__ and __notes__.
        return ""


def of_handler(raised: TracebackType) -> TracebackType:
    """Return the part of a traceback that begins in the handler, or all of it if no frame is the handler's."""
    frame: TracebackType | None = raised
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _CALLERS:
            return frame
        frame = frame.tb_next
    return raised
