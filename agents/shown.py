"""How payloads are shown to people: cut, as text whatever their bytes are, and without what must not be seen.

Fields that are to be hidden are known by name, at any depth of a JSON document, and so are headers. What is no JSON
can't be looked through for fields: where something is to be hidden, it is hidden as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from marq.core.names import RESERVED_HEADER

HIDDEN = "[hidden]"
#: Stands for a payload that is hidden as a whole.
ALL_HIDDEN = "[hidden: fields are hidden by MARQ_REDACT, and this is no JSON that could be looked through]"
#: Bytes of a payload that are taken for a JSON document; a longer one is shown as text.
MAX_JSON_BYTES = 65_536
#: Characters of a JSON document or of a text, and bytes in hexadecimal digits, that one message's page shows.
MAX_TEXT, MAX_HEX_BYTES = 16_384, 1_024
_HEX_LINE = 16


class Form(NamedTuple):
    """A payload in one form; ``cut``: only its beginning."""

    name: str
    text: str
    cut: bool


class Redaction:
    """Hides fields and headers of these names, whatever the case of the letters."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(name.casefold() for name in names)

    def text(self, value: bytes | None, limit_bytes: int) -> str | None:
        """Return the beginning of a payload, as far as it is text."""
        if value is None or not self._names:
            return _cut(value, limit_bytes)
        document = _document(value)
        if document is None:
            return ALL_HIDDEN
        return _cut(_written(self._without(document[0])).encode(), limit_bytes)

    def headers(self, headers: Iterable[tuple[str, bytes | None]], limit_bytes: int) -> dict[str, str | None]:
        """Return the sender's headers."""
        return {
            name: HIDDEN if name.casefold() in self._names else _cut(value, limit_bytes)
            for name, value in headers
            if not name.startswith(RESERVED_HEADER)
        }

    def forms(self, value: bytes | None) -> list[Form]:
        """Return a payload in all forms in which it may be seen, the most telling one first."""
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
        return [self._without(each) for each in document] if isinstance(document, list) else document


def _document(value: bytes) -> tuple[Any] | None:
    """Return the JSON document that a payload is, in a tuple for null is one; None where it is none."""
    if len(value) > MAX_JSON_BYTES:
        return None
    try:
        return (_shallow(json.loads(value)),)
    except (ValueError, RecursionError):
        # Also a number of thousands of digits, and brackets within brackets without end.
        return None


def _shallow(document: Any, depth: int = 0) -> Any:
    if depth > 50:
        raise ValueError("too deep for a person")
    for each in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        _shallow(each, depth + 1)
    return document


def _written(document: Any, indent: int | None = None) -> str:
    """Return a document as text that can be sent: half a surrogate pair, which JSON may have, stays an escape."""
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
    return "".join(chr(each) if 0x20 <= each < 0x7F else "." for each in line)
