"""The settings of one queue, as the core needs them; where they come from is config's business."""

from __future__ import annotations

from dataclasses import dataclass, field

from marq.core.backoff import Backoff


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """``max_attempts`` counts deliveries; ``dead_letter`` False drops a message after the last one."""

    lease_ms: int = 30_000
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    dead_letter: bool = True
