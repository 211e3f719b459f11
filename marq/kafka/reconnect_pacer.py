"""Decides which client of a process may try to reach a broker that is down.

All clients that use the same cluster share one :class:`Pacer` (:mod:`marq.kafka.paced_clients`). One of them tries a
broker that is down, after an exponential backoff with jitter; the others wait for the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from aiokafka.errors import KafkaConnectionError, KafkaError

from marq.kafka.repeated_warnings import SUMMARY_S
from marq.settings.client import DEFAULT_CONNECT_TIMEOUT_MS
from marq.wire.errors import reason_of

log = logging.getLogger("marq")

#: First and longest pause between two attempts to reach a broker that is down. Jitter shortens each by up to a half.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
#: Maximum number of failed attempts of a process to reach one cluster in any second.
MAX_FAILURES_PER_SECOND = 5
#: Maximum number of concurrent attempts to reach a broker that is up. They would all fail together when it goes down.
MAX_CONCURRENT = 2
#: How long a failed attempt or a broken connection is evidence that the broker is down.
FRESH_S = MAX_PAUSE_S + 0.5
#: An attempt that takes longer no longer keeps others from trying: its event loop may be blocked by user code.
MAX_TURN_S = 2.0
#: Report a broker that has never answered only after this time, because a failed start has its own error by then.
SILENT_START_S = 1.5 * DEFAULT_CONNECT_TIMEOUT_MS / 1000

_NEVER = float("-inf")
FAILURES = (OSError, TimeoutError, KafkaError)

T = TypeVar("T")
Address = tuple[str, int]


def _text_of(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class _Turn:
    """One attempt; ``counted``: whether it counts against the limit before its outcome is known."""

    address: Address
    began: float
    counted: bool


@dataclass(slots=True)
class _Broker:
    """One broker as this process sees it; times are those of the pacer's clock."""

    #: Attempts under way.
    trying: list[_Turn] = field(default_factory=list)
    #: Failed rounds since it was last up, and failed rounds in total.
    failed: int = 0
    rounds: int = 0
    attempts: int = 0
    down_at: float = 0.0
    failed_at: float = _NEVER
    #: When a connection last broke.
    lost_at: float = _NEVER
    next_at: float = 0.0
    #: Why the broker seems to be down; None after a successful attempt.
    error: BaseException | None = None
    answered: bool = False
    #: Callers that wait for a turn, first come, first served.
    waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = field(default_factory=dict)
    #: When the log last mentioned the outage; None while it has not.
    logged_at: float | None = None

    @property
    def seen_down_at(self) -> float:
        return max(self.failed_at, self.lost_at)

    def log_failure(self, address: Address, error: BaseException, now: float) -> None:
        down_s = now - self.down_at
        if self.logged_at is None:
            if not self.answered and down_s < SILENT_START_S:
                return
            log.warning("broker unreachable address=%s error=%s", _text_of(address), reason_of(error))
        elif now - self.logged_at >= SUMMARY_S:
            log.warning(
                "broker still unreachable address=%s seconds=%.0f attempts=%d error=%s",
                _text_of(address), down_s, self.attempts, reason_of(error),
            )  # fmt: skip
        else:
            return
        self.logged_at = now

    def log_return(self, address: Address, now: float) -> None:
        if self.logged_at is not None:
            # A warning like its counterpart, so that a log with the one line also has the other.
            log.warning(
                "broker reachable again address=%s seconds=%.0f attempts=%d",
                _text_of(address), now - self.down_at, self.attempts,
            )  # fmt: skip


class Pacer:
    """Paces the attempts of one process to connect to one cluster; safe for use from several threads.

    Args:
        clock: monotonic seconds.
        jitter: a factor for each pause.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._brokers: dict[Address, _Broker] = defaultdict(_Broker)
        #: When the attempts of the last second began: those to reach brokers that are down, and others that failed.
        self._spent: deque[float] = deque()

    async def connect(
        self,
        address: Address,
        attempt: Callable[[], Awaitable[T]],
        others: Iterable[Address] = (),
        *,
        patient: bool = True,
    ) -> T:
        """Await ``attempt()`` when it is this caller's turn; return its result.

        Args:
            address: the broker's host and port.
            attempt: opens a connection.
            others: the other brokers of the cluster; if one of them may be up, do not wait for a broker that is down.
            patient: whether to wait for a broker that is down.

        Raises:
            KafkaConnectionError: the broker is down, and another caller's attempt failed or none is due.
            OSError, TimeoutError, KafkaError: this attempt failed.
        """
        turn = await self._turn(address, tuple(others), patient)
        try:
            connection = await attempt()
        except BaseException as error:
            self._end(turn, error)
            raise
        self._end(turn, None)
        return connection

    def lost(self, address: Address) -> None:
        """Record that a connection to a broker broke, which reveals an outage before any new attempt fails."""
        with self._lock:
            broker = self._brokers[address]
            broker.lost_at = self._clock()
            broker.error = broker.error or KafkaConnectionError("the connection broke")

    @property
    def in_outage(self) -> bool:
        """Whether an attempt failed or a connection broke just now; clients that recover are slower than the broker."""
        with self._lock:
            latest_s = max((broker.seen_down_at for broker in self._brokers.values()), default=_NEVER)
        return self._clock() - latest_s < FRESH_S

    def fresh_error(self, address: Address, within_s: float = 0.0) -> BaseException | None:
        """Return why a broker seems to be down; None if it is up, or the last sign of an outage is old.

        "Old" means at least ``FRESH_S`` and ``within_s``.
        """
        with self._lock:
            broker = self._brokers.get(address)
            if broker is None or self._clock() - broker.seen_down_at >= max(within_s, FRESH_S):
                return None
            return broker.error

    def has_answered(self, address: Address) -> bool:
        """Whether this process has reached a broker before."""
        with self._lock:
            broker = self._brokers.get(address)
            return broker is not None and broker.answered

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    async def _turn(self, address: Address, others: tuple[Address, ...], patient: bool) -> _Turn:
        loop, rounds = asyncio.get_running_loop(), None
        while True:
            with self._lock:
                broker = self._brokers[address]
                rounds = broker.rounds if rounds is None else rounds
                if broker.failed and broker.rounds != rounds:
                    raise self._refusal(address, broker)
                wait_s = self._wait_s(broker)
                if wait_s <= 0:
                    broker.attempts += 1
                    turn = _Turn(address, self._clock(), counted=broker.failed > 0)
                    broker.trying.append(turn)
                    if turn.counted:
                        self._spent.append(turn.began)
                    return turn
                if broker.failed and (not patient or any(not self._is_down(other) for other in others)):
                    raise self._refusal(address, broker)
                waiter = loop.create_future()
                broker.waiters[waiter] = loop
            try:
                await asyncio.wait([waiter], timeout=wait_s)
            except asyncio.CancelledError:
                if waiter.done():
                    self._wake(broker)  # pass the turn on
                raise
            finally:
                with self._lock:
                    broker.waiters.pop(waiter, None)

    def _wait_s(self, broker: _Broker) -> float:
        now = self._clock()
        begun = [turn.began for turn in broker.trying if now - turn.began < MAX_TURN_S]
        if len(begun) >= (1 if broker.failed else MAX_CONCURRENT):
            return min(begun) + MAX_TURN_S - now
        while self._spent and self._spent[0] <= now - 1:
            self._spent.popleft()
        crowded_s = self._spent[0] + 1 - now if len(self._spent) >= MAX_FAILURES_PER_SECOND else 0.0
        return max(crowded_s, broker.next_at - now if broker.failed else 0.0)

    def _is_down(self, address: Address) -> bool:
        broker = self._brokers.get(address)
        return broker is not None and broker.failed > 0

    def _refusal(self, address: Address, broker: _Broker) -> KafkaConnectionError:
        assert broker.error is not None, "the broker is down"
        return KafkaConnectionError(f"broker {_text_of(address)} is unreachable: {reason_of(broker.error)}")

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _end(self, turn: _Turn, error: BaseException | None) -> None:
        with self._lock:
            broker = self._brokers[turn.address]
            broker.trying.remove(turn)
            if error is None:
                if turn.counted and turn.began in self._spent:
                    self._spent.remove(turn.began)
                self._succeed(turn.address, broker)
            else:
                if not turn.counted:
                    self._spent.append(turn.began)
                # A cancelled attempt says nothing about the broker.
                if isinstance(error, FAILURES):
                    self._fail(turn, broker, error)
        self._wake(broker)

    def _wake(self, broker: _Broker) -> None:
        """Wake the waiting callers that can continue: all after a failed attempt, else the next in line."""
        with self._lock:
            number = None if broker.failed else MAX_CONCURRENT
            waiters = list(itertools.islice(broker.waiters.items(), number))
            for waiter, _ in waiters:
                del broker.waiters[waiter]
        for waiter, loop in waiters:
            # If the loop was closed meanwhile, nothing waits in it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_release, waiter)

    def _fail(self, turn: _Turn, broker: _Broker, error: BaseException) -> None:
        now = self._clock()
        broker.error = error
        if not broker.failed:
            broker.down_at, broker.attempts, broker.logged_at = now, len(broker.trying) + 1, None
        elif turn.began < broker.failed_at:
            return  # one of several that began together
        broker.failed += 1
        broker.rounds += 1
        broker.failed_at = now
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(broker.failed - 1, 30), MAX_PAUSE_S)
        broker.next_at = now + pause_s * self._jitter()
        broker.log_failure(turn.address, error, now)

    def _succeed(self, address: Address, broker: _Broker) -> None:
        if broker.failed:
            broker.log_return(address, self._clock())
        broker.failed, broker.error, broker.answered = 0, None, True


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
