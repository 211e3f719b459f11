"""Receipt handles: a message in flight and one delivery of it, with a MAC.

Every endpoint of a namespace has the same secret, so each one reads the handles of all. Without the MAC a client could
settle messages of queues for which its key has no permission, because a tracker accepts an ACK from anyone.
"""

from __future__ import annotations

import hmac
import struct
from base64 import b64decode, urlsafe_b64encode
from typing import NamedTuple

from marq.client.message_token import Token
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq.wire.record_headers import record_id
from marq_worker.sqs.errors import SqsError

MIN_SECRET_BYTES = 16
#: Maximum length of a handle, on which clients may rely.
MAX_HANDLE = 1_024
_VERSION = 2
#: Version, attempt, end of the lease, holder, partition, offset, and the bytes of the queue's name, of the topic's name
#: and of the address.
_HEAD = struct.Struct(">BIQQIQBBB")
_MAC_BYTES = 16
#: Separates this use of the secret from any other.
_PURPOSE = b"marq sqs receipt handle"


class Handle(NamedTuple):
    """A message in flight, its id and the number of the delivery.

    ``until_ms`` is the end of its lease as it was at the delivery, in milliseconds since 1970 by the brokers' clock; 0
    if that is unknown. ``url`` is the address of the endpoint that keeps the message until it is settled; empty if any
    endpoint can settle it.
    """

    token: Token
    message_id: str
    attempt: int
    until_ms: int
    url: str = ""


class Handles:
    """Issues and reads handles. Raises ConfigError if the secret is shorter than 16 bytes."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the secret of receipt handles has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed"
            )
        #: Copied for each handle, because hashing the key again takes longer than hashing the handle.
        self._keyed = hmac.new(hmac.digest(secret, _PURPOSE, "sha256"), digestmod="sha256")

    def issue(self, token: Token, message_id: str, attempt: int, until_ms: int, url: str = "") -> str:
        """Return the handle of a delivery; ``message_id`` is Marq's, ``topic/partition/offset``."""
        queue, topic, address = token.queue.encode(), token.source.topic.encode(), url.encode()
        place = token.source.partition, token.offset
        head = _HEAD.pack(_VERSION, attempt, until_ms, token.holder, *place, len(queue), len(topic), len(address))
        # In a first delivery, the message's id is the place of the record.
        identity = b"" if message_id == record_id(token.source.log, token.offset) else message_id.encode()
        data = head + queue + topic + address + identity
        return urlsafe_b64encode(self._mac(data) + data).decode().rstrip("=")

    def read(self, text: str, queue: str) -> Handle:
        """Return the content of a handle. Raises SqsError if no endpoint issued it, or not for this queue."""
        try:
            data = b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raise _invalid() from None
        mac, data = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data)) or data[0] != _VERSION:
            raise _invalid()
        _, attempt, until_ms, holder, partition, offset, *lengths = _HEAD.unpack_from(data)
        queue_bytes, topic_bytes, address_bytes = lengths
        topic_at = _HEAD.size + queue_bytes
        address_at = topic_at + topic_bytes
        identity_at = address_at + address_bytes
        if data[_HEAD.size : topic_at].decode() != queue:
            raise SqsError("ReceiptHandleIsInvalid", "the receipt handle belongs to another queue")
        source, url = Source(data[topic_at:address_at].decode(), partition), data[address_at:identity_at].decode()
        message_id = data[identity_at:].decode() or record_id(source.log, offset)
        return Handle(Token(queue, holder, source, offset), message_id, attempt, until_ms, url)

    def _mac(self, data: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(data)
        return mac.digest()[:_MAC_BYTES]


def _invalid() -> SqsError:
    return SqsError("ReceiptHandleIsInvalid", "the receipt handle is not valid; take it from ReceiveMessage")
