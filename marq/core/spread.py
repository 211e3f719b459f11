"""Which partitions of the messages topic a queue lives on, when its settings say ``spread``.

The partitions follow from the queue's name alone (rendezvous hashing, as in shuffle sharding): each partition has a
weight for the queue, and the heaviest ones are its own. So queues are spread evenly, two queues seldom have the same
partitions, more partitions for a queue are the former ones and others, and where the topic grows a queue moves only to
new partitions, and seldom.

What counts is not the setting but the *placement* that a worker has written for the queue, for senders and readers hear
of a change at different times. A placement says where messages are sent and where they are read:

1. The setting changes. The worker writes that messages are *sent* to the new partitions, and *read* there and wherever
   they were read before. Readers change first or last, as they like: they read everything that anybody sends to.
2. Senders may send by what they heard a while ago, for a limited time (:data:`HEARD_S`). When this is over
   (:data:`GRACE_S`), nobody sends to the other partitions, and the worker writes where these *end* for the queue.
3. When the queue's group has read the other partitions up to there, the worker writes that they are read no more.

Each step holds until the next one is written, however long that takes and whoever is away: a queue whose consumers come
back after days still has its old partitions. No clock of one machine is compared with that of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from marq.core.errors import ConfigError

#: What a sender knows of placements may be so old when it begins to send; it must have sent some time after that.
HEARD_S = 30.0
SENT_S = 45.0
#: How long after a placement was written nobody sends by the one before.
GRACE_S = 60.0

#: Some partitions of the messages topic, rising; None: all that it has and ever will have.
Partitions = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the messages of a queue are sent, and where they are read: there at least.

    ``ends``: of each partition that is read and not sent to, the offset after which no message of the queue comes;
    None: not known yet.
    """

    sends: Partitions = None
    reads: Partitions = None
    ends: Mapping[int, int] | None = field(default=None, hash=False)

    @property
    def settled(self) -> bool:
        """Whether messages are read only where they are sent."""
        return self.reads == self.sends

    def former(self, partitions: int) -> list[int]:
        """Return what is read and not sent to, of a topic with so many partitions."""
        sends, reads = self.sends, self.reads
        if sends is None:
            return []
        return [each for each in range(partitions) if each not in sends and (reads is None or each in reads)]

    def moved(self, sends: Partitions) -> Placement:
        """Return the placement when messages are sent elsewhere from now on."""
        return Placement(sends, union([self.reads, sends]))

    def ended(self, ends: Mapping[int, int]) -> Placement:
        """Return the placement when it is known where the former partitions end."""
        return Placement(self.sends, self.reads, dict(ends))

    def drained(self) -> Placement:
        """Return the placement when all in the former partitions has been read."""
        return Placement(self.sends, self.sends)

    def document(self) -> dict[str, Any]:
        """Return the value of its record; empty for all partitions, for which there need not be a record."""
        if self == Placement():
            return {}
        ends = {} if self.ends is None else {"ends": {str(each): end for each, end in self.ends.items()}}
        return {"sends": _list(self.sends), "reads": _list(self.reads), **ends}

    @classmethod
    def read(cls, document: object) -> Placement:
        """Read what :meth:`document` returned.

        Raises:
            ConfigError: it can't be understood, or some messages would be read by nobody.
        """
        if not isinstance(document, Mapping):
            raise ConfigError(f"expected a table with sends and reads, not {document!r}")
        placement = cls(_partitions(document, "sends"), _partitions(document, "reads"), _ends(document))
        if union([placement.reads, placement.sends]) != placement.reads:
            raise ConfigError("sends: messages would be sent to partitions that are not read")
        return placement


EVERYWHERE = Placement()


def subset(queue: str, partitions: int, spread: int | None) -> Partitions:
    """Return the partitions of a queue, of so many; None (all) where the spread is as large as their number, or None.

    A partition's weight is the first 8 bytes, big-endian, of the SHA-256 of ``partition:queue`` as UTF-8.
    """
    if spread is None or spread >= partitions:
        return None
    ranked = sorted(range(partitions), key=lambda partition: _weight(queue, partition), reverse=True)
    return tuple(sorted(ranked[:spread]))


def union(several: Iterable[Partitions]) -> Partitions:
    """Return all partitions that are among some."""
    found: set[int] = set()
    for each in several:
        if each is None:
            return None
        found.update(each)
    return tuple(sorted(found))


def _weight(queue: str, partition: int) -> int:
    return int.from_bytes(sha256(f"{partition}:{queue}".encode()).digest()[:8])


def _list(partitions: Partitions) -> list[int] | None:
    return None if partitions is None else list(partitions)


def _partitions(document: Mapping[str, Any], key: str) -> Partitions:
    said = document.get(key)
    if said is None:
        return None
    if not isinstance(said, list) or not said or not all(_is_number(each) for each in said):
        raise ConfigError(f"{key}: expected a list of partitions, or null, not {said!r}")
    return tuple(sorted(set(said)))


def _ends(document: Mapping[str, Any]) -> dict[int, int] | None:
    said = document.get("ends")
    if said is None:
        return None
    if not isinstance(said, Mapping) or not all(str(k).isdecimal() and _is_number(end) for k, end in said.items()):
        raise ConfigError(f"ends: expected a table of offsets by partition, not {said!r}")
    return {int(partition): end for partition, end in said.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
