"""Warnings about failures that are retried: the first immediately, then at most one every :data:`SUMMARY_S`."""

from __future__ import annotations

import logging
from math import inf

log = logging.getLogger("marq")

#: Least seconds between two log lines about a lasting failure.
SUMMARY_S = 30.0


class RepeatedWarning:
    """One kind of warning, shown at most once every ``SUMMARY_S``; lines in between have level DEBUG."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._shown_s = -inf

    def write(self, now_s: float, *args: object) -> None:
        """Log the text with these arguments; ``now_s`` is monotonic seconds."""
        level = logging.DEBUG
        if now_s - self._shown_s >= SUMMARY_S:
            self._shown_s, level = now_s, logging.WARNING
        log.log(level, self._text, *args)
