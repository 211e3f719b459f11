"""Finds the queues that no consumer reads, from the members of their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, NotCoordinatorForGroupError, for_code

from app.group_members import STABLE, DescribedGroup, described_members, listed_groups
from marq.connection import client_options, close_admin
from marq.core.definitions import Definitions
from marq.core.names import Names
from marq.reconnects import paced
from marq.settings import ClientSettings


def group_of(queue: str, names: Names, definitions: Definitions) -> str:
    """Return the Kafka group that reads a queue."""
    named = definitions.group(queue)
    return names.group(queue) if named is None else names.named_group(named)


async def unattended(
    admin: AIOKafkaAdminClient, names: Names, definitions: Definitions, queues: Collection[str]
) -> set[str]:
    """Return the queues that no member of their group reads; raises KafkaError.

    Queues whose group this client may not describe are left out. A group that the broker does not list is described
    anyway, because this client may have no permission to see it.
    """
    groups = {queue: group_of(queue, names, definitions) for queue in queues}
    listed = await listed_groups(admin)
    anywhere = next(iter(listed.values()), None)
    if anywhere is None:
        anywhere = int((await admin.describe_cluster())["brokers"][0]["node_id"])
    wanted = {group: listed.get(group, anywhere) for group in sorted(set(groups.values()))}
    described = {each.name: each for each in await described_members(admin, wanted)}
    # An unlisted group may have been looked up at a broker that is not its coordinator.
    missing = {
        name
        for name, each in described.items()
        if name not in listed and each.error == NotCoordinatorForGroupError.errno
    }
    return {
        queue
        for queue, group in groups.items()
        if group in missing or not is_read(queue, described[group], names, definitions)
    }


def is_read(queue: str, group: DescribedGroup, names: Names, definitions: Definitions) -> bool:
    """Return whether a member of a queue's group reads a partition of the queue, or may soon; raises KafkaError."""
    if group.error == GroupAuthorizationFailedError.errno:
        return True
    if group.error:
        raise for_code(group.error)(f"group {group.name} could not be described")
    if group.members and group.state != STABLE:
        # A rebalance: the members get their partitions at its end.
        return True
    own, reads = definitions.settings(queue).topic, definitions.placement(queue).reads
    return any(
        topic == own or (topic == names.messages and (reads is None or not set(reads).isdisjoint(numbers)))
        for member in group.members
        for topic, numbers in member.partitions.items()
        if numbers
    )


class ConsumerLook:
    """Looks up consumers with its own admin client, created on first use and again after an error."""

    def __init__(self, client: ClientSettings, definitions: Callable[[], Definitions]) -> None:
        self._client = client
        self._definitions = definitions
        self._admin: AIOKafkaAdminClient | None = None

    async def unattended(self, queues: Collection[str]) -> set[str]:
        """Return what :func:`unattended` does; raises as it does."""
        try:
            if self._admin is None:
                self._admin = paced(AIOKafkaAdminClient(**client_options(self._client)))
                await self._admin.start()
            return await unattended(self._admin, self._client.names, self._definitions(), queues)
        except (KafkaError, OSError, TimeoutError, asyncio.CancelledError):
            await self.stop()
            raise

    async def stop(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await close_admin(admin)
