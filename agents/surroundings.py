"""What all owners of a worker's markers partitions share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marq.core.names import Names
from marq.core.queue import QueueSettings
from marq.core.schedules import ScheduleLayers
from tables.leases import LeaseTable


@dataclass(frozen=True)
class Surroundings:
    """Names, table, settings, and what an owner asks of the worker's consumer."""

    names: Names
    table: LeaseTable
    settings: Callable[[str], QueueSettings]
    #: Arguments of every Kafka client: addresses and security.
    client: Mapping[str, Any]
    messages_partitions: int
    max_message_bytes: int
    flush_seconds: float
    #: How many partitions the worker owns.
    owned: Callable[[], int]
    #: Moves the reading of a markers partition: (partition, offset).
    seek: Callable[[int, int], Awaitable[None]]
    #: Where a markers partition begins and ends.
    log_range: Callable[[int], Awaitable[tuple[int, int]]]
    #: Stops the reading of a markers partition.
    pause: Callable[[int], None]
    markers_partitions: int = 1
    #: What is said of schedules.
    schedules: Callable[[], ScheduleLayers] = ScheduleLayers
