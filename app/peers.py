"""Asks all workers of an installation the same over HTTP, from a worker or from a command."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout
from yarl import URL

from app.credentials import Credentials
from app.members import Group, Members
from config.settings import AppSettings, load_settings
from marq.settings import ClientSettings

#: How long a worker may take to answer before its figures are said to be missing.
PEER_SECONDS = 1.0
#: The same when a command asks.
COMMAND_SECONDS = 10.0


def authorization(settings: AppSettings) -> dict[str, str]:
    """Return the headers by which a worker, or a command with the settings of one, makes itself known to all others.

    Raises:
        ConfigError: a setting of who may come in is wrong.
    """
    token = Credentials.of(settings).peer_token
    return {"Authorization": f"Bearer {token}"} if token else {}


async def ask_each(
    client: ClientSession,
    urls: Sequence[URL],
    path: str,
    query: Mapping[str, str],
    *,
    own: URL | None = None,
    limit_s: float = PEER_SECONDS,
) -> list[dict[str, Any] | None]:
    """Return the JSON that each worker answers, None where one does not; ``own``: the address of who asks.

    ``path`` is quoted as it is to be asked for.

    Each address is asked once: of several workers that gave the same one (or ours), the others can't be reached.
    """
    different = {url: place for place, url in reversed(list(enumerate(urls))) if url != own}
    # The names in a path are quoted already, as a slash in one of them must be.
    asked = (
        _ask(client, url.joinpath(path, encoded=True) % {**query, "scope": "worker"}, limit_s) for url in different
    )
    answers = dict(zip(different, await asyncio.gather(*asked), strict=True))
    return [answers[url] if different.get(url) == place else None for place, url in enumerate(urls)]


async def ask_workers(
    settings: ClientSettings, path: str, query: Mapping[str, str] | None = None
) -> tuple[Members, list[dict[str, Any] | None]]:
    """Ask all workers from a command, which is none of them; return who they are and what each answered."""
    group = Group(settings)
    try:
        members = await group.members()
    finally:
        await group.stop()
    async with ClientSession(headers=authorization(load_settings())) as session:
        return members, await ask_each(session, members.urls, path, query or {}, limit_s=COMMAND_SECONDS)


async def _ask(client: ClientSession, url: URL, limit_s: float) -> dict[str, Any] | None:
    try:
        # Not to where a stranger at this address sends us: we have said who we are.
        async with client.get(url, timeout=ClientTimeout(total=limit_s), allow_redirects=False) as response:
            answer: dict[str, Any] = await response.json()
            return answer if response.status == 200 else None
    except (ClientError, TimeoutError, ValueError):
        return None
