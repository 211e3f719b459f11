"""Prepares payloads for display: truncates them, decodes any bytes as text, and hides the fields in MARQ_REDACT.

Fields are hidden by name at any depth of a JSON document, and so are headers. A payload that is not JSON can't be
searched for fields, so it is hidden as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from marq.wire.names import ORDERING_KEY_HEADER, RESERVED_HEADER

HIDDEN = "[hidden]"
ALL_HIDDEN = "[hidden: MARQ_REDACT hides fields, and this value is not JSON, so it cannot be searched]"
TRACEBACK_HIDDEN = "[hidden: MARQ_REDACT hides fields, and a traceback cannot be searched; `marq dead` shows it]"
#: Payloads up to this size are parsed as JSON; longer ones are shown as text.
MAX_JSON_BYTES = 65_536
#: Characters of text, and bytes in hexadecimal, that the page of a message shows.
MAX_TEXT, MAX_HEX_BYTES = 16_384, 1_024
#: Bytes of an ordering key to show.
MAX_KEY_BYTES = 200
_HEX_LINE = 16


class Form(NamedTuple):
    """A payload in one form; ``cut``: whether this is only its beginning."""

    name: str
    text: str
    cut: bool


class Redaction:
    """Hides fields and headers with these names, case-insensitively."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(name.casefold() for name in names)

    def text(self, value: bytes | None, limit_bytes: int) -> str | None:
        """Return the beginning of a payload as text."""
        if value is None or not self._names:
            return _cut(value, limit_bytes)
        document = _document(value)
        if document is None:
            return ALL_HIDDEN
        return _cut(_written(self._without(document[0])).encode(), limit_bytes)

    def hides(self, value: bytes) -> bool:
        """Return whether a payload is not shown as it is."""
        if not value or not self._names:
            return False
        document = _document(value)
        return document is None or bool(self._without(document[0]) != document[0])

    def headers(self, headers: Iterable[tuple[str, bytes | None]], limit_bytes: int) -> dict[str, str | None]:
        return {
            name: HIDDEN if name.casefold() in self._names else _cut(value, limit_bytes)
            for name, value in headers
            if not name.startswith(RESERVED_HEADER)
        }

    def traceback(self, text: str) -> str:
        """Return a traceback. It may contain values and can't be searched for fields, so it is hidden like such."""
        return TRACEBACK_HIDDEN if text and self._names else text

    def ordering_key(self, key: bytes | None, headers: Iterable[str] = (ORDERING_KEY_HEADER,)) -> str | None:
        """Return a key as text, None for no key; it is hidden if a header that may have had it is."""
        if not key:
            return None
        hides = any(header.casefold() in self._names for header in headers)
        return HIDDEN if hides else _cut(key, MAX_KEY_BYTES)

    def forms(self, value: bytes | None) -> list[Form]:
        """Return a payload in all forms to show, the most useful one first."""
        if not value:
            return []
        document = _document(value)
        forms = []
        if document is not None:
            shown = _written(self._without(document[0]), indent=2)
            forms.append(Form("JSON", shown[:MAX_TEXT], len(shown) > MAX_TEXT))
        if self._names:
            return forms or [Form("text", ALL_HIDDEN, False)]
        forms.append(Form("text", value[:MAX_TEXT].decode("utf-8", "replace"), len(value) > MAX_TEXT))
        forms.append(Form("hex", _hex(value[:MAX_HEX_BYTES]), len(value) > MAX_HEX_BYTES))
        return forms

    def _without(self, document: Any) -> Any:
        if not self._names:
            return document
        if isinstance(document, Mapping):
            return {
                name: HIDDEN if name.casefold() in self._names else self._without(value)
                for name, value in document.items()
            }
        return [self._without(item) for item in document] if isinstance(document, list) else document


def _document(value: bytes) -> tuple[Any] | None:
    """Return a payload's JSON document in a tuple (null is a document); None if it is not JSON."""
    if len(value) > MAX_JSON_BYTES:
        return None
    try:
        return (_shallow(json.loads(value)),)
    except (ValueError, RecursionError):
        # Also raised for numbers with thousands of digits and for very deep nesting.
        return None


def _shallow(document: Any, depth: int = 0) -> Any:
    if depth > 50:
        raise ValueError("nested too deeply to show")
    for item in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        _shallow(item, depth + 1)
    return document


def _written(document: Any, indent: int | None = None) -> str:
    """Return a document as text that can be sent: a lone surrogate stays an escape."""
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()


def _cut(value: bytes | None, limit_bytes: int) -> str | None:
    return None if value is None else value[:limit_bytes].decode("utf-8", "replace")


def _hex(value: bytes) -> str:
    lines = (value[start : start + _HEX_LINE] for start in range(0, len(value), _HEX_LINE))
    return "\n".join(
        f"{number * _HEX_LINE:06x}  {line.hex(' '):<{3 * _HEX_LINE - 1}}  {_printable(line)}"
        for number, line in enumerate(lines)
    )


def _printable(line: bytes) -> str:
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)
