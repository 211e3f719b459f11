"""The queues topic: definitions change at run time, and each process learns of it at its own pace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lab.proof.history import settings_of
from marq.settings.definitions import DEFAULTS_KEY, Definitions, layer_key

if TYPE_CHECKING:
    from tests.simulation.actor import Actor
    from tests.simulation.world import World

#: How long a running process may take to hear of a change.
SLOWEST_NEWS_MS = 2_000


class QueuesTopic:
    """All versions of the definitions; each process knows the number of the version that it follows."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Version 0: the definitions of a process that has read nothing.
        self.versions = [Definitions()]

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    def of(self, actor: Actor) -> Definitions:
        return self.versions[actor.known]

    def begin(self, defaults: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Publish the definitions that exist before the first process starts."""
        self.publish({DEFAULTS_KEY: defaults, **{layer_key("file", q): each for q, each in documents.items()}})

    def change(self, *documents: tuple[str, Mapping[str, Any]]) -> None:
        """Change queues; a process hears of it soon, or late, and perhaps only of a later change."""
        self.publish({layer_key("file", queue): document for queue, document in documents})

    def publish(self, records: Mapping[bytes, Mapping[str, Any]]) -> None:
        world = self._world
        self.versions.append(self.versions[-1].after(records))
        definitions = self.versions[-1]
        settings = {queue: settings_of(definitions, queue) for queue in ("*", *world.queues)}
        world.history.add("marq.queues/0", "ok", "settings", version=self.newest, queues=settings)
        for actor in world.living():
            slow = world.hit(world.faults.late_settings)
            delay_ms = world.rng.randint(50, SLOWEST_NEWS_MS) if slow else world.rng.randint(1, 20)
            actor.later(delay_ms, actor.hear, self.newest)

    def settings_of(self, queue: str) -> list[dict[str, Any]]:
        """Return all settings that a queue has ever had."""
        return [settings_of(definitions, queue) for definitions in self.versions[1:]]
