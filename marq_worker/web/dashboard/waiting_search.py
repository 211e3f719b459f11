"""Filters and order of the waiting messages on a page.

Texts and headers are searched as pages show them, without what MARQ_REDACT hides: otherwise a viewer could find out a
hidden value by searching for parts of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from marq.kafka.inspector import Peeked, by_age
from marq_worker.redaction import MAX_JSON_BYTES, Redaction
from marq_worker.web.message_listing import MAX_ATTEMPTS, MAX_MINUTES, read_number

#: Sort keys.
SORTS = ("sent", "attempt", "bytes")
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class WaitingSearch:
    """What waiting messages are shown, in which order.

    ``text``: part of the payload; ``header``: a header's name, or NAME=PART of its value; both regardless of case.
    """

    text: str = ""
    header: str = ""
    attempts: int = 1
    minutes: int = 0
    sort: str = "sent"
    descending: bool = False

    @classmethod
    def read(cls, query: Mapping[str, str]) -> WaitingSearch:
        """Parse an address; an unknown order is the default one. Raises ConfigError for what is not a number."""
        sort = query.get("sort", "sent")
        return cls(
            query.get("text", "").strip()[:_MAX_TEXT],
            query.get("header", "").strip()[:_MAX_TEXT],
            read_number(query, "attempts", 1, MAX_ATTEMPTS),
            read_number(query, "minutes", 0, MAX_MINUTES, least=0),
            sort if sort in SORTS else "sent",
            query.get("order") == "desc",
        )

    @property
    def filters(self) -> bool:
        """Whether it leaves out any message."""
        return bool(self.text or self.header or self.attempts > 1 or self.minutes)

    @property
    def may_purge(self) -> bool:
        """Whether a purge can end what it shows: consumers skip all records before an offset."""
        return not replace(self, minutes=0).filters

    def query(self, **changed: Any) -> dict[str, str]:
        """Return the query of an address with this search, without defaults."""
        query = {
            "text": self.text,
            "header": self.header,
            "attempts": self.attempts,
            "minutes": self.minutes,
            "sort": self.sort,
            "order": "desc" if self.descending else "",
            **changed,
        }
        defaults = {"text": "", "header": "", "attempts": 1, "minutes": 0, "sort": "sent", "order": ""}
        return {name: str(value) for name, value in query.items() if value != defaults[name]}

    def fitting(self, redaction: Redaction) -> Callable[[Peeked], bool]:
        """Return whether a message fits."""
        text = self.text.casefold()
        name, _, part = self.header.casefold().partition("=")
        name, part = name.strip(), part.strip()
        latest_ms = time.time() * 1000 - self.minutes * 60_000

        def has_header(message: Peeked) -> bool:
            headers = redaction.headers(message.headers, MAX_JSON_BYTES).items()
            return any(header.casefold() == name and part in (value or "").casefold() for header, value in headers)

        def fits(message: Peeked) -> bool:
            # The cheap ones first.
            return (
                message.attempt >= self.attempts
                and (not self.minutes or message.sent_ms <= latest_ms)
                and (not name or has_header(message))
                and (not text or text in (redaction.text(message.row.value, MAX_JSON_BYTES) or "").casefold())
            )

        return fits

    def order(self) -> Callable[[Peeked], Any]:
        """Return the sort key of messages; those that have waited longest come first among equals."""
        sign = -1 if self.descending else 1
        of: Mapping[str, Callable[[Peeked], float]] = {
            "sent": lambda message: message.row.timestamp,
            "attempt": lambda message: message.attempt,
            "bytes": lambda message: len(message.row.value or b""),
        }
        value = of[self.sort]
        return lambda message: (sign * value(message), *by_age(message))
