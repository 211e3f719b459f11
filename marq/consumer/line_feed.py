"""What the lines of a queue with ordering need from their receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from marq.consumer.held_batch import HeldBatch
from marq.consumer.line_places import Place
from marq.settings.queue import QueueSettings

if TYPE_CHECKING:
    from marq.consumer.one_per_key import Lines


class Feed(Protocol):
    """The callbacks through which lines deliver their first messages or acquire them again."""

    #: Whether to stop delivering.
    stopped: bool

    def ready(self, held: HeldBatch, offsets: Sequence[int], values: Sequence[bytes | None]) -> None:
        """Deliver messages of a batch."""

    def again(self, lines: Lines, place: Place) -> None:
        """Acquire a message, after asking about it if it is foreign."""

    def later(self, lines: Lines, place: Place) -> None:
        """Call :meth:`Lines.due` at the place's ``due_s``."""

    def settled(self) -> None:
        """Continue after outcomes have become durable."""

    def added(self, lines: Lines, taken_s: float) -> None:
        """Check messages that were acquired at this time: a purge may have ended them."""

    def now_s(self) -> float: ...
    def settings(self, queue: str) -> QueueSettings: ...
