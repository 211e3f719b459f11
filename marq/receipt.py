"""What a producer returns for a message that the broker has confirmed."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """Where the message stands; :attr:`id` is the same as ``message.id`` at every delivery."""

    queue: str
    topic: str
    partition: int
    offset: int

    @property
    def id(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"
