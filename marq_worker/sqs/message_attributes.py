"""Message attributes: their MD5, the selection that a receiver asks for, and their form as headers of a Marq message.

An attribute becomes a header of the same name, with its value as UTF-8 text or as bytes, so that consumers of Marq read
it like any other header. Data types other than String are listed in one header, :data:`TYPES_HEADER`. The headers of a
message that was not sent through SQS need no such list: a value that is SQS text is a String, any other is Binary.

Names differ in their rules:

- The endpoint's own headers begin with ``sqs-`` and Marq's with ``marq-``. An attribute with such a name is stored as
  ``sqs-attribute-NAME``, and comes back under its own name.
- A header that SQS has no attribute for is not returned: one whose name SQS forbids, or whose value is absent or empty.
- SQS lets a sender set ten attributes. A message with more headers is returned with all of them, because clients accept
  any number.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from marq.wire.names import RESERVED_HEADER
from marq_worker.sqs.characters import is_attribute_name, is_number, is_text

#: Attributes as in the model: name -> DataType and StringValue or BinaryValue.
Attributes = Mapping[str, Mapping[str, Any]]
V = TypeVar("V")

#: Begins the names of the headers that the endpoint itself writes.
OWN_HEADER = "sqs-"
#: JSON object: the data types, other than String, of the attributes by name.
TYPES_HEADER = "sqs-types"
_ESCAPE = "sqs-attribute-"
_BASE_TYPES = frozenset({"String", "Number", "Binary"})
MAX_TYPE = 256
_LENGTH = struct.Struct(">I")


def base_type(data_type: str) -> str:
    """Return String, Number or Binary for a data type with or without a label; an empty string for any other."""
    base, dot, label = data_type.partition(".")
    if base not in _BASE_TYPES or bool(dot) is not bool(label) or len(data_type) > MAX_TYPE or not is_text(label):
        return ""
    return base


# --- checksums --------------------------------------------------------------------------------------------------------


def md5_of_body(body: str) -> str:
    return _md5(body.encode())


def md5_of_attributes(attributes: Attributes) -> str | None:
    """Return the checksum that clients compare; None without attributes, because SQS then leaves it out.

    The algorithm is that of the SQS developer guide, "Calculating the MD5 message digest for message attributes".
    """
    if not attributes:
        return None
    parts = bytearray()
    for name in sorted(attributes):
        attribute = attributes[name]
        data_type: str = attribute["DataType"]
        binary = base_type(data_type) == "Binary"
        value: bytes = attribute["BinaryValue"] if binary else attribute["StringValue"].encode()
        for part in (name.encode(), data_type.encode()):
            parts += _LENGTH.pack(len(part)) + part
        parts += (b"\x02" if binary else b"\x01") + _LENGTH.pack(len(value)) + value
    return _md5(parts)


def _md5(data: bytes | bytearray) -> str:
    # Not for security: a Python in FIPS mode refuses MD5 otherwise.
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


# --- selection --------------------------------------------------------------------------------------------------------


def asks_for_all(names: Iterable[str]) -> bool:
    """Return whether a list of names stands for all; kombu asks for ``ALL``, the model says ``All``."""
    return any(name in (".*", "*") or name.lower() == "all" for name in names)


class AttributeNames:
    """The attributes that a receiver asks for: by name, or by the beginning of their names (``bar.*``)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._all = asks_for_all(self._names)
        self._prefixes = tuple(name.removesuffix(".*") for name in self._names if name.endswith(".*"))

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        return self._all or name in self._names or name.startswith(self._prefixes)

    def selected(self, attributes: Mapping[str, V]) -> dict[str, V]:
        """Return those of a message or queue."""
        return {name: value for name, value in attributes.items() if name in self}


# --- headers ----------------------------------------------------------------------------------------------------------


def to_headers(attributes: Attributes) -> list[tuple[str, bytes]]:
    """Return the headers of checked attributes (:mod:`marq_worker.sqs.limits`)."""
    types = {name: value["DataType"] for name, value in attributes.items() if value["DataType"] != "String"}
    headers = [
        (
            f"{_ESCAPE}{name}" if name.startswith((RESERVED_HEADER, OWN_HEADER)) else name,
            value["BinaryValue"] if base_type(value["DataType"]) == "Binary" else value["StringValue"].encode(),
        )
        for name, value in attributes.items()
    ]
    if types:
        headers.append((TYPES_HEADER, json.dumps(types, separators=(",", ":"), sort_keys=True).encode()))
    return headers


def from_headers(headers: Mapping[str, bytes | None]) -> dict[str, dict[str, Any]]:
    """Return the attributes of a message with these headers (``message.headers``)."""
    types = _types(headers.get(TYPES_HEADER))
    attributes: dict[str, dict[str, Any]] = {}
    for header, value in headers.items():
        name = header.removeprefix(_ESCAPE)
        reserved = name == header and header.startswith((RESERVED_HEADER, OWN_HEADER))
        if value and not reserved and is_attribute_name(name):
            attributes[name] = _attribute(value, types.get(name, "String"))
    return attributes


def _attribute(value: bytes, data_type: object) -> dict[str, Any]:
    base = base_type(data_type) if isinstance(data_type, str) else ""
    if base == "Binary":
        return {"DataType": data_type, "BinaryValue": value}
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"DataType": "Binary", "BinaryValue": value}
    if not is_text(text):
        return {"DataType": "Binary", "BinaryValue": value}
    # Any producer can write the list of types, so a type that does not fit its value counts as absent.
    fits = base == "String" or (base == "Number" and is_number(text))
    return {"DataType": data_type if fits else "String", "StringValue": text}


def _types(value: bytes | None) -> dict[str, Any]:
    if not value:
        return {}
    try:
        types = json.loads(value.decode())
    except (ValueError, RecursionError):
        return {}
    return types if isinstance(types, dict) else {}
