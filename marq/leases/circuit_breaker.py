"""The circuit breaker of a queue: if most messages fail, a service that they need is probably down, so they wait.

The breaker opens at a failure rate of recent outcomes. Its state decides which messages are delivered::

    closed     all messages are delivered
    open       no message is delivered or read, and prefetched ones are released; until the pause ends
    half-open  one message is delivered; its success closes the breaker, its failure begins another pause

**An outage must not use up attempts.** A failure counts as an attempt only if a message of the queue has succeeded
since the previous failure: then the service works, and the message is at fault. So an outage of any length costs a
single attempt per consumer, for all messages together. A message that fails while others succeed is dead-lettered as
usual; a message that is alone in its queue is retried until another one succeeds.

Only a failure can open the breaker, and only once there are ``window`` outcomes since it was last closed. A success
never opens it, although it may be the outcome that fills the window.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from marq.leases.failure_log import traceback_text
from marq.settings.queue import Breaker
from marq.wire.record_headers import uncounted

if TYPE_CHECKING:
    from marq.leases.message import Message

log = logging.getLogger("marq")

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
#: A message that is released repeatedly waits for at most this many pauses.
MAX_PAUSES = 10


class HandlerCall:
    """One call of a handler: it fails once, however many messages it had."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        #: Why the attempt does not count for a breaker's queue; empty if it counts.
        self._reasons: dict[QueueBreaker, str] = {}
        self._traceback: str | None = None
        #: Whether the attempt counts if an operator has cancelled the call; None if no operator has.
        self.cancelled: bool | None = None

    def failed(self, breaker: QueueBreaker | None) -> str:
        """Tell a breaker once that the call failed; return why the attempt does not count there, empty if it counts."""
        if breaker is None:
            return ""
        if breaker not in self._reasons:
            self._reasons[breaker] = breaker.failed(self._messages)
        return self._reasons[breaker]

    def traceback(self, error: BaseException) -> str:
        """Return the traceback of the exception of this call, formatted once for all messages."""
        if self._traceback is None:
            self._traceback = traceback_text(error)
        return self._traceback

    def has_failed(self, breaker: QueueBreaker) -> bool:
        """Whether this breaker knows that the call failed."""
        return breaker in self._reasons


class QueueBreaker:
    """The breaker of one queue; it calls ``opened`` when it opens or begins another pause."""

    def __init__(
        self, queue: str, settings: Breaker, clock: Callable[[], float], opened: Callable[[QueueBreaker], None]
    ) -> None:
        self.queue = queue
        self.settings = settings
        #: How often it opened.
        self.openings = 0
        self._clock = clock
        self._opened = opened
        #: Whether each of the latest calls failed, since the breaker was last closed.
        self._outcomes: deque[bool] = deque(maxlen=settings.window)
        #: The end of the pause; None if closed.
        self._until_s: float | None = None
        self._test: Message | None = None
        self._succeeded = False

    @property
    def state(self) -> str:
        if self._until_s is None:
            return CLOSED
        return OPEN if self._clock() < self._until_s else HALF_OPEN

    @property
    def pause_left_s(self) -> float:
        """Seconds until the next message is delivered; 0 unless open."""
        return 0.0 if self._until_s is None else max(self._until_s - self._clock(), 0.0)

    def room(self, wanted: int) -> int:
        """Return how many of the ``wanted`` messages to read."""
        if self._until_s is None:
            return wanted
        return min(wanted, int(self.state == HALF_OPEN and self._test is None))

    def admit(self, messages: Sequence[Message]) -> int:
        """Return how many of these messages, from the first, to deliver."""
        count = self.room(len(messages))
        if count and self._until_s is not None:
            self._test = messages[0]
            log.info("circuit breaker half-open, one message is delivered: queue=%s", self.queue)
        return count

    def delay_ms(self, message: Message) -> int:
        """Return a released message's delay; it grows with each release, because other queues of the group are read."""
        pauses = min(1 + uncounted(message._record.headers), MAX_PAUSES) - 1
        return max(int((self.pause_left_s + pauses * self.settings.reset_timeout_ms / 1000) * 1000), 1)

    def finished(self) -> None:
        """Allow another test message if the current one ended without success or failure."""
        if self._test is not None and self._test.offset not in self._test._batch.open:
            self._test = None

    def succeeded(self, messages: Sequence[Message]) -> None:
        """Record that a handler returned."""
        if self._until_s is None:
            self._outcomes.append(False)
            self._succeeded = True
        elif self._test in messages:
            self._outcomes.clear()
            self._until_s, self._test, self._succeeded = None, None, True
            log.warning("circuit breaker closed: queue=%s", self.queue)

    def failed(self, messages: Sequence[Message]) -> str:
        """Record that a handler failed; return why the attempt does not count, empty if it counts."""
        if (state := self.state) != CLOSED:
            if self._test in messages:
                self._open()
            return f"is {state}"
        succeeded, self._succeeded = self._succeeded, False
        self._outcomes.append(True)
        window = self.settings.window
        # Not `failures >= failure_rate * window`: 0.55 * 100 is more than 55.
        if len(self._outcomes) == window and self._outcomes.count(True) / window >= self.settings.failure_rate:
            self._open()
            return "has opened"
        return "" if succeeded else "saw no success before"

    def _open(self) -> None:
        self._until_s = self._clock() + self.settings.reset_timeout_ms / 1000
        self._test = None
        self.openings += 1
        log.warning(
            "circuit breaker open, no message is delivered: queue=%s reset_timeout=%gs", self.queue,
            self.settings.reset_timeout_ms / 1000,
        )  # fmt: skip
        self._opened(self)
