"""Which workers keep leases, as the broker knows it: the members of their group, each with its address.

Faust tells the group each member's address, and the broker shows it to whoever may describe the group. So a worker need
not be a member to ask all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, for_code
from yarl import URL

from marq.connection import client_options, close_admin
from marq.reconnects import paced
from marq.settings import ClientSettings

log = logging.getLogger("marq.web")

#: How long an answer is good for, and how long the broker may take to give one.
FRESH_S = 1.0
LOOK_LIMIT_S = 1.5


@dataclass(frozen=True, slots=True)
class Members:
    """``urls``: one for each tracker; not ``settled``: some may be missing, for a rebalance or the broker's silence.

    ``answered``: whether the broker has answered, be it that it may not say.
    """

    urls: Sequence[URL] = ()
    settled: bool = False
    answered: bool = False


class Group:
    """The trackers' group, looked at when somebody asks and not more often than an answer is good for."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._admin: AIOKafkaAdminClient | None = None
        self._members = Members()
        self._looked_s = -FRESH_S
        self._looking: asyncio.Lock | None = None
        self._refused = False

    async def members(self) -> Members:
        """Return the trackers; where that can't be found out now, those that were known before."""
        if self._looking is None:
            self._looking = asyncio.Lock()
        async with self._looking:
            if time.monotonic() - self._looked_s >= FRESH_S:
                self._members = await self._look()
                self._looked_s = time.monotonic()
        return self._members

    async def unassigned(self, groups: Collection[str]) -> list[str]:
        """Return the groups in which no member has a partition; [] if the broker does not answer."""
        if not groups:
            return []
        if self._looking is None:
            self._looking = asyncio.Lock()
        async with self._looking:
            try:
                async with asyncio.timeout(LOOK_LIMIT_S):
                    return [group for group in groups if reads_nothing(*await self._described(group))]
            except (KafkaError, TimeoutError) as error:
                log.debug("whether groups have partitions could not be looked up: %r", error)
                await self.stop()
                return []

    async def stop(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await close_admin(admin)

    async def _look(self) -> Members:
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                found = await self._describe()
        except (KafkaError, TimeoutError) as error:
            self._note(error)
            await self.stop()
            return Members(self._members.urls, answered=isinstance(error, GroupAuthorizationFailedError))
        return Members(self._members.urls if found is None else found, found is not None, answered=True)

    def _note(self, error: Exception) -> None:
        if isinstance(error, GroupAuthorizationFailedError) and not self._refused:
            self._refused = True
            log.warning(
                "figures of other workers are missing: this one has no right to describe the group %s",
                self._client.names.app_id,
            )
        else:
            log.debug("the trackers' group could not be looked up: %r", error)

    async def _describe(self) -> list[URL] | None:
        """Return the members' addresses; None during a rebalance, when the broker does not tell them."""
        state, members = await self._described(self._client.names.app_id)
        if members and state != "Stable":
            return None
        return [told_url(metadata) for _, _, _, metadata, *_ in members]

    async def _described(self, group: str) -> tuple[str, Sequence[Any]]:
        """Return a group's state, and its members: (member id, client id, host, metadata, assignment)."""
        if self._admin is None:
            admin = paced(AIOKafkaAdminClient(**client_options(self._client)))
            self._admin = admin
            await admin.start()
        [response] = await self._admin.describe_consumer_groups([group])
        # (error, group, state, protocol type, protocol, members, …)
        [(code, _, state, _, _, members, *_)] = response.groups
        if code:
            raise for_code(code)
        return state, members


def told_url(metadata: bytes) -> URL:
    """Return the address in what Faust's assignor tells of a member."""
    told = ConsumerProtocolMemberMetadata.decode(metadata).user_data
    return URL(json.loads(told)["url"])


def reads_nothing(state: str, members: Sequence[Sequence[Any]]) -> bool:
    """Return whether no member of a described group has a partition, or may get one at the end of a rebalance."""
    return not members or (state == "Stable" and not has_partitions(members))


def has_partitions(members: Iterable[Sequence[Any]]) -> bool:
    """Return whether any member of a group that was described has a partition."""
    # The assignment of a member that waits for the end of a rebalance is empty.
    assignments = (assignment for _, _, _, _, assignment, *_ in members if assignment)
    return any(ConsumerProtocolMemberAssignment.decode(each).partitions() for each in assignments)
