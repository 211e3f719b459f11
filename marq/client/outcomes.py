"""Exceptions that a handler raises to choose how its message ends: control flow, not errors."""

from __future__ import annotations

from datetime import timedelta

from marq.settings.durations import optional_ms
from marq.settings.hints import Unknown, refuse


class Outcome(Exception):
    """Raised in a handler, or within ``async with message``."""


class Retry(Outcome):
    """Deliver the message again after ``delay`` (seconds or timedelta); without it, after the queue's backoff."""

    def __init__(self, delay: float | timedelta | None = None, **unknown: Unknown) -> None:
        refuse("Retry", unknown)
        super().__init__(delay)
        self.delay_ms = optional_ms("delay", delay)

    def __str__(self) -> str:
        return "after the queue's backoff" if self.delay_ms is None else f"after {self.delay_ms / 1000:g} s"


class NoHandler(Retry):
    """No handler here is for messages of this type. Another worker may have one, so the attempt does not count."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


class Reject(Outcome):
    """Dead-letter the message with ``reason``."""

    def __init__(self, reason: str = "rejected", **unknown: Unknown) -> None:
        refuse("Reject", unknown)
        super().__init__(reason)
        self.reason = str(reason)


class DecodeError(Reject):
    """The codec can't decode a message's bytes. Further attempts would fail too, so it becomes a dead letter.

    ``reason`` never quotes the bytes: it goes into a header of the dead letter.
    """
