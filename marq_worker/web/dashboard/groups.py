"""The consumers of queues as the broker knows them: group members, their partitions and positions.

The broker is queried when a page needs it, with a time limit; answers that do not arrive in time count as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.kafka.connection import client_options, close_admin, started
from marq.kafka.group_members import DescribedGroup, described_members
from marq.kafka.log_reader import LogReader
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError

log = logging.getLogger("marq.web")

#: How long an answer is fresh, and the time limit of the broker.
FRESH_S = 5.0
LIMIT_S = 2.0
#: Groups to describe: each needs a request for its coordinator, once.
MAX_GROUPS = 200
_STOP_S = 0.5

T = TypeVar("T")


class Groups:
    """Queries the broker with two clients of its own, created on first use; they belong to no group."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._admin: AIOKafkaAdminClient | None = None
        self._reader: LogReader | None = None
        self._coordinators: dict[str, int] = {}
        #: The time of the last description and the members, by group.
        self._known: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        admin, self._admin = self._admin, None
        reader, self._reader = self._reader, None
        if admin is not None:
            await close_admin(admin)
        if reader is not None:
            await reader.stop(_STOP_S)

    async def names(self) -> list[str] | None:
        """Return the groups of the namespace's queues, sorted; None if not known."""
        names = self._client.names

        async def list_groups() -> list[str]:
            listed = await (await self._admin_client()).list_consumer_groups()
            return sorted(group for group, *_ in listed if names.is_group(group))

        return await self._in_time(list_groups())

    async def members(self, groups: Sequence[str], wait_s: float = LIMIT_S) -> dict[str, list[dict[str, Any]]]:
        """Return the members of groups; unknown groups are missing.

        With a short ``wait_s`` the answer may only be available to the next call.
        """
        groups = groups[:MAX_GROUPS]
        now_s = time.monotonic()
        old = [group for group in groups if now_s - self._known.get(group, (-FRESH_S, ()))[0] >= FRESH_S]
        if old and self._looking is None:
            self._looking = asyncio.create_task(self._look(old), name="consumers of queues")
            self._looking.add_done_callback(self._looked)
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=wait_s)
        return {group: self._known[group][1] for group in groups if group in self._known}

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return a group's committed offsets in a topic, by partition; empty if none or not known."""

        async def ask() -> dict[int, int]:
            offsets = await (await self._admin_client()).list_consumer_group_offsets(group)
            return {tp.partition: committed.offset for tp, committed in offsets.items() if tp.topic == topic}

        return await self._in_time(ask()) or {}

    async def ends(self, topic: str) -> dict[int, int]:
        """Return the ends of a topic's partitions; empty if not known."""

        async def ask() -> dict[int, int]:
            reader = await self._log_reader()
            # To ask for the ranges of a missing topic might create it.
            ranges = await reader.ranges(topic) if await reader.has_topic(topic) else {}
            return {source.partition: span.stop for source, span in ranges.items()}

        return await self._in_time(ask()) or {}

    async def _look(self, groups: Sequence[str]) -> None:
        async def find() -> None:
            admin = await self._admin_client()
            for group in groups:
                if group not in self._coordinators:
                    self._coordinators[group] = await admin.find_coordinator(group)

        async def describe() -> None:
            coordinators = {group: self._coordinators[group] for group in groups if group in self._coordinators}
            if coordinators:
                self._take(await described_members(await self._admin_client(), coordinators))

        # With many groups and slow brokers, it takes several calls to find all coordinators.
        await self._in_time(find())
        await self._in_time(describe(), forget=True)

    def _take(self, described: Iterable[DescribedGroup]) -> None:
        for group in described:
            if group.error:
                self._coordinators.pop(group.name, None)
                continue
            members = [member.document() | {"state": group.state} for member in group.members]
            self._known[group.name] = (time.monotonic(), members)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if not task.cancelled() and task.exception() is not None:
            log.warning("the consumers of queues could not be looked up: %r", task.exception())

    async def _in_time(self, asking: Awaitable[T], *, forget: bool = False) -> T | None:
        """Return an answer, or None after an error or a timeout; ``forget``: a timeout discards the coordinators."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await asking
        except (KafkaError, MarqError, TimeoutError, OSError) as error:
            log.debug("the broker did not tell: %r", error)
            if forget or not isinstance(error, TimeoutError):
                self._coordinators.clear()
            return None

    async def _admin_client(self) -> AIOKafkaAdminClient:
        async with self._lock:
            if self._admin is None:
                make = partial(AIOKafkaAdminClient, **client_options(self._client))
                self._admin = await started(make, self._client, close_admin)
            return self._admin

    async def _log_reader(self) -> LogReader:
        async with self._lock:
            if self._reader is None:
                reader = LogReader(self._client, committed=False)
                await reader.start()
                self._reader = reader
            return self._reader
