"""The definitions of queues: what is published, what the file of this machine says, and whether it can work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from app.checkup.findings import Finding, fine, problem, warning
from app.publication import differences
from config.queues import QueuesFile
from marq.core.definitions import Definitions
from marq.core.names import Names
from marq.core.topic_rules import LIMIT, TopicFacts, room_for_markers
from marq.rights import tools
from marq.settings import ClientSettings


def judge_file(definitions: Definitions, file: QueuesFile, *, published_by: int) -> list[Finding]:
    """Judge whether the file is what is published; ``published_by`` so many workers that run."""
    changes = differences(definitions, file)
    if not changes:
        return []
    listed = ", ".join(f"{key.decode()}{' (taken away)' if value is None else ''}" for key, value in changes.items())
    who = "the running workers read another file, or it was changed since" if published_by else "no worker has read it"
    return [
        warning(
            f"{file.path}",
            f"differs from what is published: {listed}; {who}",
            expected="the same MARQ_QUEUES_FILE for all workers",
            advice="what it says counts after the next start of a worker that reads it",
        )
    ]


def own_topics(definitions: Definitions) -> dict[str, str]:
    """Return the queue of each topic that a queue has of its own."""
    settings = {queue: definitions.settings(queue) for queue in definitions.names()}
    return {each.topic: queue for queue, each in settings.items() if each.topic is not None}


def groups_of(definitions: Definitions, names: Names) -> list[str]:
    """Return the consumer group of each queue."""
    groups = {queue: definitions.group(queue) for queue in definitions.names()}
    return [names.group(queue) if group is None else names.named_group(group) for queue, group in groups.items()]


def judge_own_topics(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts], unseen: Collection[str]
) -> list[Finding]:
    """Judge the topics that queues have of their own; of those in ``unseen`` nothing could be learned."""
    owners: dict[str, list[str]] = {}
    for queue in definitions.names():
        topic = definitions.settings(queue).topic
        if topic is not None:
            owners.setdefault(topic, []).append(queue)
    findings: list[Finding] = []
    for topic, queues in owners.items():
        findings += _judge_owners(client, topic, queues)
        if topic in found:
            findings += _judge_limit(client, topic, found)
        elif topic not in unseen and not client.names.is_own_topic(topic):
            findings.append(_absent(client, topic, queues[0]))
    return findings


def _judge_owners(client: ClientSettings, topic: str, queues: Sequence[str]) -> list[Finding]:
    if client.names.is_own_topic(topic):
        return [problem(f"queue {queues[0]}", f"its topic {topic} is marq's own", advice="take `topic` out of it")]
    if len(queues) > 1:
        return [
            problem(
                f"topic {topic}",
                f"belongs to several queues: {', '.join(queues)}",
                expected="one queue for a topic",
                advice="take `topic` from the others, in queues.toml or with",
                commands=[f"faust -A app queue {queue} --unset topic" for queue in queues[1:]],
            )
        ]
    return []


def _absent(client: ClientSettings, topic: str, queue: str) -> Finding:
    return problem(
        f"queue {queue}",
        f"its topic {topic} does not exist",
        advice="take `topic` out of the queue's settings, or make it with",
        commands=[tools(client).create_topic(topic, client.partitions, client.replication_factor, {})],
    )


def _judge_limit(client: ClientSettings, topic: str, found: Mapping[str, TopicFacts]) -> list[Finding]:
    names = client.names
    needed = room_for_markers(found[topic].limit_bytes)
    small = [
        name
        for name in (names.markers, names.dead_letters, names.changelog)
        if name in found and found[name].limit_bytes < needed
    ]
    if not small:
        return []
    return [
        problem(
            f"topic {topic}",
            f"accepts {found[topic].limit_bytes} bytes, and {', '.join(small)} can't carry a marker of that size",
            expected=f"{LIMIT} of {needed} or more there",
            advice="change it with",
            commands=[tools(client).alter_topic(name, LIMIT, str(needed)) for name in small],
        )
    ]


def judge_unreadable(topic: str, unreadable: Iterable[tuple[int, str]]) -> list[Finding]:
    """Judge records of the queues topic that are no definitions."""
    return [
        warning(f"topic {topic}", f"the record at offset {offset} is no definition and is ignored: {why:.300}")
        for offset, why in unreadable
    ]


def judge_defined(definitions: Definitions) -> Finding:
    """Say what is defined."""
    names = definitions.names()
    return fine(
        "queues", f"{len(names)} defined: {', '.join(names)}" if names else "none is defined; all have defaults"
    )
