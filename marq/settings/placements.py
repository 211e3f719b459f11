"""The partitions of the messages topic for a queue whose settings have ``partitions``.

They follow from the queue's name alone (rendezvous hashing, as in shuffle sharding): each partition has a weight for
the queue, and the heaviest ones belong to it. So queues are spread evenly, and two queues rarely share all partitions.
A larger ``partitions`` only adds partitions. If the topic grows, few queues move, and only to new partitions.

Senders and readers learn of a changed setting at different times. So they follow the *placement* that a worker writes:
the partitions to send to, and those to read.

1. The setting changes. The worker writes that messages are *sent* to the new partitions, and *read* there and in all
   former ones. Readers may change before or after senders, because they read all partitions that may be sent to.
2. Senders may use an old placement for a limited time (:data:`SYNCED_S`). After :data:`GRACE_S` no sender uses the
   former partitions, and the worker writes where these *end* for the queue.
3. When the queue's group has read the former partitions up to there, the worker writes that they are no longer read.

**Ordering by key** needs a list that does not change by itself, because the partition of a key follows from it. So the
placement of such a queue names all partitions even if ``partitions`` is "all", and is ``fixed`` for that setting:
partitions that are added to the topic do not change it. While such a placement changes, messages with a key wait.

Each step holds until the next one is written, however long that takes: a queue whose consumers return after days still
has its old partitions. Clocks of different machines are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from marq.settings.queue import ALL, QueueSettings
from marq.wire.errors import ConfigError

#: Greatest age of a sender's placements when it starts to send, and the limit for the send itself.
SYNCED_S = 30.0
SENT_S = 45.0
#: Time after a placement was written when no sender uses the former one.
GRACE_S = 60.0

#: Some partitions of the messages topic, in ascending order; None: all that it has and ever will have.
Partitions = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Placement:
    """The partitions that a queue's messages are sent to, and the larger set that is read.

    ``ends`` has the end of the queue's messages in each partition that is only read; None if not known yet. ``fixed``
    is the setting ``partitions`` for which ``sends`` was chosen, if the queue is ordered; None if it is not.
    """

    sends: Partitions = None
    reads: Partitions = None
    ends: Mapping[int, int] | None = field(default=None, hash=False)
    fixed: int | str | None = None

    @property
    def settled(self) -> bool:
        """Return whether exactly the partitions that are sent to are read."""
        return self.reads == self.sends

    @property
    def takes_keys(self) -> bool:
        """Return whether messages with an ordering key may be sent.

        Former partitions may have messages with the key. There are none if all partitions were in use before, because
        the queue was not ordered then.
        """
        return self.fixed is not None and (self.settled or self.reads is None)

    def former(self, partitions: int) -> list[int]:
        """Return the partitions of a topic that are read and not sent to."""
        sends, reads = self.sends, self.reads
        if sends is None:
            return []
        return [number for number in range(partitions) if number not in sends and (reads is None or number in reads)]

    def following(self, queue: str, partitions: int, settings: QueueSettings) -> Placement | None:
        """Return the placement that its queue needs now, None if it is this one.

        ``partitions`` is the number of partitions of the messages topic.
        """
        count = settings.partitions
        wanted = subset(queue, partitions, count)
        if not settings.by_key:
            return None if self.sends == wanted and self.fixed is None else self.moved(wanted)
        fixed = ALL if count is None else count
        # A recreated topic may have fewer partitions.
        if self.fixed == fixed and self.sends is not None and self.sends[-1] < partitions:
            return None
        return self.moved(tuple(range(partitions)) if wanted is None else wanted, fixed)

    def moved(self, sends: Partitions, fixed: int | str | None = None) -> Placement:
        """Return the placement after messages are sent to other partitions."""
        return Placement(sends, union([self.reads, sends]), None, fixed)

    def ended(self, ends: Mapping[int, int]) -> Placement:
        """Return the placement with the ends of the former partitions."""
        return replace(self, ends=dict(ends))

    def drained(self) -> Placement:
        """Return the placement after the former partitions are read to their ends."""
        return Placement(self.sends, self.sends, None, self.fixed)

    def document(self) -> dict[str, Any]:
        """Return the value of its record; empty for all partitions, which need no record."""
        if self == Placement():
            return {}
        ends = {} if self.ends is None else {"ends": {str(partition): end for partition, end in self.ends.items()}}
        fixed = {} if self.fixed is None else {"fixed": self.fixed}
        return {"sends": _list(self.sends), "reads": _list(self.reads), **ends, **fixed}

    @classmethod
    def read(cls, document: object) -> Placement:
        """Read what :meth:`document` returned. Raises ConfigError."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"expected a table with sends and reads, not {document!r}")
        fixed = _fixed(document)
        placement = cls(_partitions(document, "sends"), _partitions(document, "reads"), _ends(document), fixed)
        if union([placement.reads, placement.sends]) != placement.reads:
            raise ConfigError("sends: messages would be sent to partitions that are not read")
        if fixed is not None and placement.sends is None:
            raise ConfigError("fixed: the partitions of an ordered queue must be named in sends")
        return placement


EVERYWHERE = Placement()


def subset(queue: str, partitions: int, count: int | None) -> Partitions:
    """Return the partitions of a queue that uses ``count`` of them; None for all of them.

    A partition's weight is the first 8 bytes, big-endian, of the SHA-256 of ``partition:queue`` as UTF-8.
    """
    if count is None or count >= partitions:
        return None
    ranked = sorted(range(partitions), key=lambda partition: _weight(queue, partition), reverse=True)
    return tuple(sorted(ranked[:count]))


def union(several: Iterable[Partitions]) -> Partitions:
    """Return the union of sets of partitions."""
    numbers: set[int] = set()
    for partitions in several:
        if partitions is None:
            return None
        numbers.update(partitions)
    return tuple(sorted(numbers))


def _weight(queue: str, partition: int) -> int:
    return int.from_bytes(sha256(f"{partition}:{queue}".encode()).digest()[:8])


def _list(partitions: Partitions) -> list[int] | None:
    return None if partitions is None else list(partitions)


def _partitions(document: Mapping[str, Any], key: str) -> Partitions:
    said = document.get(key)
    if said is None:
        return None
    if not isinstance(said, list) or not said or not all(_is_number(partition) for partition in said):
        raise ConfigError(f"{key}: expected a list of partitions, or null, not {said!r}")
    return tuple(sorted(set(said)))


def _ends(document: Mapping[str, Any]) -> dict[int, int] | None:
    said = document.get("ends")
    if said is None:
        return None
    if not isinstance(said, Mapping) or not all(str(k).isdecimal() and _is_number(end) for k, end in said.items()):
        raise ConfigError(f"ends: expected a table of offsets by partition, not {said!r}")
    return {int(partition): end for partition, end in said.items()}


def _fixed(document: Mapping[str, Any]) -> int | str | None:
    fixed = document.get("fixed")
    if fixed is not None and fixed != ALL and not _is_number(fixed):
        raise ConfigError(f'fixed: expected a number of partitions, or "{ALL}", not {fixed!r}')
    return fixed


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
