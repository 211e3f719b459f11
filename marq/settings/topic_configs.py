"""The rules for Marq's topics, and the settings with which missing ones are created.

Clients enforce these rules when they start; ``marq check`` reports on them. This is the only list. They follow from how
markers work. The tracker's clock is the append time of markers, so clients must not set it. A marker carries the
payloads of its messages, so a topic of markers needs more room than the messages topic. Rows and definitions are
identified by their keys, so their topics are compacted; messages, markers and dead letters are all distinct, so theirs
are not. The order of definitions matters, so their topic has one partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from marq.wire.names import ENVELOPE_ROOM_BYTES, Names

LIMIT = "max.message.bytes"
CLEANUP = "cleanup.policy"
TIMESTAMPS = "message.timestamp.type"
RETENTION = "retention.ms"
DELETE_RETENTION = "delete.retention.ms"
APPENDED = "LogAppendTime"
#: The value of a retention that never ends.
FOR_EVER = "-1"
#: Kafka's default limit for a record batch, for topics that are created before the messages topic exists.
DEFAULT_LIMIT_BYTES = 1_048_588
#: Time for which a compacted topic keeps deletions. Older local files are not trusted (tables/leases.py), and a client
#: that was cut off for a weekend still learns which definitions were removed.
DELETE_RETENTION_MS = 7 * 24 * 3600 * 1000
#: Limit for an offset snapshot (marq/kafka/queue_positions.py).
SNAPSHOT_LIMIT_BYTES = 20 << 20


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The facts of a topic; ``replicas`` is the smallest number of replicas, 0 if unknown."""

    partitions: int
    config: Mapping[str, str]
    replicas: int = 0

    @property
    def limit_bytes(self) -> int:
        """The largest record batch that it accepts."""
        return int(self.config[LIMIT])


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The settings of a topic to create."""

    name: str
    partitions: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """The required value of a topic's setting; with ``at_least``, a number that may be larger."""

    topic: str
    setting: str
    needed: str
    at_least: bool = False

    def fits(self, value: str) -> bool:
        """Return whether a value satisfies the rule."""
        if not self.at_least:
            return value == self.needed
        if self.setting in (RETENTION, DELETE_RETENTION) and value == FOR_EVER:
            return True
        return value.lstrip("-").isdecimal() and int(value) >= int(self.needed)


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule, and the value that breaks it."""

    rule: Rule
    value: str

    def __str__(self) -> str:
        rule = self.rule
        return f"topic {rule.topic}: {rule.setting} is {self.value}, but marq needs {rule.needed}" + (
            " or more" if rule.at_least else ""
        )


def room_for_markers(messages_limit_bytes: int) -> int:
    """Return the limit that topics of markers, rows and dead letters need."""
    return messages_limit_bytes + ENVELOPE_ROOM_BYTES


def rules(names: Names, messages_limit_bytes: int, *, changelog: bool) -> list[Rule]:
    """Return the rules for a namespace's topics; ``changelog``: including the lease table's."""
    room = str(room_for_markers(messages_limit_bytes))
    kept = [names.messages, names.markers, names.dead_letters]
    compacted = [names.queues, names.offset_snapshots, *([names.changelog] if changelog else [])]
    roomy = [names.markers, names.dead_letters, *([names.changelog] if changelog else [])]
    return [
        *(Rule(topic, CLEANUP, "delete") for topic in kept),
        *(Rule(topic, CLEANUP, "compact") for topic in compacted),
        *(Rule(topic, TIMESTAMPS, APPENDED) for topic in (names.markers, names.queues, names.offset_snapshots)),
        Rule(names.offset_snapshots, LIMIT, str(SNAPSHOT_LIMIT_BYTES), at_least=True),
        *(Rule(topic, LIMIT, room, at_least=True) for topic in roomy),
        *([Rule(names.changelog, DELETE_RETENTION, str(DELETE_RETENTION_MS), at_least=True)] if changelog else []),
    ]


def broken_rules(wanted: Iterable[Rule], found: Mapping[str, TopicFacts]) -> list[Broken]:
    """Return the rules that existing topics break."""
    values = [(rule, found[rule.topic].config.get(rule.setting, "")) for rule in wanted if rule.topic in found]
    return [Broken(rule, value) for rule, value in values if not rule.fits(value)]


def plans(
    names: Names, messages_limit_bytes: int, *, partitions: int, markers_partitions: int, markers_retention_ms: int
) -> dict[str, TopicPlan]:
    """Return how each topic of a namespace is created."""
    room = room_for_markers(messages_limit_bytes)
    limit = {LIMIT: str(room)}
    compacted = {CLEANUP: "compact", DELETE_RETENTION: str(DELETE_RETENTION_MS)}
    markers = {**limit, TIMESTAMPS: APPENDED, RETENTION: str(markers_retention_ms)}
    made = [
        TopicPlan(names.messages, partitions, {}),
        TopicPlan(names.markers, markers_partitions, markers),
        # Dead letters have no retention; a record in quarantine gets additional headers.
        TopicPlan(names.dead_letters, partitions, {**limit, RETENTION: FOR_EVER}),
        TopicPlan(names.quarantine, 1, {LIMIT: str(room + ENVELOPE_ROOM_BYTES)}),
        TopicPlan(names.queues, 1, {**compacted, TIMESTAMPS: APPENDED}),
        TopicPlan(names.offset_snapshots, 1, {**compacted, TIMESTAMPS: APPENDED, LIMIT: str(SNAPSHOT_LIMIT_BYTES)}),
        TopicPlan(names.changelog, markers_partitions, {**limit, **compacted}),
    ]
    return {plan.name: plan for plan in made}


def wrong_partitions(names: Names, found: Mapping[str, TopicFacts]) -> list[str]:
    """Return the errors in the partition counts of existing topics."""
    wrong = []
    queues, changelog, markers = (found.get(name) for name in (names.queues, names.changelog, names.markers))
    if queues is not None and queues.partitions != 1:
        wrong.append(
            f"topic {names.queues} has {queues.partitions} partitions, but marq needs 1: definitions of queues apply in"
            " the order in which they were written. Delete the topic and restart: workers recreate it and publish"
            " their marq.toml. Repeat changes that were made at run time"
        )
    if changelog is not None and markers is not None and changelog.partitions != markers.partitions:
        wrong.append(
            f"topic {names.changelog} has {changelog.partitions} partitions and {names.markers} has"
            f" {markers.partitions}: they must be equal. The count of the markers topic is fixed at its creation: see"
            " docs/operations/upgrades.md, 'Change the number of markers partitions'"
        )
    return wrong
