"""Kinds of errors, by which dead letters are grouped."""

from __future__ import annotations

import re

from marq.core.deliveries.dead_letter_records import DeadLetterRecord, text_of
from marq.wire.names import ERROR_HEADER, REASON_HEADER

#: Parts that differ between errors of the same kind: numbers, also within words, and long hexadecimal ones.
_VARIES = re.compile(r"\b(?=[a-f\-]*\d)[\da-f\-]{8,}\b|\d+(?:\.\d+)*", re.IGNORECASE)
#: Maximum number of characters of an error kind; the rest varies too much to help.
MAX_KIND = 200


def error_kind(record: DeadLetterRecord) -> str:
    """Return the kind of a dead letter's error: its first line, or that of the reason, with N for varying parts.

    Errors that differ only in numbers have the same kind.
    """
    text = text_of(record.headers, ERROR_HEADER) or text_of(record.headers, REASON_HEADER)
    first = text.strip().partition("\n")[0][: 4 * MAX_KIND]
    return _VARIES.sub("N", first)[:MAX_KIND].strip()
