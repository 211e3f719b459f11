"""Assigns the partitions that at least one member reads, round-robin.

A queue on some partitions of the messages topic (:mod:`marq.settings.placements`) need not read the others. Each member
tells the group which partitions it reads. The leader assigns a partition only to members that read it, and not at all
if none does. A member of an older version sends no such list and reads all partitions.

Members also name their holders, the numbers under which they acquire messages, so that a client that describes the
group can tell which member has a message in flight. Assignments do not depend on them.

The protocol's name is that of Kafka's round robin, whose other implementations ignore the user data. So members of
both kinds may share a group, as in a rolling upgrade: an older leader assigns all partitions, including those that no
member reads.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from marq.settings.placements import Partitions

log = logging.getLogger("marq")

_VERSION = 0
_PARTITIONS, _HOLDERS = "partitions", "holders"

#: The partitions to read, for each topic of which only some are read.
Reads = Mapping[str, tuple[int, ...]]


class SpreadAssignor(RoundRobinPartitionAssignor):  # type: ignore[misc]
    """One member's assignor; ``reads`` and ``holders`` are called when it joins.

    ``url`` is the address at which other members reach this one, "" for none.
    """

    def __init__(self, reads: Callable[[], Reads], holders: Callable[[], Sequence[int]] = tuple, url: str = "") -> None:
        self._reads = reads
        self._holders = holders
        self._url = url

    # Class methods in the base; aiokafka calls them on the instance that it was given.
    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        user_data = encoded(self._reads(), self._holders(), os.getpid(), self._url)
        return ConsumerProtocolMemberMetadata(_VERSION, list(topics), user_data)

    def assign(
        self, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        readers = {
            member: {topic: decoded(metadata.user_data, topic) for topic in metadata.subscription}
            for member, metadata in sorted(members.items())
        }
        topics = sorted({topic for reads in readers.values() for topic in reads})
        shares = shared_out({topic: cluster.partitions_for_topic(topic) or () for topic in topics}, readers)
        return {
            member: ConsumerProtocolMemberAssignment(_VERSION, sorted(share.items()), b"")
            for member, share in shares.items()
        }


def shared_out(
    topics: Mapping[str, Iterable[int]], readers: Mapping[str, Mapping[str, Partitions]]
) -> dict[str, dict[str, list[int]]]:
    """Return the partitions of each member: a partition goes to the reader that has the fewest.

    ``readers`` has the partitions that each member reads. If all read the same, this is round robin.
    """
    shares: dict[str, dict[str, list[int]]] = {member: {} for member in readers}
    counts = dict.fromkeys(readers, 0)
    for topic, partitions in topics.items():
        for partition in sorted(partitions):
            able = [member for member, reads in readers.items() if topic in reads and _reads(reads[topic], partition)]
            if able:
                member = min(able, key=lambda candidate: counts[candidate])
                shares[member].setdefault(topic, []).append(partition)
                counts[member] += 1
    return shares


def encoded(reads: Reads, holders: Sequence[int] = (), pid: int | None = None, url: str = "") -> bytes:
    """Return a member's user data: the partitions that it reads (if not all), its holders, process id and address.

    The process id lets people tell two consumers on the same machine apart.
    """
    # Older members expect the partitions in any user data.
    said: dict[str, Any] = {_PARTITIONS: {topic: list(partitions) for topic, partitions in reads.items()}}
    if holders:
        said[_HOLDERS] = [f"{holder:016x}" for holder in holders]
    if pid is not None:
        said["pid"] = pid
    if url:
        said["url"] = url
    return json.dumps(said, separators=(",", ":")).encode()


def parsed(user_data: bytes | None) -> Mapping[str, Any]:
    """Return a member's user data; empty if the data is missing or not a JSON object."""
    try:
        document = json.loads(user_data or b"")
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def holders_of(user_data: bytes | None) -> frozenset[int]:
    """Return the holders that a member names; none if the member is older, or if its user data can't be read."""
    try:
        return frozenset(int(holder, 16) for holder in parsed(user_data).get(_HOLDERS, ()))
    except (ValueError, TypeError):
        return frozenset()


def decoded(user_data: bytes | None, topic: str) -> Partitions:
    """Return the partitions of a topic that a member reads; None (all) if its user data is missing or unreadable."""
    try:
        partitions = parsed(user_data)[_PARTITIONS].get(topic) if user_data else None
        return None if partitions is None else tuple(sorted(int(partition) for partition in partitions))
    except (ValueError, KeyError, TypeError, AttributeError):
        log.warning("the subscription of a group member is not understood, assuming all of %s", topic)
        return None


def _reads(partitions: Partitions, partition: int) -> bool:
    return partitions is None or partition in partitions
