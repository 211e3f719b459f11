"""Lines in the log about messages that failed or were rejected: the error, its traceback, and what happens next.

When a service is down, thousands of messages fail each second. Formatting a traceback for each would take longer than
handling them, so lines and tracebacks have limits; what exceeds them has level DEBUG.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from marq.kafka.repeated_warnings import SUMMARY_S
from marq.wire.errors import error_text

if TYPE_CHECKING:
    from marq.leases.message import Message

log = logging.getLogger("marq")

#: Lines in each period, and its length.
MAX_LINES, PERIOD_S = 100, 10.0
#: Characters of an error in a line, and kinds of errors whose last traceback is remembered.
_MAX_CHARACTERS, _MAX_KINDS = 200, 1_000
#: Frames and chained exceptions beyond these are not formatted: a traceback is cut to a few kilobytes anyway.
_MAX_FRAMES, _MAX_TRACEBACK = 30, 16_384
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
        return "".join(formatted.format()).rstrip()[-_MAX_TRACEBACK:]
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


class Consequence(NamedTuple):
    """What happens to a message next, in words; ``final``: no attempt follows."""

    text: str
    final: bool = False


class FailureLog:
    """The lines of one consumer; ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = -inf
        self._lines = self._hidden = 0
        #: When the traceback of each kind of error was shown.
        self._shown_s: dict[object, float] = {}

    def write(
        self,
        messages: Sequence[Message],
        consequence: Consequence,
        error: BaseException | str,
        *,
        traceback: bool = False,
    ) -> None:
        """Log what happens to the first of these messages, and with ``traceback`` that of an error that is new."""
        level = self._level(logging.ERROR if consequence.final else logging.WARNING)
        if not log.isEnabledFor(level):
            return
        message = messages[0]
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error_text(error)}"
        text = text.strip().partition("\n")[0][:_MAX_CHARACTERS]
        more = f" and {len(messages) - 1:,} more messages" if len(messages) > 1 else ""
        shown = None
        if isinstance(error, BaseException) and traceback and (level == logging.DEBUG or self._is_new(error)):
            raised = error.__traceback__
            shown = type(error), error, None if raised is None else of_handler(raised)
        # A formatter may call the exception's __str__, which may raise. That must not end the handler's task.
        with suppress(Exception):
            log.log(
                level, "queue %s: %s: %s (%s%s)", message.queue, consequence.text, text, message.id, more,
                exc_info=shown,
                # Fields of a log in JSON; the text of an error may look like some.
                extra={
                    "marq_fields": {
                        "queue": message.queue, "id": message.id, "partition": message.partition,
                        "offset": message.offset, "attempt": message.attempt, "error": text,
                    }
                },
            )  # fmt: skip

    def _level(self, level: int) -> int:
        now_s = self._clock()
        if now_s - self._began_s >= PERIOD_S:
            if self._hidden:
                log.warning("failures not shown, because there were too many: messages=%d", self._hidden)
            self._began_s, self._lines, self._hidden = now_s, 0, 0
        if self._lines < MAX_LINES:
            self._lines += 1
            return level
        self._hidden += 1
        return logging.DEBUG

    def _is_new(self, error: BaseException) -> bool:
        """Return whether no traceback of this kind of error was shown lately: of this class, raised in this line."""
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        kind = (type(error), None if line is None else (line.tb_frame.f_code, line.tb_lineno))
        now_s = self._clock()
        if now_s - self._shown_s.get(kind, -inf) < SUMMARY_S:
            return False
        if len(self._shown_s) >= _MAX_KINDS:
            self._shown_s.clear()
        self._shown_s[kind] = now_s
        return True
