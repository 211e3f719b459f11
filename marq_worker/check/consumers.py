"""Checks whether messages are read: handlers that no worker runs, records removed unread, queues without consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from marq.core.deliveries.redelivery_records import GONE, LEFT_OUT
from marq.dead_letters.selection import CountKey
from marq.kafka.inspector import Waiting
from marq.kafka.role_permissions import tools
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.topic_configs import FOR_EVER, RETENTION, TopicFacts
from marq.wire.markers import Source
from marq.wire.names import Names
from marq_worker.backlog.consumer_watch import NO_CONSUMER_S
from marq_worker.findings import CheckFinding, fine, problem, warning
from marq_worker.web.conditions import NAMED, Backlog, stalled_queues, waiting_messages, without_consumer


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """The committed offset of a group in a partition, and where the partition begins."""

    committed: int
    start: int


@dataclass(frozen=True)
class ReadingGroup:
    """A consumer group of queues: ``members`` is None if we may not see them."""

    group: str
    members: int | None
    places: Mapping[Source, GroupPosition] = field(default_factory=dict)


def queues_of(group: str, names: Names, definitions: Definitions) -> list[str]:
    owner = names.owner_of_group(group)
    if owner is not None:
        return [owner] if definitions.group(owner) is None else []
    return [queue for queue in definitions.names() if definitions.consumer_group(queue, names) == group]


def judge_reading(
    client: ClientSettings,
    definitions: Definitions,
    readers: Iterable[ReadingGroup],
    waiting: Mapping[str, int] | None,
    left_out: int = 0,
    ended: Mapping[str, int] | None = None,
    stuck: Collection[str] = (),
) -> list[CheckFinding]:
    """Judge the groups that read queues.

    ``waiting``: messages by queue, None if they are not counted; ``left_out``: groups that are not in ``readers``;
    ``ended``: as :func:`ended_processes` returns it; ``stuck``: groups with a stuck handler process, for which there is
    another finding.
    """
    readers = [reader for reader in readers if queues_of(reader.group, client.names, definitions)]
    findings: list[CheckFinding] = []
    for reader in readers:
        queues = queues_of(reader.group, client.names, definitions)
        findings += _judge_lost(client, reader)
        if reader.group not in stuck:
            findings += _judge_handlers(definitions, reader, queues, waiting, ended or {})
    if left_out:
        findings.append(
            warning(
                "groups",
                f"{left_out} of {len(readers) + left_out} groups that read queues were not examined, so it is unknown"
                " whether they have lost records",
                advice="a group has lost records if its committed offset is below the earliest one: see",
                commands=["marq state"],
            )
        )
    return findings or [fine("groups", f"groups that read queues: {len(readers)}; none has lost records")]


def _judge_lost(client: ClientSettings, reader: ReadingGroup) -> Iterator[CheckFinding]:
    places = reader.places.items()
    lost = {source: place.start - place.committed for source, place in places if place.committed < place.start}
    topics = sorted({source.topic for source in lost})
    if lost:
        yield problem(
            f"group {reader.group}",
            f"the retention of {', '.join(topics)} removed {sum(lost.values())} records before it read them",
            advice=(
                "the messages among them are lost. This problem disappears once the group reads on. Increase the"
                " topic's retention beyond the longest downtime of consumers, with"
            ),
            commands=[tools(client).alter_topic(topic, RETENTION, FOR_EVER) for topic in topics],
        )


def unhandled(client: ClientSettings, definitions: Definitions, readers: Iterable[ReadingGroup]) -> list[str]:
    """Return the queues with handlers that no worker runs."""
    return [
        queue
        for reader in readers
        if reader.members == 0
        for queue in _handled(definitions, queues_of(reader.group, client.names, definitions))
    ]


def _handled(definitions: Definitions, queues: Iterable[str]) -> list[str]:
    return [queue for queue in queues if definitions.settings(queue).handler is not None]


def ended_processes(workers: Iterable[Mapping[str, Any]], names: Names) -> dict[str, int]:
    """Return the groups whose handler processes workers start again and again, and how often they have ended."""
    ended: dict[str, int] = {}
    for worker in workers:
        for process in worker["handlers"]:
            group = names.named_group(process["group"])
            ended[group] = ended.get(group, 0) + process["starts"] - (process["pid"] is not None)
    return {group: count for group, count in ended.items() if count}


def _judge_handlers(
    definitions: Definitions,
    reader: ReadingGroup,
    queues: list[str],
    waiting: Mapping[str, int] | None,
    ended: Mapping[str, int],
) -> Iterator[CheckFinding]:
    handled = _handled(definitions, queues)
    if reader.members != 0 or not handled:
        return
    count = None if waiting is None else sum(waiting.get(queue, 0) for queue in queues)
    waits = "the number of waiting messages is unknown" if count is None else waiting_messages(count)
    if times := ended.get(reader.group, 0):
        yield problem(
            f"group {reader.group}",
            f"the handlers of {_listed(handled)} do not run: their process has ended {times:,} times; {waits}",
            advice="the worker starts it again and again; its log shows why it ends",
        )
    else:
        yield problem(
            f"group {reader.group}",
            f"no worker runs the handlers of {_listed(handled)}; {waits}",
            advice="start a worker with the role handlers (MARQ_ROLES) and with their modules in MARQ_HANDLERS",
            commands=["marq worker"],
        )


def judge_partitions(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts]
) -> Iterator[CheckFinding]:
    messages = found.get(client.names.messages)
    if messages is None:
        return
    if messages.partitions < client.partitions:
        yield warning(
            f"topic {client.names.messages}",
            f"it has {messages.partitions} partitions, and MARQ_PARTITIONS is {client.partitions}",
            expected="the same number",
            advice=(
                "MARQ_PARTITIONS applies only when the topic is created. With more consumers than partitions, some"
                f" receive nothing: set MARQ_PARTITIONS={messages.partitions}, or add partitions with"
            ),
            commands=[tools(client).add_partitions(client.names.messages, client.partitions)],
        )
    for queue in definitions.names():
        count = definitions.settings(queue).partitions
        if count is not None and count > messages.partitions:
            yield warning(
                f"queue {queue}",
                f"partitions is {count}, but {client.names.messages} has {messages.partitions}",
                expected=f"at most {messages.partitions}",
                advice="the queue uses all of them. Change the setting with",
                commands=[f"marq queue {queue} --set partitions={messages.partitions}"],
            )


def judge_retention(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts]
) -> Iterator[CheckFinding]:
    """Check whether retention exceeds the longest time that a message may wait unread while only its topic has it."""
    messages = found.get(client.names.messages)
    kept_ms = -1 if messages is None else int(messages.config.get(RETENTION, FOR_EVER))
    queues = [(definitions(queue), queue) for queue in definitions.names()]
    longest_ms, queue = max(
        ((max(settings.lease_ms, settings.delay_ms), queue) for settings, queue in queues), default=(0, "")
    )
    if 0 <= kept_ms < longest_ms:
        yield problem(
            f"topic {client.names.messages}",
            f"{RETENTION} is {kept_ms}, but messages of queue {queue} may wait or be in flight for {longest_ms} ms",
            expected=f"{longest_ms} or more",
            advice="messages that wait longer than the retention are lost. Change it with",
            commands=[tools(client).alter_topic(client.names.messages, RETENTION, str(longest_ms))],
        )


def _listed(queues: list[str]) -> str:
    more = f" and {len(queues) - NAMED} more" if len(queues) > NAMED else ""
    return ", ".join(queues[:NAMED]) + more


def counted(waiting: Waiting, unattended: Collection[str], now_ms: float) -> list[Backlog]:
    """Return the backlogs of queues without consumers that were counted without workers.

    It is not known for how long they have had none, so a queue with only new messages is not reported.
    """
    counts = {
        **{key.decode("utf-8", "replace"): count for key, count in waiting.unknown_keys.items()},
        **waiting.counts,
    }
    backlogs = []
    for queue, count in sorted(counts.items()):
        sent_ms = waiting.oldest_ms.get(queue)
        oldest_s = None if sent_ms is None else max(0.0, (now_ms - sent_ms) / 1000)
        if count and queue in unattended:
            old = oldest_s is None or oldest_s >= NO_CONSUMER_S
            backlogs.append(Backlog(queue, count, oldest_s, no_consumer=old))
    return backlogs


def judge_backlogs(
    definitions: Definitions, backlogs: Iterable[Backlog], reported: Collection[str]
) -> list[CheckFinding]:
    """Judge backlogs, except of queues in ``reported``, whose handlers no worker runs."""
    listed = [
        backlog
        for backlog in backlogs
        if backlog.queue not in reported and not definitions.settings(backlog.queue).paused
    ]
    findings = [*without_consumer(listed, definitions), *stalled_queues(listed)]
    return findings or [fine("waiting messages", f"in {len(listed)} queues, each with a consumer")]


def with_large_messages(queues: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the queues of which workers have found messages that are too large, or whose records were removed."""
    return sorted(queue for queue, metrics in queues.items() if metrics.get("too_large") or metrics.get("gone"))


def judge_large_messages(dead: Mapping[CountKey, int]) -> list[CheckFinding]:
    """Judge the dead letters whose values were left out, by queue and reason; deleted ones are not among them."""
    findings = []
    for queue, gone in sorted({(group.queue, group.reason.startswith(GONE)) for group in dead}):
        groups = [group for group in dead if (group.queue, group.reason.startswith(GONE)) == (queue, gone)]
        count = sum(dead[group] for group in groups)
        number = "1 message was" if count == 1 else f"{count:,} messages were"
        advice = (
            "send it again if you can, and delete the dead letter; keep the topic's records for longer than all workers"
            " may be down."
            if gone
            else "read the record from its topic, or raise the limits of Marq's topics and send it again; then delete"
            " the dead letter."
        )
        findings.append(
            warning(
                f"queue {queue}",
                f"{number} {min(group.reason for group in groups)}",
                advice=f"{advice} List all of them with",
                commands=[f"marq dead {queue} --reason '{GONE if gone else LEFT_OUT}'"],
            )
        )
    return findings[:NAMED]
