"""Shared context of the owners of a worker's markers partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from marq.core.storage.handling_times import HandlingTimes
from marq.core.storage.table_image import Place
from marq.owner.engine import OwnerTransaction
from marq.settings.placements import EVERYWHERE, Placement
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import ScheduleLayers
from marq.wire.markers import Payload
from marq.wire.names import Names
from marq.wire.quarantines import Quarantine
from marq_worker.owner.turns import redeliver
from marq_worker.progress import Lateness
from marq_worker.tables.leases import LeaseTable

if TYPE_CHECKING:
    from marq_worker.owner.ownership import Ownership


#: Returns the payloads of messages from their records (marq_worker/owner/source_reader.py).
Copier = Callable[[Mapping[Place, Payload]], Awaitable[Mapping[Place, Payload | None]]]


async def _known() -> None:
    return


async def _nothing(left: Mapping[Place, Payload]) -> Mapping[Place, Payload | None]:
    return {}


@dataclass(frozen=True)
class OwnerContext:
    """Names, table, settings, and the operations of the worker's consumer."""

    names: Names
    table: LeaseTable
    settings: Callable[[str], QueueSettings]
    #: Arguments of every Kafka client (addresses and security).
    client: Mapping[str, Any]
    messages_partitions: int
    max_message_bytes: int
    flush_seconds: float
    #: Number of partitions that the worker owns.
    owned: Callable[[], int]
    #: Seeks in a markers partition: (partition, offset).
    seek: Callable[[int, int], Awaitable[None]]
    #: First and end offset of a markers partition.
    log_range: Callable[[int], Coroutine[Any, Any, tuple[int, int]]]
    #: Pause and resume reading a markers partition.
    pause: Callable[[int], None]
    resume: Callable[[int], None] = lambda _: None
    #: Returns the operator's request to skip a record of a newer version, by (partition, offset, content).
    quarantine: Callable[[int, int, bytes], Quarantine | None] = lambda *_: None
    #: Hands the first write to the timer agent; returns when the owner has nothing more to write.
    turn: Callable[[Ownership, OwnerTransaction], Awaitable[None]] = redeliver
    markers_partitions: int = 1
    #: Describes the worker in the rows that it writes.
    worker: str = ""
    schedules: Callable[[], ScheduleLayers] = ScheduleLayers
    #: Returns the partitions of the messages topic on which a queue lives now.
    placement: Callable[[str], Placement] = lambda _: EVERYWHERE
    #: Returns once the known placements are recent enough for sending; raises TimeoutError.
    heard: Callable[[], Awaitable[None]] = _known
    lateness: Lateness = field(default_factory=Lateness)
    #: Copy payloads from records: of messages that are due, and of those whose leases have outlived a flush.
    due_copier: Copier = _nothing
    copier: Copier = _nothing
    handling: HandlingTimes = field(default_factory=HandlingTimes)
    waiting: HandlingTimes = field(default_factory=HandlingTimes)
