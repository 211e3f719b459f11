"""Asks which of the messages that wait in lines are still open after a purge of their queue.

A purge may end messages that a consumer has acquired and not delivered. Until the tracker has answered, the consumer
delivers none of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from itertools import count
from math import inf
from typing import Any

from marq.consumer.one_per_key import Lines
from marq.consumer.tracker_queries import open_messages, questions_about
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.purged_offsets import Purge
from marq.wire.markers import Resume, Resumed


class PurgedLines:
    """The purges of one receiver's queues with ordering.

    ``answers`` yields the answers to questions, ``begin`` starts a task, and ``settled`` delivers messages that have
    become ready.
    """

    def __init__(
        self,
        settings: ReceiverSettings,
        answers: Callable[[Sequence[Resume]], AsyncGenerator[tuple[Resume, list[Resumed]]]],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        settled: Callable[[], None],
        clock: Callable[[], float],
        new_holder: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._answers = answers
        self._begin = begin
        self._settled = settled
        self._clock = clock
        self._new_holder = new_holder
        self._numbers = count()
        #: The last purge of each queue, and when the queue delivered again.
        self._purges: dict[str, Purge | None] = {}
        self._purged_s: dict[str, float] = {}

    def deliver(self, queue: str, lines: Iterable[Lines]) -> bool:
        """Note that a queue is not paused, so no purge is running; return whether it was purged since the last call."""
        purge = self._settings.skipped(queue)
        if purge == self._purges.get(queue):
            return False
        self._purges[queue], self._purged_s[queue] = purge, self._clock()
        for each in lines:
            self._check(each)
        return True

    def added(self, lines: Lines, taken_s: float) -> None:
        """Check messages that were acquired at this time."""
        if taken_s <= self._purged_s.get(lines.queue, -inf):
            self._check(lines)

    def _check(self, lines: Lines) -> None:
        number = next(self._numbers)
        if offsets := lines.doubt(number):
            self._begin(self._resolve(lines, offsets, number))

    async def _resolve(self, lines: Lines, offsets: Sequence[int], number: int) -> None:
        questions = list(questions_about(lines.queue, lines.source, offsets, self._new_holder))
        async for _, parts in self._answers(questions):
            if lines.active:
                lines.resolve(number, open_messages(parts, self._clock()))
                self._settled()
