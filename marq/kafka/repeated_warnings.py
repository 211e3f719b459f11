"""Warnings about failures that are retried: the first immediately, then at most one every 30 s."""

from __future__ import annotations

import logging
from math import inf

from marq.kafka.outage_log import SUMMARY_S

log = logging.getLogger("marq")


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
