"""What the settings of queues say about messages that are handed out: errors and circuit breakers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from marq.breaker import QueueBreaker
from marq.core.errors import ConfigError
from marq.core.queue import QueueSettings
from marq.failures import Failures
from marq.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("marq")


class Rules:
    """The rules of one engine; ``opened`` is called with a queue whose breaker has opened.

    Raises:
        ConfigError: one of ``queues`` has a breaker, and the library is not installed.
    """

    def __init__(
        self,
        settings: Callable[[str], QueueSettings],
        queues: Iterable[str],
        clock: Callable[[], float],
        opened: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._opened = opened
        self._failures: dict[str, Failures] = {}
        self._breakers: dict[str, QueueBreaker] = {}
        self._refused: set[str] = set()
        for queue in queues:
            self._make(queue, settings(queue))

    @property
    def breakers(self) -> Mapping[str, QueueBreaker]:
        """The breaker of each queue that has one."""
        return self._breakers

    def apply(self, lease: Lease) -> None:
        """Let a lease's messages go by what holds now."""
        settings = self._settings(lease.queue)
        if settings.errors:
            known = self._failures.get(lease.queue)
            if known is None or known.errors is not settings.errors:
                known = self._failures[lease.queue] = Failures(settings.errors)
            lease.errors = known
        lease.breaker = self._breaker(lease.queue, settings)

    def room(self, queue: str, wanted: int) -> int:
        """Return how many of so many messages of a queue may be read."""
        breaker = self._breaker(queue, self._settings(queue))
        return wanted if breaker is None else breaker.room(wanted)

    def finished(self, queue: str) -> None:
        """Some messages of a queue have ended."""
        breaker = self._breakers.get(queue)
        if breaker is not None:
            breaker.finished()

    def _breaker(self, queue: str, settings: QueueSettings) -> QueueBreaker | None:
        known = self._breakers.get(queue)
        if (None if known is None else known.settings) == settings.breaker:
            return known
        self._breakers.pop(queue, None)
        try:
            self._make(queue, settings)
        except ConfigError as error:
            if queue not in self._refused:
                log.error("going on without a breaker: %s", error)
            self._refused.add(queue)
        return self._breakers.get(queue)

    def _make(self, queue: str, settings: QueueSettings) -> None:
        if settings.breaker is not None:
            self._breakers[queue] = QueueBreaker(queue, settings.breaker, self._clock, self._opened)
