"""The receipt that a producer returns for a message that the broker has confirmed."""

from __future__ import annotations

from typing import NamedTuple

from marq.wire.errors import ConfigError
from marq.wire.markers import ANY_QUEUE


class Receipt(NamedTuple):
    """The position of a sent message; :attr:`id` equals ``message.id`` at every delivery.

    A delayed message has no record yet: ``topic`` is then a random name that the producer chose, and ``partition`` and
    ``offset`` are its numbers. ``sequence`` is only set for a message with a deduplication id. A queue accepts messages
    with the same ordering key (or, if they have no key, with the same id) in the order of ``sequence``.
    """

    queue: str
    topic: str
    partition: int
    offset: int
    sequence: int | None = None

    @classmethod
    def of(cls, message_id: str, queue: str = ANY_QUEUE) -> Receipt:
        """Return the receipt of a message id.

        Args:
            queue: the queue, which the id does not contain. Without it, ``cancel()`` and ``reschedule()`` apply to the
                messages of all queues on the topic.

        Raises:
            ConfigError: the text is not a message id.
        """
        topic, _, numbers = message_id.rpartition("/")
        topic, _, partition = topic.rpartition("/")
        try:
            if topic and len(topic.encode()) < 256:
                return cls(queue, topic, _number(partition, 32), _number(numbers, 62))
        except ValueError:
            pass
        raise ConfigError(f"expected the id of a message, topic/partition/offset, not {message_id!r}")

    @property
    def id(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


def _number(text: str, bits: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20) or int(text) >= 2**bits:
        raise ValueError
    return int(text)
