"""Queues with ordering by key: which of a world's queues have it, the keys of their messages, and the partitions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from marq.settings.ordering_keys import partition_of
from marq.settings.queue import AT_MOST_ONCE, ORDERED_BY_KEY
from marq.wire.markers import Source

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Possible numbers of ordering keys: one, a few, many.
_KEYS = (1, 2, 5, 50)


class Ordering:
    """One seed's choices about ordering; drawn separately, so that worlds without ordering stay as they were."""

    def __init__(self, seed: int) -> None:
        self._lots = lots = random.Random(f"ordering {seed}")
        self.queues: frozenset[str] = frozenset()
        #: How many queues have ordering.
        self._share = lots.choice([0.0, 0.0, 0.5, 1.0])
        self._keys = lots.choice(_KEYS)
        self._hot_share = lots.choice([0.0, 0.7])
        self._keyless_share = lots.choice([0.0, 0.0, 0.2])

    def choose(self, documents: Mapping[str, dict[str, Any]]) -> None:
        """Let some queues have ordering."""
        chosen = [queue for queue in documents if self._lots.random() < self._share]
        self.queues = frozenset(queue for queue in chosen if documents[queue].get("delivery") != AT_MOST_ONCE)
        for queue in self.queues:
            documents[queue]["ordering"] = ORDERED_BY_KEY

    def key(self) -> bytes | None:
        """Return the ordering key of a message, None for a message without."""
        if self._lots.random() < self._keyless_share:
            return None
        number = 0 if self._lots.random() < self._hot_share else self._lots.randrange(self._keys)
        return b"key %d" % number

    def source(self, world: World, queue: str, topic: str, key: bytes | None, *, copy: bool = False) -> Source:
        """Return where a record goes: a message with an ordering key to that key's partition."""
        if queue in self.queues and key is not None:
            partitions = [source.partition for source in world.busy_sources if source.topic == topic]
            return Source(topic, partition_of(key, partitions))
        sources = world.shared_sources if copy else [each for each in world.busy_sources if each.topic == topic]
        return world.rng.choice(sources)
