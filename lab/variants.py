"""A changed version of Marq for whole processes, which programs of the lab install with ``--install``."""

from __future__ import annotations

from marq.wire import marker_codec
from marq.wire.markers import Batch

#: A marker version that this Marq does not know: version 1 under another number.
NEWER = 2


def newer() -> None:
    """Make this process one of the next version: it writes markers of version 2, and also reads those of version 1."""
    former = marker_codec._decode

    def decode(data: bytes) -> Batch:
        return former(bytes([NEWER]) + data[1:] if data[:1] == b"\1" else data)

    marker_codec._decode = decode
    marker_codec.VERSION = NEWER


def readable(value: bytes) -> bytes:
    """Return a marker of either version as one that this version can read."""
    return b"\1" + value[1:] if value[:1] == bytes([NEWER]) else value
