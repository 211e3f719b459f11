"""Which rights each role needs on a cluster with ACLs, and the commands that grant them.

Read and Write include Describe, as Kafka's authorizer sees it. Groups and transactional ids are granted by prefix: they
come and go with queues and partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from marq.core.kafka_tools import Tools
from marq.core.names import Names


class Kind(StrEnum):
    """What a right is on; the values are the options of kafka-acls.sh."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One operation on one resource, or with ``prefixed`` on all whose names begin so."""

    kind: Kind
    name: str
    operation: str
    prefixed: bool = False

    def __str__(self) -> str:
        of = "" if self.kind is Kind.CLUSTER else f" {self.name}{'*' if self.prefixed else ''}"
        return f"{self.operation} on {self.kind}{of}"


def sender(names: Names, own_topics: Iterable[str] = ()) -> list[Right]:
    """Return what a service that only sends needs; ``own_topics`` are those of its queues."""
    return [*_everybody(names, own_topics), *_topics("Write", [names.messages, *own_topics])]


def consumer(names: Names, own_topics: Iterable[str] = ()) -> list[Right]:
    """Return what a service that consumes needs, for all queues that handlers don't serve."""
    return [
        *_everybody(names, own_topics),
        *_topics("Read", [names.messages, *own_topics]),
        *_topics("Write", [names.markers]),
        Right(Kind.GROUP, names.group(""), "Read", prefixed=True),
        Right(Kind.GROUP, names.named_group(""), "Read", prefixed=True),
        # Only to warn when no tracker runs.
        Right(Kind.GROUP, names.app_id, "Describe"),
    ]


def transactional_consumer(names: Names, own_topics: Iterable[str] = ()) -> list[Right]:
    """Return what a service needs that consumes with ``start="transactional"``."""
    return [*consumer(names, own_topics), Right(Kind.TRANSACTIONAL_ID, names.start_ids, "Write", prefixed=True)]


def delayer(names: Names, own_topics: Iterable[str] = ()) -> list[Right]:
    """Return what a service needs that sends, and delays, cancels and moves messages."""
    return [*sender(names, own_topics), *_topics("Write", [names.markers]), *_topics("Read", [names.markers])]


def redriver(names: Names, own_topics: Iterable[str] = ()) -> list[Right]:
    """Return what somebody needs who looks at dead letters, and redrives or deletes them."""
    return [*_everybody(names, ()), *_topics("Read", [names.dead_letters]), *_topics("Write", [names.markers])]


def worker(
    names: Names,
    own_topics: Iterable[str] = (),
    *,
    tracker: bool = True,
    census: bool = True,
    handlers: bool = True,
    handled_topics: Iterable[str] = (),
) -> list[Right]:
    """Return what a worker needs, by its roles; of queues with handlers some may own ``handled_topics``.

    ``census``: as a tracker it counts what waits.
    """
    return [
        *_everybody(names, handled_topics if handlers else ()),
        *_topics("Write", [names.queues]),
        *(_tracker(names, own_topics) if tracker else ()),
        *(_census(names, own_topics) if tracker and census else ()),
        *(_handlers(names, handled_topics) if handlers else ()),
    ]


def _tracker(names: Names, own_topics: Iterable[str]) -> list[Right]:
    return [
        *_topics("Read", [names.markers, names.changelog]),
        *_topics("Write", [names.markers, names.changelog]),
        *_topics("Write", [names.messages, names.dead_letters, names.quarantine, *own_topics]),
        # Faust asks for the changelog's creation at every start, although it is there.
        *(Right(Kind.TOPIC, names.changelog, operation) for operation in ("Create", "DescribeConfigs")),
        Right(Kind.GROUP, names.app_id, "Read"),
        Right(Kind.TRANSACTIONAL_ID, names.transactional_ids, "Write", prefixed=True),
    ]


def _census(names: Names, own_topics: Iterable[str]) -> list[Right]:
    return [*_topics("Read", [names.messages, *own_topics]), Right(Kind.GROUP, names.census, "Read")]


def _handlers(names: Names, topics: Iterable[str]) -> list[Right]:
    return [
        *_topics("Read", [names.messages, *topics]),
        *_topics("Write", [names.markers]),
        Right(Kind.GROUP, names.named_group(""), "Read", prefixed=True),
        # How far consumers were, when a queue of theirs gets a handler.
        Right(Kind.GROUP, names.group(""), "Describe", prefixed=True),
    ]


#: By name; each takes the installation's names and the topics that queues have of their own.
ROLES: Mapping[str, Callable[[Names, Iterable[str]], list[Right]]] = {
    "worker": worker,
    "consumer": consumer,
    "transactional-consumer": transactional_consumer,
    "sender": sender,
    "delayer": delayer,
    "redriver": redriver,
}


def _everybody(names: Names, own_topics: Iterable[str]) -> list[Right]:
    topics = [names.messages, names.markers, names.dead_letters, names.quarantine, names.queues, *own_topics]
    return [*_topics("Describe", topics), *_topics("DescribeConfigs", topics), *_topics("Read", [names.queues])]


def _topics(operation: str, names: Iterable[str]) -> list[Right]:
    return [Right(Kind.TOPIC, name, operation) for name in names]


def grants(rights: Iterable[Right], principal: str, tools: Tools) -> list[str]:
    """Return the fewest commands that grant exactly these rights."""
    wanted: dict[tuple[Kind, str, bool], set[str]] = {}
    for right in rights:
        wanted.setdefault((right.kind, right.name, right.prefixed), set()).add(right.operation)
    alike: dict[tuple[Kind, bool, tuple[str, ...]], list[str]] = {}
    for (kind, name, prefixed), operations in wanted.items():
        if operations & {"Read", "Write"}:
            operations.discard("Describe")
        alike.setdefault((kind, prefixed, tuple(sorted(operations))), []).append(name)
    return [
        tools.allow(principal, operations, _resource(kind, names), prefixed=prefixed)
        for (kind, prefixed, operations), names in alike.items()
    ]


def _resource(kind: Kind, names: Iterable[str]) -> list[str]:
    if kind is Kind.CLUSTER:
        return ["--cluster"]
    return [part for name in names for part in (f"--{kind}", name)]
