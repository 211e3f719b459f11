"""Tokens: short texts that name a message in flight, so that another process can finish it."""

from __future__ import annotations

import binascii
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from marq.wire.markers import Source

_VERSION = 1
_HEAD = struct.Struct(">BQIQB")


class Token(NamedTuple):
    """A message in flight, its queue and its holder."""

    queue: str
    holder: int
    source: Source
    offset: int


def encode(token: Token) -> str:
    queue, topic = token.queue.encode(), token.source.topic.encode()
    head = _HEAD.pack(_VERSION, token.holder, token.source.partition, token.offset, len(queue))
    return urlsafe_b64encode(head + queue + topic).decode().rstrip("=")


def decode(text: str) -> Token:
    """Return the content of a token. Raises ValueError if it is not a token of this version."""
    try:
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        version, holder, partition, offset, length = _HEAD.unpack_from(data)
        queue = data[_HEAD.size : _HEAD.size + length].decode()
        topic = data[_HEAD.size + length :].decode()
    except (struct.error, UnicodeDecodeError, binascii.Error, ValueError) as error:
        raise ValueError(f"{text[:40]!r} is not a message token: take it from message.token") from error
    if version != _VERSION or not queue or not topic:
        raise ValueError(f"{text[:40]!r} is not a message token of version {_VERSION}: take it from message.token")
    return Token(queue, holder, Source(topic, partition), offset)
