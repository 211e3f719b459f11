"""Where reading goes on: the committed offsets of a group, and those of the groups that its queues come from.

A queue that is new in a group may have been served by another one before. What any group of the installation has
committed for a queue has been acquired, so the tracker brings it back or it is finished: the furthest position of all
groups is where the queue goes on. Nothing is missed, and nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code

from marq.connection import client_options, close_admin
from marq.core.errors import BrokerUnavailable, Forbidden
from marq.core.markers import Source
from marq.core.names import Names
from marq.positions import Positions
from marq.reconnects import paced
from marq.requests import UNSTABLE_OFFSET_COMMIT, StableOffsets
from marq.roster_log import RosterLog
from marq.rosters import (
    MAX_METADATA_BYTES,
    Roster,
    UnknownPositions,
    fits,
    in_the_metadata,
    new_roster,
    roster_named,
)
from marq.serving import Serving
from marq.settings import ClientSettings

log = logging.getLogger("marq")

#: Groups that are asked at the same time: queues that join may each have had one of their own.
AT_ONCE = 50


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
    #: What the positions' metadata names, if that is new: it must be durable before anything is committed.
    roster: Roster | None = None


class Search:
    """The search for the places of partitions that a group's member was assigned.

    ``committed`` is what the group itself has; what others have counts only while :attr:`needs_others`. ``rosters``
    has all that it names. Queues whose names take more than ``room_bytes`` of metadata are put into a roster.

    Raises:
        UnknownPositions: what is committed can't be understood.
    """

    def __init__(
        self,
        names: Names,
        group: str,
        serving: Serving,
        sources: Iterable[Source],
        committed: Offsets,
        rosters: Mapping[str, Roster],
        *,
        room_bytes: int = MAX_METADATA_BYTES,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._names = names
        self._serving = serving
        self._committed = committed
        self._rosters = rosters
        self._room_bytes = room_bytes
        self._new_id = new_id
        self._found = {source: _positions(names, group, committed.get(source), rosters) for source in sources}
        self._newcomers = {
            source: frozenset(positions.newcomers(serving.queues_in(source.topic), _offset(committed.get(source))))
            for source, positions in self._found.items()
        }

    @property
    def newcomers(self) -> frozenset[str]:
        """The queues that another group may have read further before."""
        return frozenset().union(*self._newcomers.values())

    @property
    def needs_others(self) -> bool:
        """Whether some queue may have been further with another group before."""
        return any(self._newcomers.values())

    def consider(self, group: str, committed: Offsets, rosters: Mapping[str, Roster]) -> None:
        """Take into account what another group of the installation has committed.

        Raises:
            UnknownPositions: that can't be understood.
        """
        for source, positions in self._found.items():
            theirs = _positions(self._names, group, committed.get(source), rosters).by_queue
            newcomers = self._newcomers[source]
            for queue in [queue for queue in theirs if queue in newcomers]:
                positions.advance([queue], theirs[queue])

    def places(self) -> dict[Source, Place]:
        """Return what was found."""
        return {source: self._place(source, positions) for source, positions in self._found.items()}

    def _place(self, source: Source, positions: Positions) -> Place:
        queues, committed = self._serving.queues_in(source.topic), self._committed.get(source)
        start = positions.start(queues, 0) if queues else _offset(committed) or 0
        if committed is not None and start != committed.offset:
            log.info("topic %s, partition %s: reading from %s instead of %s", *source, start, committed.offset)
        named = None if committed is None else roster_named(committed.metadata)
        current = None if named is None else self._rosters[named]
        # Where many have left, their positions are not forgotten, should they come back.
        if fits(queues if current is None else positions.by_queue.keys() | queues, self._room_bytes):
            return Place(start, positions)
        metadata = in_the_metadata(positions.by_queue, frozenset(queues), start, current, self._room_bytes)
        if metadata is not None:
            return Place(start, Positions(positions.by_queue, metadata))
        roster = new_roster(self._new_id(), positions.by_queue, queues, start)
        return Place(start, Positions(positions.by_queue, roster.metadata({}, {})), roster)


async def places(
    settings: ClientSettings, group: str, serving: Serving, sources: Iterable[Source]
) -> dict[Source, Place]:
    """Return where a group's member has to go on in each partition that it was assigned.

    Raises:
        KafkaError: the broker did not answer, or refused, or what is committed can't be understood.
        ConfigError: a right is missing that a group with many queues needs.
    """
    wanted = list(sources)
    if not wanted:
        return {}
    admin = paced(AIOKafkaAdminClient(**client_options(settings)))
    try:
        await admin.start()
        return await _places(settings, admin, group, serving, wanted)
    except (UnknownPositions, BrokerUnavailable) as error:
        # Tried again: neither to begin at the start nor to pass anything over would be right.
        raise KafkaError(f"group {group}: {error}") from error
    finally:
        await close_admin(admin)


async def _places(
    settings: ClientSettings, admin: AIOKafkaAdminClient, group: str, serving: Serving, sources: list[Source]
) -> dict[Source, Place]:
    rosters = RosterLog(settings)
    committed = await _committed(admin, group, sources)
    known = await rosters.read(_named([committed]), group, committed)
    search = Search(settings.names, group, serving, sources, committed, known)
    if search.needs_others:
        others = [each for each in await groups_of(admin, settings.names, search.newcomers) if each != group]
        theirs = dict(zip(others, await _of_groups(admin, others, sources), strict=True))
        try:
            known = await rosters.read(_named(theirs.values()))
        except Forbidden as error:
            # As with a group whose commits it may not see: a service must not stop because others made a large group.
            log.warning("group %s: how far queues were in groups with rosters can't be seen: %s", group, error)
            theirs = {other: offsets for other, offsets in theirs.items() if not _named([offsets])}
            known = {}
        for other, offsets in theirs.items():
            search.consider(other, offsets, known)
    found = search.places()
    # Before anything is read: a commit must not name what nobody can look up.
    await rosters.write(group, {source: place.roster for source, place in found.items() if place.roster is not None})
    return found


def _named(committed: Iterable[Offsets]) -> set[str]:
    found = {roster_named(each.metadata) for offsets in committed for each in offsets.values()}
    return {each for each in found if each is not None}


async def _of_groups(admin: AIOKafkaAdminClient, groups: Sequence[str], sources: list[Source]) -> list[Offsets]:
    found: list[Offsets] = []
    for first in range(0, len(groups), AT_ONCE):
        some = [_committed(admin, group, sources) for group in groups[first : first + AT_ONCE]]
        found += await asyncio.gather(*some)
    return found


async def positions_of(
    settings: ClientSettings, admin: AIOKafkaAdminClient, group: str, sources: Iterable[Source]
) -> dict[Source, Positions]:
    """Return how far a group's own commits say that each of its queues is.

    Raises:
        KafkaError: the broker did not answer, or refused.
        MarqError: what is committed can't be understood, or not without a right that is missing.
    """
    wanted = list(sources)
    committed = await _committed(admin, group, wanted)
    known = await RosterLog(settings).read(_named([committed]))
    return {source: _positions(settings.names, group, committed.get(source), known) for source in wanted}


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


async def groups_of(admin: AIOKafkaAdminClient, names: Names, queues: Collection[str]) -> list[str]:
    """Return the Kafka groups that may have read these queues, now or before their group changed, sorted.

    Raises:
        KafkaError: the broker did not answer, or refused.
    """
    listed = {name for name, *_ in await admin.list_consumer_groups()}
    # A named group may have read any queue, all others only their own.
    return sorted(
        name
        for name in listed
        if names.is_group(name) and ((owner := names.owner_of_group(name)) is None or owner in queues)
    )


def _positions(names: Names, group: str, committed: Committed | None, rosters: Mapping[str, Roster]) -> Positions:
    metadata = "" if committed is None else committed.metadata
    return Positions.decode(_offset(committed), metadata, names.owner_of_group(group), rosters)


def _offset(committed: Committed | None) -> int | None:
    return None if committed is None else committed.offset
