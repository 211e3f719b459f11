"""Finds out which queues are known, so that a mistyped name does not create a new queue.

A queue needs no definition: it exists as soon as a message names it. So only a search of all sources shows that a name
is unknown. The search starts with the cheap sources, and ends when it finds the name.
"""

from __future__ import annotations

from contextlib import suppress

from aiokafka.errors import KafkaError

from marq.kafka.connection import admin_client
from marq.kafka.inspector import Inspector
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, Forbidden

#: Maximum number of records read from the messages topic.
MAX_SCANNED = 200_000


async def known_queues(settings: ClientSettings, wanted: str) -> set[str]:
    """Return the names of known queues; see :meth:`marq.backend.cluster.Cluster.known_queues`."""
    names: set[str] = set()
    # Skip sources that this client may not read.
    with suppress(Forbidden):
        names.update(await consumed_queues(settings))
    with suppress(Forbidden):
        async with Queues.of(settings) as queues:
            definitions = queues.definitions
        names.update(definitions.names())
        if wanted not in names:
            await _add_messages(names, Inspector(settings, definitions), wanted)
    return names


async def defined_or_consumed(settings: ClientSettings) -> set[str]:
    """Return the queues that have a definition or a consumer group of their own. Raises Forbidden."""
    async with Queues.of(settings) as queues:
        return {*queues.definitions.names(), *await consumed_queues(settings)}


async def _add_messages(names: set[str], inspector: Inspector, wanted: str) -> None:
    """Add the queues with open messages and, if ``wanted`` is not among them, those with waiting ones."""
    with suppress(Forbidden):
        for content in (await inspector.owned()).values():
            names.update(content.tracker.book.gauges())
    if wanted not in names:
        waiting = await inspector.waiting([wanted], MAX_SCANNED)
        names.update(waiting.counts)
        names.update(key.decode("utf-8", "replace") for key in waiting.unknown_keys)


async def consumed_queues(settings: ClientSettings) -> list[str]:
    """Return the queues that have a consumer group of their own."""
    async with admin_client(settings) as admin:
        try:
            groups = await admin.list_consumer_groups()
        except KafkaError as error:
            raise BrokerUnavailable(
                f"the consumer groups could not be listed at {settings.bootstrap_servers}: {error}; try again"
            ) from error
    return [queue for group, *_ in groups if (queue := settings.names.owner_of_group(group))]
