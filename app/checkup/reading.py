"""Whether what is sent is read: groups without members, that do not move, and that were too late for the retention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.checkup.findings import Finding, fine, problem, warning
from marq.core.definitions import Definitions
from marq.core.markers import Source
from marq.core.names import Names
from marq.core.topic_rules import FOR_EVER, RETENTION, TopicFacts
from marq.inspector import Waiting
from marq.rights import tools
from marq.settings import ClientSettings

#: Groups that are named in one finding.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group is in a partition, and where that begins and ends."""

    committed: int
    start: int
    end: int

    @property
    def behind(self) -> int:
        return max(0, self.end - max(self.committed, self.start))


@dataclass(frozen=True)
class Reader:
    """A consumer group of queues: ``members`` is None where nobody may tell.

    ``assigned``: whether any member has a partition.
    """

    group: str
    members: int | None
    places: Mapping[Source, Place] = field(default_factory=dict)
    assigned: bool = True

    @property
    def behind(self) -> int:
        return sum(place.behind for place in self.places.values())

    @property
    def unassigned(self) -> bool:
        """Whether it has members and nobody has a partition."""
        return bool(self.members) and not self.assigned


def queues_of(group: str, names: Names, definitions: Definitions) -> list[str]:
    """Return the queues that a Kafka group reads."""
    owner = names.owner_of_group(group)
    if owner is not None:
        return [owner] if definitions.group(owner) is None else []
    return [queue for queue in definitions.names() if _kafka_group(queue, names, definitions) == group]


def _kafka_group(queue: str, names: Names, definitions: Definitions) -> str:
    named = definitions.group(queue)
    return names.group(queue) if named is None else names.named_group(named)


def suspected(
    client: ClientSettings, definitions: Definitions, first: Iterable[Reader], second: Iterable[Reader]
) -> list[str]:
    """Return the queues of groups that have nobody, or do not move: of them is to be counted what waits.

    Records behind a group may all be other queues', or those by which Kafka ends a transaction.
    """
    before = {reader.group: reader for reader in first}
    groups = [each for each in second if not each.members or _stuck(before.get(each.group), each)]
    return sorted({queue for each in groups for queue in queues_of(each.group, client.names, definitions)})


def judge_reading(
    client: ClientSettings,
    definitions: Definitions,
    first: Iterable[Reader],
    second: Iterable[Reader],
    waiting: Waiting,
    passed_s: float,
) -> list[Finding]:
    """Judge two looks at all groups that read queues, with ``passed_s`` between them.

    ``waiting``: what waits of those that are suspected, in messages.
    """
    before = {reader.group: reader for reader in first}
    readers = [reader for reader in second if queues_of(reader.group, client.names, definitions)]
    findings = []
    for reader in readers:
        queues = queues_of(reader.group, client.names, definitions)
        findings += _judge_lost(client, reader)
        findings += _judge_members(definitions, reader, queues, waiting)
        findings += _judge_moving(definitions, before.get(reader.group), reader, queues, waiting, passed_s)
    return findings or ([fine("groups", f"{len(readers)} that read queues, none of them behind or stuck")])


def _judge_lost(client: ClientSettings, reader: Reader) -> list[Finding]:
    places = reader.places.items()
    lost = {source: each.start - each.committed for source, each in places if each.committed < each.start}
    topics = sorted({source.topic for source in lost})
    if not lost:
        return []
    return [
        problem(
            f"group {reader.group}",
            f"the retention of {', '.join(topics)} has removed {sum(lost.values())} records that it had not read",
            advice=(
                "messages among them are lost. This is said until the group has read on. Let the topic keep them for"
                " longer than readers may be away, with"
            ),
            commands=[tools(client).alter_topic(topic, RETENTION, FOR_EVER) for topic in topics],
        )
    ]


def _judge_members(definitions: Definitions, reader: Reader, queues: list[str], waiting: Waiting) -> list[Finding]:
    if reader.members != 0:
        return []
    handled = [queue for queue in queues if definitions.settings(queue).handler is not None]
    if handled:
        return [
            problem(
                f"group {reader.group}",
                f"nobody runs the handlers of {_listed(handled)}; {_waits(queues, waiting)}",
                advice="start a worker with the role handlers (MARQ_ROLES), and their modules in MARQ_HANDLERS",
                commands=["faust -A app worker"],
            )
        ]
    if not _may_wait(queues, waiting):
        return []
    return [
        warning(
            f"group {reader.group}",
            f"nobody reads {_listed(queues)}; {_waits(queues, waiting)}",
            advice=f"start its consumer: marq.Consumer({queues[0]!r}), or give the queue a handler",
        )
    ]


def _judge_moving(
    definitions: Definitions,
    before: Reader | None,
    after: Reader,
    queues: list[str],
    waiting: Waiting,
    passed_s: float,
) -> list[Finding]:
    stuck = _stuck(before, after)
    if not stuck or not _may_wait(queues, waiting) or all(definitions.settings(queue).paused for queue in queues):
        return []
    where = ", ".join(f"{source.topic}/{source.partition}" for source in sorted(stuck)[:_SHOWN])
    return [
        warning(
            f"group {after.group}",
            f"it did not move for {passed_s:.0f} s in {where}; it reads {_listed(queues)}: {_waits(queues, waiting)}",
            advice=(
                "its consumers hold as many messages as they may and finish none: handlers are slow or hang (more"
                " consumers, a higher concurrency), or a circuit breaker is open, or a consumer is dead and its session"
                " is not over yet: run it again"
            ),
        )
    ]


def _stuck(before: Reader | None, after: Reader) -> list[Source]:
    """Return the partitions in which a group has members, something to read, and did not move."""
    if before is None or not after.members:
        return []
    return [
        source
        for source, place in after.places.items()
        if place.behind and (was := before.places.get(source)) is not None and was.behind
        if place.committed == was.committed
    ]


def _may_wait(queues: Iterable[str], waiting: Waiting) -> bool:
    return not waiting.complete or any(waiting.counts[queue] for queue in queues)


def _waits(queues: Iterable[str], waiting: Waiting) -> str:
    count = sum(waiting.counts[queue] for queue in queues)
    if not waiting.complete and not count:
        return "whether messages wait is not known"
    return f"{'' if waiting.complete else 'at least '}{count:,} message{' waits' if count == 1 else 's wait'}"


def judge_partitions(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts]
) -> list[Finding]:
    """Judge how many partitions there are beside how many settings ask for."""
    messages = found.get(client.names.messages)
    if messages is None:
        return []
    findings = []
    if messages.partitions < client.partitions:
        findings.append(
            warning(
                f"topic {client.names.messages}",
                f"it has {messages.partitions} partitions, and MARQ_PARTITIONS is {client.partitions}",
                expected="as many",
                advice=(
                    "MARQ_PARTITIONS only counts when the topic is made. More consumers of a queue than partitions get"
                    f" nothing: add some, or set MARQ_PARTITIONS={messages.partitions}. Add them with"
                ),
                commands=[tools(client).add_partitions(client.names.messages, client.partitions)],
            )
        )
    wide = {
        queue: spread
        for queue in definitions.names()
        if (spread := definitions.settings(queue).spread) is not None and spread > messages.partitions
    }
    findings += [
        warning(
            f"queue {queue}",
            f"its spread is {spread}, and {client.names.messages} has {messages.partitions} partitions",
            expected=f"at most {messages.partitions}",
            advice="it lives on all of them. Change it with",
            commands=[f"faust -A app queue {queue} --set spread={messages.partitions}"],
        )
        for queue, spread in wide.items()
    ]
    return findings


def judge_retention(client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts]) -> list[Finding]:
    """Judge whether messages are kept for as long as the settings of queues have them wait before they are read again.

    A message that waits unread is in its topic alone.
    """
    messages = found.get(client.names.messages)
    kept = -1 if messages is None else int(messages.config.get(RETENTION, FOR_EVER))
    longest = max(
        ((max(each.lease_ms, each.delay_ms), queue) for queue in definitions.names() if (each := definitions(queue))),
        default=(0, ""),
    )
    if kept < 0 or kept >= longest[0]:
        return []
    return [
        problem(
            f"topic {client.names.messages}",
            f"{RETENTION} is {kept}, and queue {longest[1]} has messages wait or be held for {longest[0]} ms",
            expected=f"{longest[0]} or more",
            advice="what waits for longer than it is kept is lost. Change it with",
            commands=[tools(client).alter_topic(client.names.messages, RETENTION, str(longest[0]))],
        )
    ]


def _listed(queues: list[str]) -> str:
    more = f" and {len(queues) - _SHOWN} more" if len(queues) > _SHOWN else ""
    return ", ".join(queues[:_SHOWN]) + more
