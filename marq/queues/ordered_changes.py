"""Refuses changes to settings that would break the order of messages that a queue already has.

Order holds only within a partition. Messages of a key that are in two places, or that were sent while the queue was
not ordered, could overtake each other. Delayed messages count, too: a tracker that does not know the change yet may
send one to its former partition, and never sends one to a queue's own topic. A queue of the messages topic may become
ordered at any time, because its earlier messages have no keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from marq.queues.definition_log import DefinitionLog, UnfinishedMessages
from marq.settings.definitions import Definitions
from marq.settings.queue import TURN_KEYS, QueueSettings
from marq.wire.errors import ConfigError


def order_changes(before: Definitions, after: Definitions) -> Iterator[tuple[str, str]]:
    """Yield the queues whose messages would lose their order, with the changed setting."""
    for queue in sorted({*before.names(), *after.names()}):
        key = _changed(before.settings(queue), after.settings(queue))
        if key is not None:
            yield queue, key


async def check_order(log: DefinitionLog, before: Definitions, after: Definitions) -> None:
    """Refuse a change that would break the order of messages.

    Raises:
        ConfigError: a queue has messages, and its partitions, its topic or its ordering would change.
        BrokerUnavailable: it is unknown whether it has messages.
    """
    for queue, key in order_changes(before, after):
        messages = await log.messages_of(queue, before)
        if messages:
            raise ConfigError(refusal(queue, key, messages))


def refusal(queue: str, key: str, messages: UnfinishedMessages) -> str:
    if not messages._replace(uncommitted=0):
        return (
            f"queue {queue!r}: {key} can't change yet, because {messages.uncommitted:,} finished messages would be"
            " delivered again: the queue's consumers have not committed their offsets. Let a consumer run for some"
            " seconds, and repeat the change"
        )
    if key in TURN_KEYS:
        return (
            f"queue {queue!r}: {key} can't be removed while the queue has messages ({messages}), because its consumers"
            " would not deliver them again: wait until all are processed, or set limits = {}, which lifts all limits,"
            " before you remove fair or priority"
        )
    return (
        f"queue {queue!r}: {key} can't change while the queue has messages ({messages}), because messages of the same"
        " ordering key could overtake each other: stop its senders, wait until its consumers have processed all"
        " messages, and repeat the change"
    )


def _changed(before: QueueSettings, after: QueueSettings) -> str | None:
    if not before.by_key:
        return "ordering" if after.ordered and after.topic is not None else None
    if not after.by_key:
        # Its tracker would deliver no message again: messages keep their places until their consumers do that.
        return next(key for key in ("ordering", *TURN_KEYS) if getattr(before, key) != getattr(after, key))
    return next(
        (key for key in ("ordering", "topic", "partitions") if getattr(before, key) != getattr(after, key)), None
    )
