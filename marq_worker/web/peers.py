"""The other workers: finds them as members of the trackers' group, and queries them over HTTP.

Faust stores each member's address in the group, and the broker shows it to clients that may describe the group. So a
command, which is not a member, can query all workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import ClientError, ClientSession, ClientTimeout
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, for_code
from yarl import URL

from marq.kafka.connection import client_options, close_admin
from marq.kafka.group_members import STABLE, DescribedGroup, described_members
from marq.kafka.paced_clients import paced
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError, MarqError
from marq_worker.config.settings import AppSettings, load_settings
from marq_worker.web.credentials import Credentials

#: Time limit of a worker's answer before its metrics count as missing, and the limit of commands.
PEER_SECONDS = 1.0
COMMAND_SECONDS = 10.0


def authorization(settings: AppSettings) -> dict[str, str]:
    """Return the headers that authenticate a worker, or a command with its settings, at all workers."""
    token = Credentials.of(settings).peer_token
    return {"Authorization": f"Bearer {token}"} if token else {}


def path_segment(queue: str) -> str:
    """Return the name of a queue for the path of a request to a worker."""
    # A URL loses segments that are "." or "..".
    return quote(queue, safe="").replace(".", "%2E")


async def ask_each(
    client: ClientSession,
    urls: Sequence[URL],
    path: str,
    query: Mapping[str, str],
    *,
    own: URL | None = None,
    limit_s: float = PEER_SECONDS,
) -> list[dict[str, Any] | None]:
    """Return the JSON answer of each worker, None if there is none; ``own``: our address; ``path`` is quoted.

    Each address is asked once: if several workers have the same one (or ours), the others can't be reached.
    """
    different = {url: index for index, url in reversed(list(enumerate(urls))) if url != own}
    # Names in the path are already quoted, as a slash in one of them must be.
    asked = (
        _ask(client, url.joinpath(path, encoded=True) % {**query, "scope": "worker"}, limit_s) for url in different
    )
    answers = dict(zip(different, await asyncio.gather(*asked), strict=True))
    return [answers[url] if different.get(url) == index else None for index, url in enumerate(urls)]


async def ask_workers(
    settings: ClientSettings, path: str, query: Mapping[str, str] | None = None
) -> tuple[Members, list[dict[str, Any] | None]]:
    """Query all workers from a command; return the workers and their answers."""
    group = TrackersGroup(settings)
    try:
        members = await group.members()
    finally:
        await group.stop()
    async with ClientSession(headers=authorization(load_settings())) as session:
        return members, await ask_each(session, members.urls, path, query or {}, limit_s=COMMAND_SECONDS)


async def _ask(client: ClientSession, url: URL, limit_s: float) -> dict[str, Any] | None:
    try:
        # No redirects: the request has our token.
        async with client.get(url, timeout=ClientTimeout(total=limit_s), allow_redirects=False) as response:
            answer: dict[str, Any] = await response.json()
            return answer if response.status == 200 else None
    except (ClientError, TimeoutError, ValueError):
        return None


async def tell(
    client: ClientSession, url: URL, path: str, query: Mapping[str, str], who: str, credentials: Credentials
) -> dict[str, Any]:
    """Let a worker carry out a command in the name of an operator; return its answer.

    Raises:
        ConfigError: it refused.
        MarqError: it failed, or it is unknown whether it was done.
    """
    address = url.joinpath(path, encoded=True) % query
    headers = credentials.sign_command(who, address.raw_path_qs)
    try:
        async with client.post(
            address, headers=headers, timeout=ClientTimeout(total=COMMAND_SECONDS), allow_redirects=False
        ) as response:
            if response.status < 500 and response.content_type != "application/json":
                # Of the login, or an older worker: nothing was done.
                raise ConfigError(f"worker {url} refused ({response.status}): {(await response.text())[:200]}")
            answer: dict[str, Any] = await response.json()
    except (ClientError, TimeoutError, ValueError) as error:
        raise MarqError(
            f"worker {url}: it is unknown whether it was done, because the worker did not respond as expected"
            f" ({error!r}). Look at the page of workers; if it does not respond, run marq check"
        ) from error
    if response.status == 200:
        return answer
    raise (ConfigError if response.status < 500 else MarqError)(f"worker {url}: {answer.get('error', response.status)}")


log = logging.getLogger("marq.web")

#: How long an answer is fresh, and the time limit of the broker.
FRESH_S = 1.0
LOOK_LIMIT_S = 1.5


@dataclass(frozen=True, slots=True)
class Members:
    """``urls``: one per tracker; ``settled``: whether that is all of them.

    ``answered``: whether the broker has answered, even if it refused.
    """

    urls: Sequence[URL] = ()
    settled: bool = False
    answered: bool = False


class TrackersGroup:
    """The trackers' group; queries the broker only if the last answer is not fresh."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._admin: AIOKafkaAdminClient | None = None
        self._coordinators: dict[str, int] = {}
        self._members = Members()
        self._looked_s = -FRESH_S
        self._looking = asyncio.Lock()
        self._refused = False

    async def members(self) -> Members:
        """Return the trackers; if they can't be looked up now, the last known ones."""
        async with self._looking:
            if time.monotonic() - self._looked_s >= FRESH_S:
                self._members = await self._look()
                self._looked_s = time.monotonic()
        return self._members

    async def unassigned(self, groups: Collection[str]) -> list[str]:
        """Return the groups in which no member has a partition; [] if the broker does not answer."""
        if not groups:
            return []
        async with self._looking:
            try:
                async with asyncio.timeout(LOOK_LIMIT_S):
                    return [group.name for group in await self._described(groups) if group.reads_nothing]
            except (KafkaError, TimeoutError) as error:
                log.debug("cannot look up whether groups have partitions: %r", error)
                await self.stop()
                return []

    async def stop(self) -> None:
        admin, self._admin = self._admin, None
        self._coordinators.clear()
        if admin is not None:
            await close_admin(admin)

    async def _look(self) -> Members:
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                urls = await self._describe()
        except (KafkaError, TimeoutError) as error:
            self._note(error)
            await self.stop()
            return Members(self._members.urls, answered=isinstance(error, GroupAuthorizationFailedError))
        return Members(self._members.urls if urls is None else urls, urls is not None, answered=True)

    def _note(self, error: Exception) -> None:
        if isinstance(error, GroupAuthorizationFailedError) and not self._refused:
            self._refused = True
            log.warning(
                "statistics of other workers are missing: this worker lacks permission to describe the group %s",
                self._client.names.app_id,
            )
        else:
            log.debug("cannot look up the trackers' group: %r", error)

    async def _describe(self) -> list[URL] | None:
        """Return the members' addresses; None during a rebalance, when the broker does not have them."""
        [group] = await self._described([self._client.names.app_id])
        if group.members and group.state != STABLE:
            return None
        return [URL(member.url) for member in group.members]

    async def _described(self, names: Collection[str]) -> list[DescribedGroup]:
        """Describe groups, with one request to each of their coordinators; raises KafkaError."""
        if self._admin is None:
            admin = paced(AIOKafkaAdminClient(**client_options(self._client)))
            self._admin = admin
            await admin.start()
        for name in names:
            if name not in self._coordinators:
                self._coordinators[name] = await self._admin.find_coordinator(name)
        groups = await described_members(self._admin, {name: self._coordinators[name] for name in names})
        for group in groups:
            if group.error:
                raise for_code(group.error)
        return groups
