"""Judges whether groups read all messages: handlers that no worker runs, and records that retention removed unread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.checkup.findings import Finding, fine, problem, warning
from marq.core.definitions import Definitions
from marq.core.markers import Source
from marq.core.names import Names
from marq.core.topic_rules import FOR_EVER, RETENTION, TopicFacts
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
    """A consumer group of queues: ``members`` is None where nobody may tell."""

    group: str
    members: int | None
    places: Mapping[Source, Place] = field(default_factory=dict)

    @property
    def behind(self) -> int:
        return sum(place.behind for place in self.places.values())


def queues_of(group: str, names: Names, definitions: Definitions) -> list[str]:
    """Return the queues that a Kafka group reads."""
    owner = names.owner_of_group(group)
    if owner is not None:
        return [owner] if definitions.group(owner) is None else []
    return [queue for queue in definitions.names() if _kafka_group(queue, names, definitions) == group]


def _kafka_group(queue: str, names: Names, definitions: Definitions) -> str:
    named = definitions.group(queue)
    return names.group(queue) if named is None else names.named_group(named)


def judge_reading(
    client: ClientSettings, definitions: Definitions, readers: Iterable[Reader], waiting: Mapping[str, int] | None
) -> list[Finding]:
    """Judge the groups that read queues; ``waiting``: messages by queue, None where they are not counted."""
    readers = [reader for reader in readers if queues_of(reader.group, client.names, definitions)]
    findings = []
    for reader in readers:
        queues = queues_of(reader.group, client.names, definitions)
        findings += _judge_lost(client, reader)
        findings += _judge_handlers(definitions, reader, queues, waiting)
    return findings or [fine("groups", f"{len(readers)} that read queues; none has lost a record")]


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


def unhandled(client: ClientSettings, definitions: Definitions, readers: Iterable[Reader]) -> list[str]:
    """Return the queues with handlers that no worker runs."""
    return [
        queue
        for reader in readers
        if reader.members == 0
        for queue in _handled(definitions, queues_of(reader.group, client.names, definitions))
    ]


def _handled(definitions: Definitions, queues: Iterable[str]) -> list[str]:
    return [queue for queue in queues if definitions.settings(queue).handler is not None]


def _judge_handlers(
    definitions: Definitions, reader: Reader, queues: list[str], waiting: Mapping[str, int] | None
) -> list[Finding]:
    handled = _handled(definitions, queues)
    if reader.members != 0 or not handled:
        return []
    count = None if waiting is None else sum(waiting.get(queue, 0) for queue in queues)
    waits = (
        "whether messages wait is not known"
        if count is None
        else f"{count:,} message{' waits' if count == 1 else 's wait'}"
    )
    return [
        problem(
            f"group {reader.group}",
            f"nobody runs the handlers of {_listed(handled)}; {waits}",
            advice="start a worker with the role handlers (MARQ_ROLES), and their modules in MARQ_HANDLERS",
            commands=["faust -A app worker"],
        )
    ]


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
