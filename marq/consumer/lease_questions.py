"""Asks trackers about single messages of queues with ordering; questions that come meanwhile are asked together."""

from __future__ import annotations

import asyncio
import secrets

from marq.backend.cluster import Cluster
from marq.client.token import Token
from marq.consumer.lines import Open
from marq.consumer.questions import Questions, open_messages
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Resume, Source

#: How long to wait for the trackers' answers.
ANSWER_S = 5.0


class LeaseQuestions:
    """The questions of one client."""

    def __init__(self, cluster: Cluster, questions: Questions) -> None:
        self._cluster = cluster
        self._questions = questions
        self._open: dict[Token, asyncio.Future[Open | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, token: Token) -> Open | None:
        """Return what a tracker knows about a message, None if it is not open in its place.

        Raises:
            BrokerUnavailable: no tracker answered in time.
        """
        future = self._open.get(token)
        if future is None:
            self._open[token] = future = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="marq-leases")
        return await asyncio.shield(future)

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        try:
            while self._open:
                futures, self._open = self._open, {}
                await self._answer(futures)
        finally:
            self._asking = None
            _fail(self._open.values())

    async def _answer(self, futures: dict[Token, asyncio.Future[Open | None]]) -> None:
        """Set the results of these futures."""
        groups: dict[tuple[str, Source], set[int]] = {}
        for token in futures:
            groups.setdefault((token.queue, token.source), set()).add(token.offset)
        questions = [
            Resume(queue, secrets.randbits(64) or 1, source, sorted(offsets), onwards=False)
            for (queue, source), offsets in groups.items()
        ]
        answers: dict[tuple[str, Source, int], Open | None] = {}

        async def collect() -> None:
            async for question, parts in self._questions.answers(questions):
                for offset, opened in open_messages(parts, self._cluster.now_s()).items():
                    answers[question.queue, question.source, offset] = opened

        try:
            await self._cluster.within(ANSWER_S, collect())
        except TimeoutError:
            pass
        finally:
            for token, future in futures.items():
                place = token.queue, token.source, token.offset
                if place in answers and not future.done():
                    future.set_result(answers[place])
            _fail(futures.values())


def _fail(futures: object) -> None:
    for future in list(futures):  # type: ignore[call-overload]
        if not future.done():
            future.set_exception(BrokerUnavailable("no tracker has told whether the message is still in flight; retry"))
            # A caller that was cancelled does not look at it.
            future.exception()
