"""The other endpoints that have partitions of a queue, and the requests to them.

An endpoint tells its address to the Kafka group of each queue that it polls. So the broker knows where the partitions
are, and endpoints need no list of each other.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from marq_worker.web.dashboard.groups import MAX_GROUPS, Groups

log = logging.getLogger("marq.sqs")

#: Path of other endpoints' requests for messages, and how long these wait.
PATH = "/marq/receive"
ASK_S = 2.0
#: Path of the outcomes that other endpoints pass on, and how long to wait until they are durable.
SETTLE_PATH = "/marq/settle"
_SETTLE_S = 3.0
#: Interval between lookups of the groups of polled queues, and time limit of an endpoint's answer.
_LOOK_S, _ANSWER_S = 2.0, 5.0
#: A queue counts as polled for this long after a poll, so that polls with pauses in between reach other endpoints, too.
_POLLED_S = 60.0
_PURPOSE = b"marq sqs peer"


class Peers:
    """Finds and asks other endpoints.

    Args:
        url: the address of this endpoint.
        secret: all endpoints of a namespace have the same.
        group: returns the Kafka group that reads a queue.
        groups: describes groups.
    """

    def __init__(self, url: str, secret: bytes, group: Callable[[str], str], groups: Groups) -> None:
        self._url = url
        self._token = hmac.digest(secret, _PURPOSE, "sha256").hex()
        self._group = group
        self._groups = groups
        self._known: dict[str, tuple[str, ...]] = {}
        #: When each queue was last polled; monotonic seconds.
        self._polled: dict[str, float] = {}
        self._session: ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        # No limit: by default, the requests to all endpoints for all queues would share 100 connections, and those for
        # messages, which wait for seconds, would delay outcomes.
        connector = TCPConnector(limit=0)
        self._session = ClientSession(headers={"Authorization": f"Bearer {self._token}"}, connector=connector)
        self._looking = asyncio.create_task(self._look(), name="marq-sqs-peers")

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._groups.stop()
        if self._session is not None:
            await self._session.close()

    def authorizes(self, header: str | None) -> bool:
        """Return whether a request comes from an endpoint with the same secret."""
        # aiohttp decodes bytes that are not UTF-8 to surrogates.
        return hmac.compare_digest((header or "").encode(errors="surrogateescape"), f"Bearer {self._token}".encode())

    def of(self, queue: str) -> Sequence[str]:
        """Return the addresses of other endpoints with partitions of a queue, as of a moment ago."""
        self._polled[queue] = time.monotonic()
        return self._known.get(queue, ())

    async def ask(self, url: str, queue: str, most: int) -> list[dict[str, Any]]:
        """Return messages of another endpoint, or none after a while."""
        asked = {"queue": queue, "most": most, "wait": ASK_S}
        documents: list[dict[str, Any]] | None = await self._post(url, PATH, asked, ASK_S + _ANSWER_S)
        if documents is None:
            # The other endpoint is stopping, or was killed; the group will soon know.
            await asyncio.sleep(1)
        return documents or []

    async def settle(self, url: str, outcomes: Sequence[dict[str, Any]]) -> Sequence[bool]:
        """Pass outcomes of FIFO queues on to the endpoint that delivered the messages; return which of them it holds.

        Empty if it does not answer.
        """
        return await self._post(url, SETTLE_PATH, outcomes, _SETTLE_S) or []

    async def _post(self, url: str, path: str, document: Any, limit_s: float) -> Any:
        """Return the JSON of another endpoint's answer, None if there is none in time."""
        assert self._session is not None
        try:
            async with self._session.post(
                f"{url}{path}", json=document, timeout=ClientTimeout(total=limit_s), allow_redirects=False
            ) as response:
                if response.status == 200:
                    return await response.json()
                log.warning("the endpoint %s refuses requests from this one: status=%d", url, response.status)
        except (ClientError, TimeoutError, ValueError) as error:
            log.debug("the endpoint %s does not answer: %r", url, error)
        return None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._known = await self._found()
            except Exception:
                log.exception("looking up other endpoints failed, retrying")

    async def _found(self) -> dict[str, tuple[str, ...]]:
        """Return the other endpoints of each queue that was polled lately."""
        since_s = time.monotonic() - _POLLED_S
        self._polled = {queue: polled_s for queue, polled_s in self._polled.items() if polled_s > since_s}
        groups = {queue: self._group(queue) for queue in self._polled}
        members: dict[str, list[dict[str, Any]]] = {}
        names = sorted(set(groups.values()))
        for first in range(0, len(names), MAX_GROUPS):
            members |= await self._groups.members(names[first : first + MAX_GROUPS])
        return {queue: self._others(members.get(group, ())) for queue, group in groups.items()}

    def _others(self, members: Iterable[dict[str, Any]]) -> tuple[str, ...]:
        urls = {member["url"] for member in members if any(member["partitions"].values())}
        return tuple(sorted(urls - {"", self._url}))
