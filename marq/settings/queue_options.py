"""The settings of a queue as keywords, for code that has them: ``@marq.handler`` and ``Queues.change``.

The keys are those of :data:`marq.settings.queue.CHECKS`; durations may be timedeltas, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from marq.settings.durations import Duration


class HandlerOptions(TypedDict, total=False):
    """All settings but the handler."""

    lease: Duration | None
    max_lease: Duration | None
    max_attempts: int | str | None
    backoff: Mapping[str, Any] | Sequence[Duration] | None
    errors: Mapping[str, Any] | None
    breaker: Mapping[str, Any] | bool | None
    dead_letter: bool | None
    group: str | None
    topic: str | None
    concurrency: int | None
    delay: Duration | None
    delivery: str | None
    transactional: bool | None
    partitions: int | str | None
    paused: bool | str | None
    ordering: str | None
    on_dead_letter: str | None
    start: str | None
    deduplication_window: Duration | None
    shutdown_timeout: Duration | None
    tracebacks: bool | None
    key: str | None
    limits: Mapping[str, Any] | bool | None
    fair: bool | None
    priority: int | bool | None
    expires_after: Duration | bool | None
    expired: str | None


class QueueOptions(HandlerOptions, total=False):
    """The settings of a queue that can be changed; None removes a change, so that the other layers apply again."""

    handler: str | None
