"""The circuit breaker of a queue: while most messages fail, whatever their handlers call is out, and they wait.

interlock decides when it opens and closes: by the part of failures among the last outcomes. What that means for
messages is decided here::

    closed     everything is handed out
    open       nothing is, nothing is read, and what is held and not begun is given back; until the pause is over
    half-open  one message is handed out; its success closes the breaker, its failure begins another pause

**An outage must not use up attempts.** A failure counts as an attempt only if some message of the queue succeeded since
the failure before it: then what is called works, and the message is at fault. So however long an outage is, it costs
all messages together one attempt at each consumer. A message that fails while all others are handled dies as it does
without a breaker; one that is alone in its queue and fails again and again is tried until another one succeeds.

Successes cost nothing but a count: a success alone never opens a breaker, so they are told at the next failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from marq.core.copies import uncounted
from marq.core.errors import ConfigError
from marq.core.queue import Breaker

if TYPE_CHECKING:
    from marq.message import Message

log = logging.getLogger("marq")

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
#: A message that is given back again and again waits for so many pauses at the most.
MAX_PAUSES = 10
_NEVER_SLOW_S = 1e9


class Call:
    """What a handler was called with: it fails once, however many messages it had."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._counts: dict[QueueBreaker, bool] = {}

    def counts(self, breaker: QueueBreaker | None) -> bool:
        """Whether the failure of the call counts as an attempt of a message of this breaker's queue."""
        if breaker is None:
            return True
        if breaker not in self._counts:
            self._counts[breaker] = breaker.failed(self._messages)
        return self._counts[breaker]


class _Failed(Exception):
    """Stands for a handler's exception, whose traceback is its own."""


class _Clock:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self.monotonic = now_s


class QueueBreaker:
    """``opened`` is called when it opens, or goes on being open.

    Raises:
        ConfigError: the library is not installed.
    """

    def __init__(
        self, queue: str, settings: Breaker, clock: Callable[[], float], opened: Callable[[str], None]
    ) -> None:
        self.queue = queue
        self.settings = settings
        #: How often it opened.
        self.openings = 0
        self._clock = clock
        self._opened = opened
        self._circuit = circuit(queue, settings, clock)
        #: The end of the pause; None while it is closed.
        self._until_s: float | None = None
        self._test: Message | None = None
        self._successes = 0
        self._succeeded = False

    @property
    def state(self) -> str:
        if self._until_s is None:
            return CLOSED
        return OPEN if self._clock() < self._until_s else HALF_OPEN

    @property
    def pause_left_s(self) -> float:
        """How long nothing is handed out; 0 unless it is open."""
        return 0.0 if self._until_s is None else max(self._until_s - self._clock(), 0.0)

    def room(self, wanted: int) -> int:
        """Return how many of so many messages to read."""
        if self._until_s is None:
            return wanted
        return min(wanted, int(self.state == HALF_OPEN and self._test is None))

    def admit(self, messages: Sequence[Message]) -> int:
        """Return how many of these messages, the first ones, to hand out."""
        count = self.room(len(messages))
        if count and self._until_s is not None:
            self._test = messages[0]
            log.info("circuit breaker half-open, one message is let through: queue=%s", self.queue)
        return count

    def delay_ms(self, message: Message) -> int:
        """Return how long a message waits that is given back: longer each time, for others of a group are read on."""
        pauses = min(1 + uncounted(message._record.headers), MAX_PAUSES) - 1
        return max(int((self.pause_left_s + pauses * self.settings.pause_ms / 1000) * 1000), 1)

    def finished(self) -> None:
        """Some messages have ended: was the test among them, without success or failure, there may be another one."""
        if self._test is not None and self._test.offset not in self._test._lease.open:
            self._test = None

    def succeeded(self, messages: Sequence[Message]) -> None:
        """A handler returned."""
        if self._until_s is None:
            self._successes += 1
            self._succeeded = True
        elif self._is_test(messages):
            self._tell(failed=False)
            self._until_s, self._test, self._succeeded = None, None, True
            log.warning("circuit breaker closed: queue=%s", self.queue)

    def failed(self, messages: Sequence[Message]) -> bool:
        """A handler failed; return whether the attempt counts."""
        if self._until_s is not None:
            if self._is_test(messages):
                self._tell(failed=True)
                self._open()
            return False
        counts, self._succeeded = self._succeeded, False
        for _ in range(min(self._successes, self.settings.window)):
            self._tell(failed=False)
        self._successes = 0
        self._tell(failed=True)
        if self._circuit.state.value == "open":
            self._open()
            return False
        return counts

    def _is_test(self, messages: Sequence[Message]) -> bool:
        return self._test in messages

    def _open(self) -> None:
        self._until_s = self._clock() + self.settings.pause_ms / 1000
        self._test = None
        self.openings += 1
        log.warning(
            "circuit breaker open, no message is handed out: queue=%s pause=%gs", self.queue,
            self.settings.pause_ms / 1000,
        )  # fmt: skip
        self._opened(self.queue)

    def _tell(self, *, failed: bool) -> None:
        try:
            with self._circuit:
                if failed:
                    raise _Failed
        except _Failed:
            pass


def circuit(queue: str, settings: Breaker, clock: Callable[[], float]) -> Any:
    """Return interlock's circuit breaker with a queue's settings.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import interlock  # not at the top: marq needs it for queues with a breaker alone
    except ImportError as error:
        raise ConfigError(
            f"queue {queue!r}: its settings have a breaker, for which a library is missing: pip install"
            f" 'marq[breaker]', or take the breaker away: faust -A app queue {queue} --set breaker=false"
        ) from error
    return interlock.CircuitBreaker(
        name=queue,
        config=interlock.Config(
            failure_rate_threshold=settings.failures,
            minimum_number_of_calls=settings.window,
            window_size=settings.window,
            permitted_calls_in_half_open=1,
            wait_duration_in_open=settings.pause_ms / 1000,
            slow_call_duration_threshold=_NEVER_SLOW_S,
        ),
        clock=_Clock(clock),
    )
