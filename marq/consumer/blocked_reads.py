"""How many messages to read at once while the keys of all messages read so far are blocked.

Blocked messages satisfy no call. A receiver that reads only as many messages as calls ask for would need a cycle for
every few of them, so it reads in larger and larger steps until a message can be delivered.
"""

from __future__ import annotations

#: The most messages of a step.
MAX_STEP = 1_000
_MAX_DOUBLINGS = 10


class BlockedReads:
    """The steps of one receiver."""

    def __init__(self) -> None:
        #: How many cycles in a row have read only messages that wait behind others.
        self._cycles = 0

    def note(self, *, blocked: bool) -> None:
        """Note whether all messages of a cycle wait behind others."""
        self._cycles = self._cycles + 1 if blocked else 0

    def step(self, room: int) -> int:
        """Return how many messages to read when ``room`` of them are wanted."""
        return max(room, min(room << min(self._cycles, _MAX_DOUBLINGS), MAX_STEP))
