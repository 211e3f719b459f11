"""A marq of the next version: it writes markers of version 2, and reads those of version 1, too.

There is no version 2 yet, so it is version 1 under another number: it shows what happens to who does not know that one.
"""

from __future__ import annotations

from marq.core import marker_codec
from marq.core.markers import Batch

NEWER = 2


def install() -> None:
    """Make this process one of the next version."""
    former = marker_codec._decode

    def decode(data: bytes) -> Batch:
        return former(bytes([NEWER]) + data[1:] if data[:1] == b"\1" else data)

    marker_codec._decode = decode
    marker_codec.VERSION = NEWER


def readable(value: bytes) -> bytes:
    """Return a marker of either version as one that this version can read."""
    return b"\1" + value[1:] if value[:1] == bytes([NEWER]) else value
