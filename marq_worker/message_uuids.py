"""SQS message ids: UUIDs, as clients such as Spring Cloud AWS expect.

An id is computed from Marq's id, so it is the same at every delivery and at every endpoint:

======================  =============================================  =======  =============================
message                 UUID                                           version  Marq's id can be read from it
======================  =============================================  =======  =============================
in the messages topic   ``PPPPPPPP-TTTT-8TTT-8OOO-OOOOOOOOOOOO``: the  8        yes
                        digits of partition and offset, and of a
                        digest of the topic
any other               a digest of the topic and of Marq's id         5        no
======================  =============================================  =======  =============================
"""

from __future__ import annotations

import re
from hashlib import sha256
from uuid import UUID, uuid5

#: Numbers as Marq writes them; with leading zeros, the id would be a different one.
_PLACE = re.compile(r"(0|[1-9][0-9]{0,9})/(0|[1-9][0-9]{0,18})", re.ASCII)


_UUID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-8[0-9a-f]{3}-8([0-9a-f]{3})-([0-9a-f]{12})", re.ASCII)


def readable_id(identity: str, messages_topic: str) -> str:
    """Return the id of the message in the messages topic that an SQS id names; any other id as it is."""
    if (match := _UUID.fullmatch(identity.lower())) is None:
        return identity
    return f"{messages_topic}/{int(match[1], 16)}/{int(match[2] + match[3], 16)}"


class MessageIds:
    """Computes SQS ids.

    Args:
        messages_topic: the namespace's (``Names.messages``).
        topic_id: distinguishes this topic from those of other clusters, and from a deleted one of the same name.
    """

    def __init__(self, messages_topic: str, topic_id: str) -> None:
        self._topic = f"{messages_topic}/"
        digest = sha256(f"{messages_topic}/{topic_id}".encode()).hexdigest()
        self._middle = f"-{digest[:4]}-8{digest[4:7]}-8"
        self._namespace = UUID(digest[:32])

    def of(self, marq_id: str) -> str:
        """Return the SQS id of a message."""
        if marq_id.startswith(self._topic) and (place := _PLACE.fullmatch(marq_id, len(self._topic))):
            partition, offset = int(place[1]), int(place[2])
            if partition < 2**32 and offset < 2**60:
                digits = f"{offset:015x}"
                return f"{partition:08x}{self._middle}{digits[:3]}-{digits[3:]}"
        return str(uuid5(self._namespace, marq_id))
