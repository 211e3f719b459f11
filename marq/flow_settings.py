"""What the engine that receives messages needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from marq.codecs import Codec
from marq.core.purges import Purge
from marq.core.queue import QueueSettings


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """What one engine needs to know; ``limit_bytes`` is what the markers topic accepts.

    ``lease_ms`` holds for each queue that has none of its own in ``leases_ms``, which may change while it is used.
    """

    lease_ms: int
    max_in_flight: int
    max_lease_ms: int
    markers_partitions: int
    limit_bytes: int
    leases_ms: Mapping[str, int] = field(default_factory=dict)
    #: What decodes values: of all queues, or of each that has one of its own.
    codec: Codec | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    #: What holds for a queue now.
    queue: Callable[[str], QueueSettings] = lambda _: QueueSettings()

    #: Which records of a queue are to be passed over.
    purge: Callable[[str], Purge | None] = lambda _: None

    def lease_of(self, queue: str) -> int:
        """Return the lease of a queue, in ms."""
        return self.leases_ms.get(queue, self.lease_ms)

    @property
    def shortest_lease_ms(self) -> int:
        return min([self.lease_ms, *self.leases_ms.values()])
