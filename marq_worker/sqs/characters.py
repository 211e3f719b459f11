"""The characters that SQS allows in bodies, values, names and ids; the model of the service does not list them."""

from __future__ import annotations

import re

#: XML 1.0's characters; anything else is refused in bodies and in the text of attributes.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_OWN_NAMES = ("aws.", "amazon.")
MAX_ATTRIBUTE_NAME = 256
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
FIFO_SUFFIX = ".fifo"
_ENTRY_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
#: Ids of groups, deduplication and receive attempts: alphanumeric characters and ASCII punctuation.
_TOKEN = re.compile(r"[!-~]{1,128}")
#: An exponent may have a sign and three digits. The pattern is unambiguous: backtracking over long texts would take
#: quadratic time.
_NUMBER = re.compile(r"[+-]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
MAX_DIGITS = 38


def is_text(text: str) -> bool:
    """Return whether SQS accepts every character of a body or value."""
    return _FORBIDDEN.search(text) is None


def is_attribute_name(name: str) -> bool:
    return (
        len(name) <= MAX_ATTRIBUTE_NAME
        and _ATTRIBUTE_NAME.fullmatch(name) is not None
        and not name.lower().startswith(_OWN_NAMES)
    )


def is_queue_name(name: str) -> bool:
    """Return whether a queue can have this name; the ``.fifo`` of a FIFO queue counts towards its length."""
    return len(name) <= 80 and _QUEUE_NAME.fullmatch(name.removesuffix(FIFO_SUFFIX)) is not None


def is_fifo(queue: str) -> bool:
    """Return whether a queue with this name is a FIFO queue."""
    return queue.endswith(FIFO_SUFFIX)


def is_entry_id(text: str) -> bool:
    return _ENTRY_ID.fullmatch(text) is not None


def is_token(text: str) -> bool:
    """Return whether this can be the id of a group, of a deduplication or of a receive attempt."""
    return _TOKEN.fullmatch(text) is not None


def is_number(text: str) -> bool:
    """Return whether this can be the value of an attribute of type Number, with up to 38 digits."""
    match = _NUMBER.fullmatch(text)
    return match is not None and sum(map(str.isdigit, match[1])) <= MAX_DIGITS
