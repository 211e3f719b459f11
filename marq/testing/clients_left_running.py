"""The warning about clients that are still running when a test ends."""

from __future__ import annotations

import warnings

from marq.testing.memory import Memory


class ClientLeftRunning(UserWarning):
    """A test ended without stopping a client that it started."""


def warn_of_running(memory: Memory) -> None:
    """Warn about the clients of a broker that nothing has stopped."""
    if left := memory.running:
        warnings.warn(
            f"{memory.address}: left running at the end: {', '.join(left)}. Use `async with`, or call stop(), so that"
            " prefetched messages are released and outcomes are written",
            ClientLeftRunning,
            stacklevel=4,
        )
