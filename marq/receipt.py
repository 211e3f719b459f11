"""What a producer returns for a message that the broker has confirmed."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """Where the message stands; :attr:`id` is the same as ``message.id`` at every delivery.

    A delayed message does not stand anywhere yet: ``topic`` is then a name that the producer has drawn, and
    ``partition`` and ``offset`` are its numbers.
    """

    queue: str
    topic: str
    partition: int
    offset: int

    @property
    def id(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"
