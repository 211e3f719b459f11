"""Requests to quarantine one record of the markers topic.

A batch of a newer version stops its partition, because a tracker that skipped it would lose its content. If no newer
Marq wrote the record, an operator quarantines it. The request is in the queues topic under the key
``quarantine:PARTITION/OFFSET``, so it survives restarts and every reader of markers sees it.

A request applies only to a record that the reader can't decode, and only if the content is the one that the operator
saw. So it never removes a valid marker: a newer worker reads the record anyway, and a topic that was deleted and
recreated has other records at the same offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from marq.wire.errors import ConfigError

#: Characters of a name or reason that are kept.
MAX_TEXT = 500
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Quarantine:
    """One request: the record, the digest of its content, and its author, time and reason."""

    partition: int
    offset: int
    sha256: str
    by: str
    at: str
    why: str = ""

    def __str__(self) -> str:
        return f"quarantined by {self.by} at {self.at}{f': {self.why}' if self.why else ''}"

    @property
    def place(self) -> str:
        """The partition and offset, as in the key of its record."""
        return f"{self.partition}/{self.offset}"

    def fits(self, value: bytes) -> bool:
        """Return whether a record has the content that the request is for."""
        return digest(value) == self.sha256

    def document(self) -> dict[str, Any]:
        """Return the value of its record."""
        return {"sha256": self.sha256, "by": self.by, "at": self.at, "why": self.why}

    @classmethod
    def read(cls, place: str, document: object) -> Quarantine:
        """Read the place and the value of its record. Raises ConfigError if one of them can't be understood."""
        partition, offset = read_place(place)
        if not isinstance(document, Mapping) or not document.get("sha256"):
            raise ConfigError(f"expected a table with sha256, by and at, not {document!r}")
        texts = [document.get(name, "") for name in ("sha256", "by", "at", "why")]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"expected sha256, by, at and why as text, not {document!r}")
        return cls(partition, offset, *(text[:MAX_TEXT] for text in texts))


def read_place(place: str) -> tuple[int, int]:
    """Return the partition and offset that a key names. Raises ConfigError if it names none."""
    numbers = place.split("/")
    if len(numbers) != 2 or not all(
        number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS for number in numbers
    ):
        raise ConfigError(f"expected PARTITION/OFFSET, not {place!r}")
    return int(numbers[0]), int(numbers[1])


def digest(value: bytes) -> str:
    """Return the digest by which a request identifies the content of a record."""
    return sha256(value).hexdigest()
