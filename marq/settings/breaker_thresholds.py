"""When a queue's circuit breaker opens, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: it opens when a share ``failure_rate`` of the last ``window`` outcomes are failures.

    After ``reset_timeout_ms`` one message passes, whose outcome closes the breaker or starts another pause.
    """

    failure_rate: float = 0.5
    window: int = 20
    reset_timeout_ms: int = 30_000
