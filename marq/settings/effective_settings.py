"""The settings of a queue as users read them: with the keys and units in which they write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from marq.settings.queue import QueueSettings, settings_document


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The settings in effect for one queue; durations are seconds.

    ``max_attempts`` may be ``"unlimited"``, ``partitions`` ``"all"``, and ``breaker`` False. ``paused`` is True, False,
    or the time at which the pause ends, in ISO 8601. ``backoff``, ``errors`` and ``breaker`` are tables as in
    marq.toml, with all of their keys.
    """

    lease: float
    max_lease: float
    max_attempts: int | str
    backoff: Mapping[str, Any]
    dead_letter: bool
    group: str | None
    topic: str | None
    handler: str | None
    concurrency: int
    delay: float
    delivery: str
    transactional: bool
    errors: Mapping[str, Any]
    breaker: Mapping[str, Any] | bool
    partitions: int | str
    paused: bool | str
    ordering: str
    on_dead_letter: str
    start: str
    deduplication_window: float

    @classmethod
    def of(cls, settings: QueueSettings) -> Self:
        """Return checked settings in the units of users."""
        return cls(**settings_document(settings))
