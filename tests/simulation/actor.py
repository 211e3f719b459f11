"""A process of the simulated world: it has a clock of its own, and may pause or be killed at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import World


class Actor:
    """Steps are scheduled with :meth:`later`: none is taken by a dead process, and a paused one takes them late."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.paused_until_ms = 0
        self._offset_ms = world.rng.randint(0, 10**9)
        self._drift = 1 + world.rng.uniform(-1, 1) * 2e-4

    def monotonic_ms(self) -> int:
        return int(self._offset_ms + self.world.now_ms * self._drift)

    def later(self, delay_ms: int, step: Callable[..., None], *arguments: Any) -> None:
        self.world.schedule(delay_ms, self._step, step, arguments)

    def _step(self, step: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.paused_until_ms > self.world.now_ms:
            self.world.schedule(self.paused_until_ms - self.world.now_ms, self._step, step, arguments)
            return
        if self.world.faulty and self.suffers():
            # What was to be done is done after the pause, or never.
            self.world.schedule(0, self._step, step, arguments)
            return
        step(*arguments)

    def suffers(self) -> bool:
        """Whether something befell this process just now."""
        return False

    def crash(self) -> None:
        self.alive = False

    def pause(self, duration_ms: int) -> None:
        self.paused_until_ms = self.world.now_ms + duration_ms
