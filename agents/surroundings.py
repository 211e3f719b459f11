"""What all owners of a worker's markers partitions share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.lateness import Lateness
from marq.core.handling_times import HandlingTimes
from marq.core.names import Names
from marq.core.quarantines import Quarantine
from marq.core.queue import QueueSettings
from marq.core.schedules import ScheduleLayers
from marq.core.spread import EVERYWHERE, Placement
from tables.leases import LeaseTable


async def _known() -> None:
    return


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
    #: Pause and resume reading a markers partition.
    pause: Callable[[int], None]
    resume: Callable[[int], None] = lambda _: None
    #: Returns the operator's order to pass over a record of a newer version, by (partition, offset, content).
    quarantine: Callable[[int, int, bytes], Quarantine | None] = lambda *_: None
    markers_partitions: int = 1
    #: Who the worker is, for people who look later.
    worker: str = ""
    #: What is said of schedules.
    schedules: Callable[[], ScheduleLayers] = ScheduleLayers
    #: On which partitions of the messages topic a queue lives now.
    placement: Callable[[str], Placement] = lambda _: EVERYWHERE
    #: Returns when what is known of placements is new enough to send by it; raises TimeoutError.
    heard: Callable[[], Awaitable[None]] = _known
    #: How late messages were sent.
    lateness: Lateness = field(default_factory=Lateness)
    #: How long messages were worked on.
    handling: HandlingTimes = field(default_factory=HandlingTimes)
