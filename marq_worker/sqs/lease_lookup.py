"""Asks trackers whether messages are in flight: for programs that settle by token and must know if the outcome counts.

The question is a RESUME of single messages, which changes nothing (:mod:`marq.consumer.tracker_queries`). It costs a
write, and a read of the markers until the answer arrives. Concurrent questions are asked together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple

from marq.backend.cluster import cluster_of, marker_writer
from marq.client.lifecycle import Lifecycle
from marq.client.message_token import Token
from marq.consumer.session import STOP_CLIENT_S
from marq.consumer.tracker_queries import TrackerQueries
from marq.core.storage.rows import HELD
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Resume, Source

#: How long to wait for a tracker.
LIMIT_S = 4.0


class LeaseStatus(NamedTuple):
    """What a tracker knows about a message: its state (0 if it is not open), its attempt, and its remaining lease."""

    state: int
    attempt: int
    left_ms: int

    @property
    def is_in_flight(self) -> bool:
        return self.state in HELD


_NOT_OPEN = LeaseStatus(0, 0, 0)
_Asked = tuple[Token, asyncio.Future[LeaseStatus]]


class LeaseLookup(Lifecycle[TrackerQueries]):
    """Looks up messages for one process; concurrent lookups share a question."""

    def __init__(self, settings: ClientSettings, limit_s: float = LIMIT_S) -> None:
        super().__init__("the client of lease questions")
        self._settings = settings
        self._limit_s = limit_s
        self._waiting: list[_Asked] = []
        self._asking: asyncio.Task[None] | None = None

    async def _open(self, opened: AsyncExitStack) -> TrackerQueries:
        cluster = cluster_of(self._settings)
        topics = await cluster.topics()
        writer = await opened.enter_async_context(marker_writer(cluster, topics, STOP_CLIENT_S))
        opened.push_async_callback(self._end_asking)
        return TrackerQueries(cluster.markers_reader, writer, topics.markers_partitions, cluster.now_s, cluster.sleep)

    async def is_in_flight(self, token: Token) -> bool:
        """Return whether a consumer holds a message; same errors as :meth:`ask`."""
        return (await self.ask(token)).is_in_flight

    async def ask(self, token: Token) -> LeaseStatus:
        """Return what a tracker knows about a message.

        Raises:
            BrokerUnavailable: no tracker answered in time.
            MarqError: the client is stopped.
        """
        questions = self._started()
        answer: asyncio.Future[LeaseStatus] = asyncio.get_running_loop().create_future()
        self._waiting.append((token, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(questions), name="marq-lease-questions")
        return await answer

    async def _end_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask_all(self, questions: TrackerQueries) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                await self._ask(questions, asked)
        finally:
            self._asking = None
            _fail(self._waiting, MarqError("the client of lease questions was stopped"))
            self._waiting = []

    async def _ask(self, questions: TrackerQueries, asked: Sequence[_Asked]) -> None:
        error: MarqError = MarqError("the client of lease questions was stopped")
        by_source: dict[tuple[str, Source], list[_Asked]] = {}
        for request in asked:
            by_source.setdefault((request[0].queue, request[0].source), []).append(request)
        # The holder identifies the question.
        holders = {secrets.randbits(62) * 2 + 1: some for some in by_source.values()}
        resumes = [
            Resume(some[0][0].queue, holder, some[0][0].source, sorted({token.offset for token, _ in some}), False)
            for holder, some in holders.items()
        ]
        try:
            async with asyncio.timeout(self._limit_s), aclosing(questions.answers(resumes)) as answers:
                async for resume, parts in answers:
                    found = {
                        offset: LeaseStatus(*row)
                        for part in parts
                        for offset, *row in zip(part.offsets, part.states, part.attempts, part.waits_ms, strict=True)
                    }
                    for token, answer in holders[resume.holder]:
                        if not answer.done():
                            answer.set_result(found.get(token.offset, _NOT_OPEN))
        except TimeoutError:
            error = BrokerUnavailable(f"no tracker answered within {self._limit_s:g} s: is a worker running?")
        except MarqError as failure:
            error = failure
        finally:
            _fail(asked, error)


def _fail(asked: Sequence[_Asked], error: MarqError) -> None:
    for _, answer in asked:
        if not answer.done():
            answer.set_exception(error)
