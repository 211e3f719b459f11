"""How many messages to read at once while the keys of those that were read are blocked.

They satisfy no call, so without more of them a receiver that reads what calls ask for would take a cycle for each few
messages. It reads in larger and larger steps until a message can be delivered.
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
        """Return how many messages to read if so many are wanted."""
        return max(room, min(room << min(self._cycles, _MAX_DOUBLINGS), MAX_STEP))
