"""Queues that go by keys: which of a world's queues have ordering or limits; the keys of their messages."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from itertools import cycle
from math import inf
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
        #: Drawn separately, so that worlds without limits stay as they were.
        self._limit_lots = random.Random(f"limits {seed}")
        self._priority_lots = random.Random(f"priorities {seed}")
        self._priorities = self._priority_lots.choice([[False], [False, 1, 9]])
        self._limited_share = self._limit_lots.choice([0.0, 0.0, 0.0, 0.0, 0.5, 1.0])
        #: Whether some queue has limits, and perhaps fairness and a priority.
        self.limits = False
        #: The queues with ordering, limits or fairness.
        self.queues: frozenset[str] = frozenset()
        #: How many queues have ordering.
        self._share = lots.choice([0.0, 0.0, 0.5, 1.0])
        self._keys = lots.choice(_KEYS)
        self._hot_share = lots.choice([0.0, 0.7])
        self._keyless_share = lots.choice([0.0, 0.0, 0.2])

    def choose(self, documents: Mapping[str, dict[str, Any]], priorities: Collection[int] = ()) -> None:
        """Let some queues have ordering or limits, and all that may these ``priorities``, if there are any."""
        chosen = [queue for queue in documents if self._lots.random() < self._share]
        self.queues = frozenset(queue for queue in chosen if documents[queue].get("delivery") != AT_MOST_ONCE)
        for queue in self.queues:
            documents[queue]["ordering"] = ORDERED_BY_KEY
        others = [queue for queue in documents if documents[queue].get("delivery") != AT_MOST_ONCE]
        limited = [queue for queue in others if self._limit_lots.random() < self._limited_share]
        for queue in limited:
            documents[queue] |= self.limited(ordered=queue in self.queues)
        for queue, priority in zip(others if priorities else (), cycle(priorities), strict=False):
            documents[queue] |= {"limits": documents[queue].get("limits", {}), "priority": priority}
            limited.append(queue)
        self.queues |= frozenset(limited)
        self.limits = bool(limited)

    def limited(self, *, ordered: bool) -> dict[str, Any]:
        """Return some limits, fairness, or a priority."""
        lots = self._limit_lots
        bounds: dict[str, Any] = {}
        if lots.random() < 0.5:
            bounds["concurrency"] = lots.choice([1, 2, 5])
        if lots.random() < 0.2:
            bounds["rate"] = lots.choice(["100/s", "20/s"])
        per_key: dict[str, Any] = {}
        if not ordered and lots.random() < 0.7:
            per_key["concurrency"] = lots.choice([1, 1, 2, 3])
        if lots.random() < 0.1:
            per_key["rate"] = "20/s"
        fair = lots.random() < 0.3
        priority = self._priority_lots.choice(self._priorities)
        return {"limits": bounds | ({"per_key": per_key} if per_key else {}), "fair": fair, "priority": priority}

    def most_of_key(self, world: World, queue: str) -> float:
        """Return how many messages of one key of a queue may run at a time, by any of its settings so far."""
        most = 0.0
        for version in world.definitions.versions[1:]:
            settings = version.settings(queue)
            limit = None if settings.limits is None else settings.limits.per_key.concurrency
            most = max(most, 1 if settings.ordered else inf if limit is None else limit)
        return most

    def most_of_queue(self, world: World, queue: str) -> float:
        """Return how many messages of a queue may run at a time in one consumer, by any of its settings so far."""
        limits = [version.settings(queue).limits for version in world.definitions.versions[1:]]
        return max([inf if limit is None or limit.concurrency is None else limit.concurrency for limit in limits])

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
