"""A process of the simulated world: it has clocks of its own, and may pause or be killed at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import World


class Actor:
    """Steps are scheduled with :meth:`later`: a dead process takes none, and a paused one takes them late."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused_until_ms = 0
        #: The version of the queues' definitions that it has heard of.
        self.known = world.definitions.newest
        self._offset_ms = world.rng.randint(0, 10**9)
        self._drift = 1 + world.rng.uniform(-1, 1) * 2e-4
        #: The wall clock of its machine, on which no decision may depend.
        self._wall_skew_ms = world.rng.choice([0, 0, world.rng.randint(-600_000, 600_000)])

    def monotonic_ms(self) -> int:
        return int(self._offset_ms + self.world.now_ms * self._drift)

    def wall_ms(self) -> int:
        return self.world.wall_ms() + self._wall_skew_ms

    def step_wall_clock(self) -> None:
        """Change the wall clock, as its administrator may."""
        self._wall_skew_ms = self.world.rng.randint(-600_000, 600_000)

    def later(self, delay_ms: int, step: Callable[..., None], *arguments: Any) -> None:
        self.world.schedule(delay_ms, self._step, step, arguments)

    def _step(self, step: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        world = self.world
        if self.paused_until_ms > world.now_ms:
            world.schedule(self.paused_until_ms - world.now_ms, self._step, step, arguments)
            return
        if world.faulty and self.suffers():
            # The step is taken after the pause, or never.
            world.schedule(0, self._step, step, arguments)
            return
        step(*arguments)

    def suffers(self) -> bool:
        """Return whether a fault hits this process now; subclasses draw and apply it."""
        return False

    def hear(self, version: int) -> None:
        """Learn of a change of the queues' definitions; later changes may overtake earlier ones."""
        self.known = max(self.known, version)

    def crash(self) -> None:
        self.alive = False
        self.world.history.add("nemesis", "info", "kill", target=self.name)

    def pause(self, duration_ms: int) -> None:
        """Stop for a while; if the whole machine is suspended, its monotonic clock stops, too."""
        world = self.world
        self.paused_until_ms = world.now_ms + duration_ms
        world.history.add("nemesis", "invoke", "pause", target=self.name)
        world.schedule(duration_ms, self._resume)
        if world.hit(world.faults.suspended):
            self._offset_ms -= duration_ms
            world.stats["suspensions"] += 1
            world.history.add("nemesis", "info", "clock", target=self.name)

    def _resume(self) -> None:
        self.world.history.add("nemesis", "ok", "pause", target=self.name)
