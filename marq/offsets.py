"""Where reading goes on: the committed offsets of a group, and those of the groups that its queues come from.

A queue that is new in a group may have been served by another one before. What any group of the installation has
committed for a queue has been acquired, so the tracker brings it back or it is finished: the furthest position of all
groups is where the queue goes on. Nothing is missed, and nothing is delivered twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code

from marq.connection import client_options, close_admin
from marq.core.markers import Source
from marq.core.names import Names
from marq.positions import Positions
from marq.requests import UNSTABLE_OFFSET_COMMIT, StableOffsets
from marq.serving import Serving
from marq.settings import ClientSettings

log = logging.getLogger("marq")


class Committed(NamedTuple):
    """What a group has committed for a partition."""

    offset: int
    metadata: str


Offsets = Mapping[Source, Committed]


@dataclass(frozen=True)
class Place:
    """Where to read a partition from, and how far each queue is there."""

    start: int
    positions: Positions


class Search:
    """The search for the places of partitions that a group's member was assigned.

    ``committed`` is what the group itself has; what others have counts only while :attr:`needs_others`.
    """

    def __init__(
        self, names: Names, group: str, serving: Serving, sources: Iterable[Source], committed: Offsets
    ) -> None:
        self._names = names
        self._serving = serving
        self._committed = committed
        self._found = {source: _positions(names, group, committed.get(source)) for source in sources}
        self._newcomers = {
            source: positions.newcomers(serving.queues_in(source.topic), _offset(committed.get(source)))
            for source, positions in self._found.items()
        }

    @property
    def needs_others(self) -> bool:
        """Whether some queue may have been further with another group before."""
        return any(self._newcomers.values())

    def consider(self, group: str, committed: Offsets) -> None:
        """Take into account what another group of the installation has committed."""
        for source, positions in self._found.items():
            theirs = _positions(self._names, group, committed.get(source))
            for queue in self._newcomers[source]:
                positions.advance([queue], theirs.by_queue.get(queue, 0))

    def places(self) -> dict[Source, Place]:
        """Return what was found."""
        return {
            source: _place(source, positions, self._serving, _offset(self._committed.get(source)))
            for source, positions in self._found.items()
        }


async def places(
    settings: ClientSettings, group: str, serving: Serving, sources: Iterable[Source]
) -> dict[Source, Place]:
    """Return where a group's member has to go on in each partition that it was assigned.

    Raises:
        KafkaError: the broker did not answer, or refused.
    """
    wanted = list(sources)
    if not wanted:
        return {}
    admin = AIOKafkaAdminClient(**client_options(settings))
    try:
        await admin.start()
        search = Search(settings.names, group, serving, wanted, await _committed(admin, group, wanted))
        if search.needs_others:
            for other in await _other_groups(admin, settings.names, group):
                search.consider(other, await _committed(admin, other, wanted))
    finally:
        await close_admin(admin)
    return search.places()


async def _committed(admin: AIOKafkaAdminClient, group: str, sources: Iterable[Source]) -> Offsets:
    """Return a group's offsets; those that a former owner's open transaction could still move are waited for.

    Else two members would go on from the same place, and both hand out what comes there.
    """
    partitions = [TopicPartition(*source) for source in sources]
    try:
        answer = await admin._send_request(StableOffsets(group, partitions), await admin.find_coordinator(group))
    except NotImplementedError:
        # Kafka before 2.5: no member of a group can commit in a transaction there.
        found = await admin.list_consumer_group_offsets(group, partitions=partitions)
        return {Source(*tp): Committed(each.offset, each.metadata) for tp, each in found.items() if each.offset >= 0}
    _check(group, answer.error_code)
    offsets: dict[Source, Committed] = {}
    for topic, entries, _ in answer.topics:
        for partition, offset, _, metadata, code, _ in entries:
            _check(f"{group}, {topic}/{partition}", code)
            if offset >= 0:
                offsets[Source(topic, partition)] = Committed(offset, metadata or "")
    return offsets


def _check(place: str, code: int) -> None:
    if code == UNSTABLE_OFFSET_COMMIT:
        raise KafkaError(f"group {place}: a transaction of a former member is still open; it is waited for")
    if code:
        raise for_code(code)(f"group {place}: no committed offset can be had")


async def _other_groups(admin: AIOKafkaAdminClient, names: Names, group: str) -> list[str]:
    return sorted(
        {found[0] for found in await admin.list_consumer_groups() if found[0] != group and names.is_group(found[0])}
    )


def _place(source: Source, positions: Positions, serving: Serving, committed: int | None) -> Place:
    queues = serving.queues_in(source.topic)
    start = positions.start(queues, 0) if queues else committed or 0
    if committed is not None and start != committed:
        log.info("topic %s, partition %s: reading from %s instead of %s", *source, start, committed)
    return Place(start, positions)


def _positions(names: Names, group: str, committed: Committed | None) -> Positions:
    metadata = "" if committed is None else committed.metadata
    return Positions.decode(_offset(committed), metadata, names.owner_of_group(group))


def _offset(committed: Committed | None) -> int | None:
    return None if committed is None else committed.offset
