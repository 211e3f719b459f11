"""How often somebody may do something: token buckets, one for each address, of a bounded number of addresses."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

#: Addresses that are remembered; of more, those that were quiet for longest begin anew.
MAX_ADDRESSES = 1_024


class Rate:
    """``burst`` at once, and ``per_second`` in the long run."""

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        #: Address: what it has left, and when that was so.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Return how long until the next one is allowed; 0: now."""
        return max(0.0, (1.0 - self._tokens(address)) / self._per_second)

    def spend(self, address: str) -> None:
        """Count one."""
        self._add(address, -1.0)

    def give_back(self, address: str) -> None:
        """Take back that one was counted."""
        self._add(address, 1.0)

    def _add(self, address: str, count: float) -> None:
        self._left[address] = self._tokens(address) + count, self._clock()
        self._left.move_to_end(address)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)

    def _tokens(self, address: str) -> float:
        left, then_s = self._left.get(address, (self._burst, self._clock()))
        return min(self._burst, left + (self._clock() - then_s) * self._per_second)
