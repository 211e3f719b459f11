"""The pauses of an owner before it takes its partition over again."""

from __future__ import annotations

import random

#: The first pause and the longest one.
RETRY_SECONDS = (0.2, 5.0)
#: Maximum number of doublings; after a thousand, the pause would not fit into a float.
_MAX_DOUBLINGS = 10


class RetryPauses:
    """Pauses that double after each failure in a row.

    A takeover resets them, unless another worker keeps fencing this one before it has written rows. Two workers that
    both take themselves for the owner thus give each other time to finish.
    """

    def __init__(self) -> None:
        self._failures = self._fencings = 0

    def took_over(self) -> None:
        self._failures = self._fencings

    def fenced(self) -> None:
        self._fencings += 1

    def wrote(self) -> None:
        self._failures = self._fencings = 0

    def next_s(self) -> float:
        """Return the seconds to wait after a failure."""
        first, longest = RETRY_SECONDS
        pause_s = min(first * 2.0 ** min(self._failures, _MAX_DOUBLINGS), longest)
        self._failures += 1
        # Random, so that two workers do not fence each other at the same moments.
        return pause_s * random.uniform(0.5, 1.0)
