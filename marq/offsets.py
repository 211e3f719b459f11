"""Where reading goes on: the committed offsets of a group, and those of the groups that its queues come from.

A queue that is new in a group may have been served by another one before. What any group of the installation has
committed for a queue has been acquired, so the tracker brings it back or it is finished: the furthest position of all
groups is where the queue goes on. Nothing is missed, and nothing is delivered twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from marq.connection import client_options, close_admin
from marq.core.markers import Source
from marq.core.names import Names
from marq.positions import Positions
from marq.serving import Serving
from marq.settings import ClientSettings

log = logging.getLogger("marq")

_Committed = Mapping[TopicPartition, OffsetAndMetadata]


@dataclass(frozen=True)
class Place:
    """Where to read a partition from, and how far each queue is there."""

    start: int
    positions: Positions


async def places(
    settings: ClientSettings, group: str, serving: Serving, sources: Iterable[Source]
) -> dict[Source, Place]:
    """Return where a group's member has to go on in each partition that it was assigned.

    Raises:
        KafkaError: the broker did not answer, or refused.
    """
    wanted = [TopicPartition(*source) for source in sources]
    if not wanted:
        return {}
    admin = AIOKafkaAdminClient(**client_options(settings))
    try:
        await admin.start()
        committed = await admin.list_consumer_group_offsets(group, partitions=wanted)
        found = {tp: _positions(settings.names, group, committed, tp) for tp in wanted}
        newcomers = {
            tp: positions.newcomers(serving.queues_in(tp.topic), _offset(committed, tp))
            for tp, positions in found.items()
        }
        if any(newcomers.values()):
            for other in await _other_groups(admin, settings.names, group):
                offsets = await admin.list_consumer_group_offsets(other, partitions=wanted)
                _go_further(found, newcomers, settings.names, other, offsets)
    finally:
        await close_admin(admin)
    return {Source(*tp): _place(tp, positions, serving, _offset(committed, tp)) for tp, positions in found.items()}


async def _other_groups(admin: AIOKafkaAdminClient, names: Names, group: str) -> list[str]:
    return sorted(
        {found[0] for found in await admin.list_consumer_groups() if found[0] != group and names.is_group(found[0])}
    )


def _go_further(
    found: Mapping[TopicPartition, Positions],
    newcomers: Mapping[TopicPartition, Sequence[str]],
    names: Names,
    other: str,
    offsets: _Committed,
) -> None:
    for tp, positions in found.items():
        theirs = _positions(names, other, offsets, tp)
        for queue in newcomers[tp]:
            positions.advance([queue], theirs.by_queue.get(queue, 0))


def _place(tp: TopicPartition, positions: Positions, serving: Serving, committed: int | None) -> Place:
    queues = serving.queues_in(tp.topic)
    start = positions.start(queues, 0) if queues else committed or 0
    if committed is not None and start != committed:
        log.info("topic %s, partition %s: reading from %s instead of %s", tp.topic, tp.partition, start, committed)
    return Place(start, positions)


def _positions(names: Names, group: str, offsets: _Committed, tp: TopicPartition) -> Positions:
    offset = _offset(offsets, tp)
    metadata = offsets[tp].metadata if offset is not None else ""
    return Positions.decode(offset, metadata, names.owner_of_group(group))


def _offset(offsets: _Committed, tp: TopicPartition) -> int | None:
    found = offsets.get(tp)
    return None if found is None or found.offset < 0 else found.offset
