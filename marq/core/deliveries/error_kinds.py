"""Kinds of errors: dead letters whose error texts differ only in numbers have the same kind."""

from __future__ import annotations

import re

from marq.core.deliveries.dead_letter_records import DeadLetterRecord, text_of
from marq.wire.names import ERROR_HEADER, REASON_HEADER

#: Parts that differ between errors of the same kind: numbers, also within words, and long hexadecimal ones.
_VARIES = re.compile(r"\b(?=[a-f\-]*\d)[\da-f\-]{8,}\b|\d+(?:\.\d+)*", re.IGNORECASE)
#: Maximum characters of an error kind; the rest varies too much to help.
MAX_KIND = 200


def kind_of(record: DeadLetterRecord) -> str:
    """Return the kind of a dead letter's error: the first line of the error, or else of the reason, with N for each
    part that varies."""
    text = text_of(record.headers, ERROR_HEADER) or text_of(record.headers, REASON_HEADER)
    first = text.strip().partition("\n")[0][: 4 * MAX_KIND]
    return _VARIES.sub("N", first)[:MAX_KIND].strip()
