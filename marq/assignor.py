"""Who of a group reads what: round robin over the partitions that somebody reads.

A queue that lives on few partitions of the messages topic (:mod:`marq.core.spread`) need not read the others. Each
member tells the group what it reads, and whoever leads the group assigns by that: a partition only to members that read
it, and what nobody reads to nobody. Members that have not said anything, since they are older, read all.

Each member also names its holders, the numbers under which it acquires messages. A client that describes the group can
then tell which member has a message in flight. Assignments do not depend on them.

To the group this is Kafka's round robin, by its name, with user data that other assignors pass over. So members of both
kinds may be in one group, as in a rolling upgrade: under an older leader all partitions are assigned, also those that
hold nothing, which costs reading them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from marq.core.spread import Partitions

log = logging.getLogger("marq")

_VERSION = 0
_PARTITIONS, _HOLDERS = "partitions", "holders"

#: Of each topic of which some partitions are read: these.
Reads = Mapping[str, tuple[int, ...]]


class SpreadAssignor(RoundRobinPartitionAssignor):  # type: ignore[misc]
    """One member's assignor; ``reads`` and ``holders`` say what it reads, and its holders, when it joins."""

    def __init__(self, reads: Callable[[], Reads], holders: Callable[[], Sequence[int]] = tuple) -> None:
        self._reads = reads
        self._holders = holders

    # Of its base they are class methods; aiokafka calls them on what it was given.
    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        said = encoded(self._reads(), self._holders(), os.getpid())
        return ConsumerProtocolMemberMetadata(_VERSION, list(topics), said)

    def assign(
        self, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        readers = {
            member: {topic: decoded(said.user_data, topic) for topic in said.subscription}
            for member, said in sorted(members.items())
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
    """Return the partitions of each member: each goes to the one of its readers that has the fewest.

    ``readers``: what each member reads of its topics. Where all read the same, it is one after the other.
    """
    shares: dict[str, dict[str, list[int]]] = {member: {} for member in readers}
    counts = dict.fromkeys(readers, 0)
    for topic, partitions in topics.items():
        for partition in sorted(partitions):
            able = [member for member, reads in readers.items() if topic in reads and _reads(reads[topic], partition)]
            if able:
                member = min(able, key=lambda each: counts[each])
                shares[member].setdefault(topic, []).append(partition)
                counts[member] += 1
    return shares


def encoded(reads: Reads, holders: Sequence[int] = (), pid: int | None = None) -> bytes:
    """Return what a member tells its group: the partitions that it reads, if not all, its holders and its process id.

    The process id lets people tell two consumers on the same machine apart.
    """
    # Older members look for the partitions wherever there are user data.
    said: dict[str, Any] = {_PARTITIONS: {topic: list(partitions) for topic, partitions in reads.items()}}
    if holders:
        said[_HOLDERS] = [f"{holder:016x}" for holder in holders]
    if pid is not None:
        said["pid"] = pid
    return json.dumps(said, separators=(",", ":")).encode()


def holders_of(user_data: bytes | None) -> frozenset[int]:
    """Return the holders that a member names; none if the member is older, or if its user data can't be read."""
    try:
        return (
            frozenset(int(each, 16) for each in json.loads(user_data).get(_HOLDERS, ())) if user_data else frozenset()
        )
    except (ValueError, TypeError, AttributeError):
        return frozenset()


def decoded(user_data: bytes | None, topic: str) -> Partitions:
    """Return what a member has told that it reads of a topic; all when it said nothing that can be read."""
    try:
        said = json.loads(user_data)[_PARTITIONS].get(topic) if user_data else None
        return None if said is None else tuple(sorted(int(each) for each in said))
    except (ValueError, KeyError, TypeError, AttributeError):
        log.warning("what a member of the group says that it reads is not understood: it is given all of %s", topic)
        return None


def _reads(partitions: Partitions, partition: int) -> bool:
    return partitions is None or partition in partitions
