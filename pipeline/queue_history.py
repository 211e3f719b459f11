"""The queues topic: current definitions, and former settings that still matter for messages that they applied to.

Compaction removes former settings from the topic. So the commit of each round also keeps those of the round before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings
from marq.wire.errors import ConfigError
from pipeline.subscriptions import Pair
from pipeline.tables import LAST_MS


@dataclass
class QueueHistory:
    """A fold of the queues topic."""

    #: Each queue and topic that it names or named.
    pairs: set[Pair] = field(default_factory=set)
    #: Queues whose last deliveries may leave no dead letter; "*" stands for all.
    without_dead_letters: set[str] = field(default_factory=set)
    #: Queues that have had ordering.
    with_order: set[str] = field(default_factory=set)
    #: Queues whose messages keep their places, but are not delivered in the order of their keys: they have had limits,
    #: fairness or a priority without ordering; "*": all that have never had ordering.
    without_order: set[str] = field(default_factory=set)
    #: The longest and the shortest deduplication window that a queue has had, in ms; "*": of all others.
    windows: dict[str, int] = field(default_factory=lambda: {"*": QueueSettings().deduplication_window_ms})
    shortest_windows: dict[str, int] = field(default_factory=lambda: {"*": QueueSettings().deduplication_window_ms})
    #: The longest backoff that a queue has had, in ms; "*": of all others.
    backoffs: dict[str, int] = field(default_factory=lambda: {"*": QueueSettings().backoff.longest_ms})
    #: When the last pause of a queue ends or ended, in ms since 1970; "*": of all others.
    paused_at: dict[str, int] = field(default_factory=lambda: {"*": 0})
    #: When the settings of a queue were last written.
    written_at: dict[str, int] = field(default_factory=dict)
    current: Definitions = field(default_factory=Definitions)

    def fold(self, key: bytes | None, value: bytes | None, at_ms: int = 0) -> None:
        """Apply a record that was written at ``at_ms``; ignore invalid ones."""
        with suppress(ConfigError, ValueError, RecursionError):
            queue = self.current.fold(key, None if value is None else json.loads(value))
            names = [queue] if queue is not None else self.current.names()
            self.written_at.update(dict.fromkeys(names if queue is not None else [*names, "*"], at_ms))
            for name in [*names, "*"]:
                settings = self.current.default_settings if name == "*" else self.current.settings(name)
                # Before its first definition, the queue had the settings of all others.
                self._note_window(name, settings)
                self._note_pause(name, settings, at_ms)
                self.backoffs[name] = max(self.backoffs.get(name, self.backoffs["*"]), settings.backoff.longest_ms)
                if settings.topic is not None:
                    self.pairs.add((name, settings.topic))
                if not settings.dead_letter:
                    self.without_dead_letters.add(name)
                if settings.ordered:
                    self.with_order.add(name)
                elif settings.limited:
                    self.without_order.add(name)

    def _note_window(self, name: str, settings: QueueSettings) -> None:
        window_ms = settings.deduplication_window_ms
        for windows, chosen in (self.windows, max), (self.shortest_windows, min):
            windows[name] = chosen(windows.get(name, windows["*"]), window_ms)

    def _note_pause(self, name: str, settings: QueueSettings, at_ms: int) -> None:
        if settings.paused:
            self.paused_at[name] = settings.paused_until_ms or LAST_MS
        else:
            self.paused_at[name] = min(self.paused_at.get(name, self.paused_at["*"]), at_ms)

    def document(self, before: Mapping[str, Any] = MappingProxyType({}), now_ms: int = 0) -> dict[str, Any]:
        """Return what the lifecycle needs of it, for the commit of a round; ``before`` is that of the last round."""
        was_paused = before.get("paused_now", {})
        ends = dict(self.paused_at)
        for name in {**was_paused, **ends}:
            if was_paused.get(name, was_paused.get("*", False)):
                # Compaction may have removed the pause, but its end is not later than the last settings.
                ends[name] = max(ends.get(name, ends["*"]), self.written_at.get(name, now_ms))
        shortest = before.get("shortest_deduplication_windows", self.shortest_windows)
        names = ("without_dead_letters", "with_order", "without_order")
        return {
            **{name: sorted(getattr(self, name).union(before.get(name, ()))) for name in names},
            "deduplication_windows": _merged(max, before.get("deduplication_windows", {}), self.windows),
            "shortest_deduplication_windows": _merged(min, shortest, self.shortest_windows),
            "backoffs": _merged(max, before.get("backoffs", {}), self.backoffs),
            # The last time at which each queue was known to be paused.
            "paused_at": _merged(max, before.get("paused_at", {}), {n: min(ms, now_ms) for n, ms in ends.items()}),
            "paused_now": {name: end_ms > now_ms for name, end_ms in ends.items()},
        }


def _merged(chosen: Callable[[int, int], int], before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return the longer or shorter value of each queue. While a queue has no definition, it has the value of "*"."""
    others = before.get("*", 0)
    return {name: chosen(before.get(name, others), now.get(name, now["*"])) for name in {**before, **now}}
