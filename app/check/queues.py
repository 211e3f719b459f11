"""The definitions of queues: the published ones, the file of this machine, their topics and their handlers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from marq.kafka.permissions import tools
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.topic_rules import LIMIT, TopicFacts, room_for_markers
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.agents.handler_groups import handler_groups, without_handler
from marq_worker.agents.queue_consumer import load_handler, load_modules, surrounding
from marq_worker.app.check.findings import Finding, fine, problem, warning
from marq_worker.app.handlers.role import lacks_handler, part_of_group, publication
from marq_worker.app.publication import differences
from marq_worker.config.queues import QueuesFile


def judge_file(definitions: Definitions, file: QueuesFile, *, published_by: int) -> list[Finding]:
    """Judge whether the file equals the published definitions; ``published_by``: number of running workers."""
    changes = differences(definitions, file)
    if not changes:
        return []
    try:
        definitions.after(changes).check_leases()
    except ConfigError as error:
        return [problem(f"{file.path}", str(error), advice="no worker starts with this file until then")]
    listed = ", ".join(f"{key.decode()}{' (removed)' if value is None else ''}" for key, value in changes.items())
    reason = "workers read another file, or this one has changed since" if published_by else "no worker has read it"
    return [
        warning(
            f"{file.path}",
            f"differs from the published definitions: {listed}; {reason}",
            expected="the same MARQ_QUEUES_FILE for all workers",
            advice="a worker publishes it at its next start",
        )
    ]


def own_topics(definitions: Definitions) -> dict[str, str]:
    """Return the queue of each topic that a queue has of its own."""
    settings = {queue: definitions.settings(queue) for queue in definitions.names()}
    return {
        queue_settings.topic: queue for queue, queue_settings in settings.items() if queue_settings.topic is not None
    }


def groups_of(definitions: Definitions, names: Names) -> list[str]:
    return [definitions.consumer_group(queue, names) for queue in definitions.names()]


def judge_own_topics(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts], unseen: Collection[str]
) -> list[Finding]:
    """Judge the topics that queues have of their own; those in ``unseen`` could not be looked up."""
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
        return [problem(f"queue {queues[0]}", f"its topic {topic} belongs to marq", advice="unset its `topic`")]
    if len(queues) > 1:
        return [
            problem(
                f"topic {topic}",
                f"belongs to several queues: {', '.join(queues)}",
                expected="one queue for a topic",
                advice="remove `topic` from the others, in marq.toml or with",
                commands=[f"marq queue {queue} --unset topic" for queue in queues[1:]],
            )
        ]
    return []


def _absent(client: ClientSettings, topic: str, queue: str) -> Finding:
    return problem(
        f"queue {queue}",
        f"its topic {topic} does not exist",
        advice="remove the queue's setting `topic`, or create the topic with",
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
    """Judge records of the queues topic that are not definitions."""
    return [
        warning(f"topic {topic}", f"the record at offset {offset} is not a definition and is ignored: {why:.300}")
        for offset, why in unreadable
    ]


def judge_defined(definitions: Definitions) -> Finding:
    names = definitions.names()
    return fine(
        "queues", f"{len(names)} defined: {', '.join(names)}" if names else "none are defined; all use the defaults"
    )


def judge_handlers(definitions: Definitions, file: QueuesFile, modules: tuple[str, ...]) -> list[Finding]:
    """Import the handlers that a worker would run after publishing its definitions, and judge them.

    Blocks for as long as the imports take.
    """
    try:
        decorated, around = load_modules(modules), surrounding(modules)
    except ConfigError as error:
        return [problem("handlers", str(error))]
    after = definitions.after(differences(definitions, file))
    after = after.after(publication(after, {handler.queue: handler.document for handler in decorated}, modules))
    groups = handler_groups(after, {handler.queue: handler.name for handler in decorated}, around)
    findings = []
    for group in groups.values():
        for queue, handled in group.queues.items():
            try:
                load_handler(queue, handled.handler)
            except ConfigError as error:
                findings.append(problem("handlers", str(error)))
        rest = without_handler(after, group)
        if rest:
            judged = problem if lacks_handler(after, rest) else warning
            findings.append(judged("handlers", part_of_group(group, rest, after)))
    queues = [queue for group in groups.values() for queue in group.queues]
    return findings or ([fine("handlers", f"can be imported: {', '.join(queues)}")] if queues else [])
