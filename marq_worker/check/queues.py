"""The definitions of queues: the published ones, the file of this machine, their topics and their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping

from marq.kafka.role_permissions import tools
from marq.queues.definition_log import definition_log
from marq.queues.ordered_changes import order_changes, refusal
from marq.settings.client import ClientSettings
from marq.settings.combinations import check_combinations, check_topic
from marq.settings.definitions import Definitions
from marq.settings.limits import KeyLimits, key_header
from marq.settings.queue import ORDERING_KEY
from marq.settings.topic_configs import LIMIT, TopicFacts, room_for_markers
from marq.wire.errors import ConfigError, MarqError
from marq.wire.names import Names
from marq_worker.check.cluster import SampledKeys
from marq_worker.config.queues import QueuesFile
from marq_worker.findings import CheckFinding, exit_code, fine, problem, warning
from marq_worker.handlers.handler_groups import handler_groups, without_handler
from marq_worker.handlers.handlers_role import check, lacks_handler, part_of_group, publication, unpublished
from marq_worker.handlers.loaded_handlers import load_handlers_of, load_modules, surrounding
from marq_worker.publication import check_topics, defined, differences, left_over, listed

#: Time limit of the search for messages of an ordered queue that the file changes.
ORDER_LIMIT_S = 30.0
#: Fewer messages say nothing about whether the others have keys.
MIN_SAMPLED = 20


def judge_file(
    definitions: Definitions, names: Names, file: QueuesFile, *, published_by: int
) -> Iterator[CheckFinding]:
    """Judge whether the file equals the published definitions; ``published_by``: number of running workers."""
    try:
        changes = differences(definitions, file)
        after = definitions.after(changes)
        check_topics(after, names, file)
        check_combinations(after)
    except ConfigError as error:
        yield problem(f"{file.path}", str(error), advice="no worker starts with this file until then")
        return
    if not changes:
        yield from _judge_left_over(after, file)
        return
    said = ", ".join(f"{defined(key)}{' (removed)' if value is None else ''}" for key, value in changes.items())
    reason = "workers read another file, or this one has changed since" if published_by else "no worker has read it"
    yield warning(
        f"{file.path}",
        f"differs from the published definitions: {said}; {reason}",
        expected="the same MARQ_QUEUES_FILE for all workers",
        advice="a worker publishes it at its next start",
    )


def _judge_left_over(definitions: Definitions, file: QueuesFile) -> Iterator[CheckFinding]:
    if file.present and (left := left_over(definitions, file)):
        yield warning(
            f"{file.path}",
            f"does not define {listed(left)}, which no start removes, because they name no project",
            advice="`marq queue NAME --forget` removes a queue that is no longer used. Name this project in marq.toml:"
            ' [settings] project = "NAME"',
        )


def with_file(definitions: Definitions, file: QueuesFile | None) -> Definitions:
    """Return the definitions after a worker has published the file, or the same if it would be refused."""
    try:
        return definitions if file is None else definitions.after(differences(definitions, file))
    except ConfigError:
        return definitions


async def look_at_file(
    client: ClientSettings, definitions: Definitions, file: QueuesFile, *, published_by: int
) -> list[CheckFinding]:
    """Judge the file as :func:`judge_file`, and whether it would break the order of messages."""
    findings = [*judge_file(definitions, client.names, file, published_by=published_by)]
    log = definition_log(client)
    for queue, key in order_changes(definitions, with_file(definitions, file)):
        try:
            async with asyncio.timeout(ORDER_LIMIT_S):
                messages = await log.messages_of(queue, definitions)
        except (MarqError, TimeoutError) as error:
            findings.append(warning(f"queue {queue}", f"unknown whether it has messages, so {key} can change: {error}"))
        else:
            if messages:
                said = refusal(queue, key, messages)
                findings.append(problem(f"{file.path}", said, advice="no worker starts with this file until then"))
    return findings


def groups_of(definitions: Definitions, names: Names) -> list[str]:
    return [definitions.consumer_group(queue, names) for queue in definitions.names()]


def judge_own_topics(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts], unseen: Collection[str]
) -> Iterator[CheckFinding]:
    """Judge the topics that queues have of their own; those in ``unseen`` could not be looked up."""
    for queue in definitions.names():
        try:
            check_topic(definitions, queue, client.names)
        except ConfigError as error:
            yield problem(f"queue {queue}", str(error), advice="change marq.toml, or use `marq queue`")
    for topic, queues in definitions.owners_of_topics().items():
        if topic in found:
            yield from _judge_limit(client, topic, found)
        elif topic not in unseen and not client.names.is_own_topic(topic):
            yield problem(
                f"queue {queues[0]}",
                f"its topic {topic} does not exist",
                advice="remove the queue's setting `topic`, or create the topic with",
                commands=[tools(client).create_topic(topic, client.partitions, client.replication_factor, {})],
            )


def _judge_limit(client: ClientSettings, topic: str, found: Mapping[str, TopicFacts]) -> Iterator[CheckFinding]:
    names = client.names
    needed = room_for_markers(found[topic].limit_bytes)
    small = [
        name
        for name in (names.markers, names.dead_letters, names.changelog)
        if name in found and found[name].limit_bytes < needed
    ]
    if small:
        yield problem(
            f"topic {topic}",
            f"accepts {found[topic].limit_bytes} bytes, and {', '.join(small)} can't carry a marker of that size",
            expected=f"{LIMIT} of {needed} or more there",
            advice="change it with",
            commands=[tools(client).alter_topic(name, LIMIT, str(needed)) for name in small],
        )


def judge_limits(
    client: ClientSettings, definitions: Definitions, found: Mapping[str, TopicFacts]
) -> Iterator[CheckFinding]:
    """Judge limits that are not exact with the partitions of their queues."""
    for queue in definitions.names():
        settings = definitions.settings(queue)
        topic = settings.topic or client.names.messages
        limits, sends = settings.limits, None if settings.topic else definitions.placement(queue).sends
        if limits is None or (sends is None and topic not in found):
            continue
        count = found[topic].partitions if sends is None else len(sends)
        if limits.concurrency is not None and limits.concurrency < count:
            yield warning(
                f"queue {queue}",
                f"limits.concurrency is {limits.concurrency}, and its messages are in {count} partitions: if more than"
                f" {limits.concurrency} consumer processes read them, each runs one message",
                advice=f"set partitions = {limits.concurrency} if the limit must be exact",
            )
        if settings.key != ORDERING_KEY and limits.per_key != KeyLimits() and count > 1:
            yield warning(
                f"queue {queue}",
                f"limits.per_key go by {settings.key!r}, so they apply to each of its {count} partitions",
                advice="send with ordering_key instead, or set partitions = 1, if they must be exact",
            )


def with_keys(definitions: Definitions) -> list[str]:
    """Return the queues whose keys take turns or have limits."""
    return [
        queue
        for queue in definitions.names()
        if (settings := definitions.settings(queue)).fair
        or (settings.limits is not None and settings.limits.per_key != KeyLimits())
    ]


def judge_keys(definitions: Definitions, sampled: Mapping[str, SampledKeys]) -> Iterator[CheckFinding]:
    """Judge keys that most messages lack."""
    for queue, (messages, without) in sampled.items():
        if messages < MIN_SAMPLED or without * 2 <= messages:
            continue
        key = definitions.settings(queue).key
        if key == ORDERING_KEY:
            lacking, advice = "ordering key", "send with ordering_key"
        else:
            header = key_header(key)
            lacking = f"header {header}, which is their key"
            advice = f"send the header {header}, or change the setting `key`"
        yield warning(
            f"queue {queue}",
            f"{without} of its newest {messages} messages have no {lacking}; each of them is a key of its own",
            expected="a key for most messages, because of `fair` or limits.per_key",
            advice=advice,
        )


def judge_priorities(definitions: Definitions) -> Iterator[CheckFinding]:
    """Judge priorities of queues that have no other queue to compare with."""
    for queue in definitions.names():
        settings, group = definitions.settings(queue), definitions.group(queue)
        if settings.priority is None:
            continue
        others = [other for other in definitions.queues_of(group or "") if other != queue]
        without = [
            other
            for other in others
            if definitions.settings(other).priority is None and not definitions.settings(other).paused
        ]
        if without:
            yield warning(
                f"queue {queue}",
                f"has a priority, and queue {without[0]} of the same group {group} has none: it waits for no queue, and"
                " messages of higher priorities behind those of lower ones are not read early",
                advice=f"give {', '.join(without[:5])} a priority, too, or another group",
            )
        elif not others:
            yield warning(
                f"queue {queue}",
                "has a priority, but no other queue is in its group",
                advice="set the same `group` in the queues to compare, or leave priority out",
            )


def judge_unreadable(topic: str, unreadable: Iterable[tuple[int, str]]) -> list[CheckFinding]:
    """Judge records of the queues topic that are not definitions."""
    return [
        warning(f"topic {topic}", f"the record at offset {offset} is not a definition and is ignored: {why:.300}")
        for offset, why in unreadable
    ]


def judge_defined(definitions: Definitions) -> CheckFinding:
    names = definitions.names()
    return fine(
        "queues", f"{len(names)} defined: {', '.join(names)}" if names else "none are defined; all use the defaults"
    )


def judge_handlers(definitions: Definitions, file: QueuesFile, modules: tuple[str, ...]) -> list[CheckFinding]:
    """Import the handlers that a worker would run after publishing its definitions, and judge them.

    Blocks for as long as the imports take.
    """
    try:
        decorated, around = load_modules(modules), surrounding(modules)
    except ConfigError as error:
        return [problem("handlers", str(error))]
    after = with_file(definitions, file)
    documents = {queue: queue_handlers.document for queue, queue_handlers in decorated.items()}
    try:
        after = after.after(publication(after, documents, modules, file.project))
    except ConfigError as error:
        return [problem("handlers", str(error))]
    own = {queue: queue_handlers.name for queue, queue_handlers in decorated.items() if queue_handlers.name is not None}
    types = {queue: queue_handlers.types for queue, queue_handlers in decorated.items()}
    groups = handler_groups(after, own, around, file.runs_project, types)
    findings = []
    for group in groups.values():
        for queue, handled in group.queues.items():
            try:
                load_handlers_of(queue, handled)
            except ConfigError as error:
                findings.append(problem("handlers", str(error)))
        rest = without_handler(after, group)
        if rest:
            judged = problem if lacks_handler(after, rest) else warning
            findings.append(judged("handlers", part_of_group(group, rest, after)))
    if not exit_code(findings):
        try:
            check(after, groups, own)
        except ConfigError as error:
            return [*findings, problem("handlers", str(error), advice="no worker starts until then")]
        findings += [warning("handlers", text) for text in unpublished(groups, documents)]
    queues = [queue for group in groups.values() for queue in group.queues]
    return findings or ([fine("handlers", f"can be imported: {', '.join(queues)}")] if queues else [])
