"""The settings of a receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from marq.client.codecs import Codec, CodecsByType
from marq.settings.durations import plain_seconds
from marq.settings.placements import Partitions
from marq.settings.queue import QueueSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import ConfigError

_DEFAULT = QueueSettings()


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """``limit_bytes`` is the record size limit of the markers topic.

    ``lease_ms`` and ``max_lease_ms`` override the settings of the queues; None keeps those.
    """

    max_in_flight: int
    markers_partitions: int
    limit_bytes: int
    lease_ms: int | None = None
    max_lease_ms: int | None = None
    #: Decodes values; ``codecs`` overrides it for some queues.
    codec: Codec | None = None
    codecs: Mapping[str, Codec | CodecsByType] = field(default_factory=dict)
    #: Whether to acquire messages before a call asks for them.
    prefetch: bool = True
    #: Returns the current settings of a queue.
    queue: Callable[[str], QueueSettings] = lambda _: _DEFAULT
    #: Returns the purge of a queue, whose records are skipped.
    skipped: Callable[[str], SkippedRecords | None] = lambda _: None
    #: Returns the partitions of the messages topic that have a queue's messages, None for all.
    partitions: Callable[[str], Partitions] = lambda _: None

    @property
    def default_lease_ms(self) -> int:
        return _DEFAULT.lease_ms if self.lease_ms is None else self.lease_ms

    def lease_of(self, queue: str) -> int:
        return self.queue(queue).lease_ms if self.lease_ms is None else self.lease_ms

    def max_lease_of(self, queue: str) -> int:
        return self.queue(queue).max_lease_ms if self.max_lease_ms is None else self.max_lease_ms

    def check_lease(self, queue: str, lease_ms: int) -> None:
        """Raise ConfigError if a lease of this queue's messages is longer than ``max_lease``."""
        max_lease_ms = self.max_lease_of(queue)
        if lease_ms > max_lease_ms:
            raise ConfigError(
                f"queue {queue!r}: lease={plain_seconds(lease_ms)} is longer than"
                f" max_lease={plain_seconds(max_lease_ms)}, but each message is leased for at least that long: pass a"
                " shorter lease to the consumer or a longer max_lease, or change these settings of the queue"
            )

    def shortest_lease_ms(self, queues: Iterable[str]) -> int:
        """Return the shortest lease of some queues, and never more than the default."""
        if self.lease_ms is not None:
            return self.lease_ms
        return min([_DEFAULT.lease_ms, *[self.queue(queue).lease_ms for queue in queues]])
