"""How long a released message waits before it is delivered again.

The wait is part of the fold of the log, so its jitter can't come from a random generator: it comes from a checksum of
the message's identity and attempt. Two trackers that fold the same marker therefore write the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential: ``base_ms`` after the first attempt, times ``factor`` after each further one, at most ``max_ms``.

    With ``delays_ms``: these in order, repeating the last one. With ``jitter`` the wait is between
    half of that and all of it, so that messages that failed together are not redelivered together.
    """

    base_ms: int = 1_000
    factor: float = 2.0
    max_ms: int = 600_000
    jitter: bool = True
    delays_ms: tuple[int, ...] = ()

    @property
    def longest_ms(self) -> int:
        """The longest wait after any attempt."""
        return max(self.delays_ms, default=self.max_ms)

    def delay_ms(self, attempt: int, seed: bytes) -> int:
        """Return the wait after ``attempt`` (from 1); ``seed`` identifies the message."""
        full = self._full_ms(attempt)
        if not self.jitter:
            return int(full)
        return int(full / 2 + full / 2 * (crc32(seed, attempt & 0xFFFFFFFF) / 0xFFFFFFFF))

    def _full_ms(self, attempt: int) -> float:
        if self.delays_ms:
            return self.delays_ms[min(attempt, len(self.delays_ms)) - 1]
        try:
            return min(self.base_ms * self.factor ** (attempt - 1), self.max_ms)
        except OverflowError:
            return self.max_ms
