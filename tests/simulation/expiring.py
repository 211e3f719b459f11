"""Messages that expire: those of some senders by a header, those of some queues by a setting."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from marq.settings.queue import DEAD_LETTER, DROP, ORDERED_BY_KEY
from marq.wire.names import EXPIRES_AT_HEADER
from marq.wire.record_headers import NEVER

#: How long after they are sent messages expire; some have expired for a minute when they are sent.
LIVES_MS = (-60_000, 50, 300, 1_500, 10_000)


class Expiring:
    """One seed's choices about expiry; drawn separately, so that worlds without expiry stay as they were."""

    def __init__(self, seed: int, share: float | None) -> None:
        self._lots = lots = random.Random(f"expiry {seed}")
        chosen = lots.choice([0.0, 0.0, 0.0, 0.2, 0.6])
        #: How many messages expire, and how many queues have the setting.
        self._share = chosen if share is None else share

    def choose(self, documents: Mapping[str, dict[str, Any]]) -> None:
        """Let the messages of some queues that do not go by keys expire."""
        for document in documents.values():
            document |= self.document(document)

    def document(self, former: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings for a queue with these others."""
        if not self._share:
            return {}
        expired = self._lots.choice([DROP, DEAD_LETTER])
        by_key = former.get("ordering") == ORDERED_BY_KEY or "limits" in former
        if by_key or self._lots.random() >= self._share:
            return {"expired": expired}
        return {"expired": expired, "expires_after": self._lots.choice([0.1, 0.5, 3.0])}

    def header(self, wall_ms: int) -> list[tuple[str, bytes | None]]:
        """Return the header of a message that is sent now, if it has one."""
        if not self._share or self._lots.random() >= self._share:
            return []
        if self._lots.random() < 0.1:
            return [(EXPIRES_AT_HEADER, self._lots.choice([NEVER, b"soon"]))]
        return [(EXPIRES_AT_HEADER, b"%d" % (wall_ms + self._lots.choice(LIVES_MS)))]
