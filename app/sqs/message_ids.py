"""SQS message ids: Marq's id of a message in the characters that SQS allows.

Clients use a ``MessageId`` as the id of a batch's entry, so it has 1 to 80 of ``A-Z a-z 0-9 _ -``. It is computed from
Marq's id, so it is the same at every delivery and at every endpoint:

==========================  ============================================  ==========
message                     SQS id                                        reversible
==========================  ============================================  ==========
in the messages topic       ``PARTITION-OFFSET``                          yes
any other id, 59 bytes      ``m`` and base64url of Marq's id              yes
longer id                   ``h`` and 32 hexadecimal digits of a SHA-256  no
==========================  ============================================  ==========
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256

MAX_ID = 80
#: Numbers as Marq writes them; with leading zeros, the id would be a different one.
_PLACE = re.compile(r"(0|[1-9][0-9]{0,19})[/-](0|[1-9][0-9]{0,19})", re.ASCII)


class MessageIds:
    """Converts ids in both directions; ``messages_topic`` is the namespace's (``Names.messages``)."""

    def __init__(self, messages_topic: str) -> None:
        self._topic = f"{messages_topic}/"

    def of(self, marq_id: str) -> str:
        """Return the SQS id of a message."""
        if marq_id.startswith(self._topic):
            place = marq_id[len(self._topic) :]
            if "/" in place and _PLACE.fullmatch(place) is not None:
                return place.replace("/", "-")
        data = marq_id.encode()
        text = "m" + urlsafe_b64encode(data).decode().rstrip("=")
        return text if len(text) <= MAX_ID else "h" + sha256(data).hexdigest()[:32]

    def marq_id(self, message_id: str) -> str | None:
        """Return Marq's id, or None if the SQS id is a digest or not one of this endpoint's."""
        marq_id = self._read(message_id)
        # Otherwise a text that only resembles an id would be a second name for the same message.
        return marq_id if marq_id is not None and self.of(marq_id) == message_id else None

    def _read(self, message_id: str) -> str | None:
        if _PLACE.fullmatch(message_id) is not None:
            return self._topic + message_id.replace("-", "/")
        if not message_id.startswith("m") or message_id == "m":
            return None
        try:
            return urlsafe_b64decode(message_id[1:] + "=" * (-(len(message_id) - 1) % 4)).decode()
        except ValueError:
            return None
