"""The settings of a queue as users read them: with the keys and units in which they write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from marq.settings.definitions import Definitions
from marq.settings.queue import ALL, QueueSettings, settings_document
from marq.wire.names import Names


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The settings in effect for one queue; durations are seconds.

    ``max_attempts`` may be ``"unlimited"``, ``partitions`` ``"all"``, and ``breaker``, ``limits`` and ``priority``
    False. ``paused`` is True, False, or the time at which the pause ends, in ISO 8601. ``backoff``, ``errors``,
    ``breaker`` and ``limits`` are tables as in marq.toml, with all of their keys.
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
    shutdown_timeout: float | None
    tracebacks: bool
    key: str
    limits: Mapping[str, Any] | bool
    fair: bool
    priority: int | bool
    expires_after: float | bool
    expired: str

    @classmethod
    def of(cls, settings: QueueSettings) -> Self:
        """Return checked settings in the units of users."""
        return cls(**settings_document(settings))


def queue_document(name: str, definitions: Definitions, names: Names) -> dict[str, Any]:
    """Return the settings of a queue with their origins, as ``marq queue`` and the pages show them."""
    group, placement = definitions.group(name), definitions.placement(name)
    return {
        "queue": name,
        "defined": name in definitions.names(),
        "project": definitions.project(name) or None,
        "group": group,
        "consumer_group": definitions.consumer_group(name, names),
        "partitions": {"sent_to": placement.sends or ALL, "read": placement.reads or ALL},
        "settings": {
            key: {"value": value, "from": definitions.origin(name, key) or "default"}
            for key, value in settings_document(definitions.settings(name)).items()
        },
    }
