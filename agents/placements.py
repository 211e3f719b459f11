"""Keeps the placements of queues in step with their settings: takes the steps of :mod:`marq.core.spread`.

One worker does, the owner of markers partition 0, so that nearly always one keeper writes at a time. Two at once, in a
takeover, do no harm: what the later one says is taken back (:meth:`marq.queues.Queues.replace`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from agents.former_partitions import former_partitions
from marq.core.definitions import Definitions, placement_key
from marq.core.spread import GRACE_S, Partitions, Placement, subset
from marq.queues import Queues
from marq.settings import ClientSettings
from marq.topics import ensure_topics

log = logging.getLogger("marq.worker")

#: How often to look whether a step can be taken, and how often whether the messages topic has got more partitions.
LOOK_S, COUNT_S = 10.0, 60.0
#: How long one look may take.
LOOK_LIMIT_S = 60.0
STOP_SECONDS = 1.0


class PlacementKeeper:
    """Takes steps while ``keeps`` says that it is this worker's turn."""

    def __init__(
        self,
        client: ClientSettings,
        queues: Queues,
        keeps: Callable[[], bool],
        *,
        look_s: float = LOOK_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._client = client
        self._queues = queues
        self._keeps = keeps
        self._look_s, self._grace_s = look_s, grace_s
        self._changed = asyncio.Event()
        self._stopping = False
        self._partitions = 0
        self._counted_s = 0.0
        #: Of each queue the number of its last move, and when that was seen here first.
        self._seen: dict[str, tuple[int, float]] = {}
        #: From where a queue was found to have something to read in a partition.
        self._owed: dict[tuple[str, int], int] = {}
        self._end_listening: Callable[[], None] = lambda: None
        self._living: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._end_listening = self._queues.listen(self._changed.set)
        self._living = asyncio.create_task(self._live(), name="placements")

    async def stop(self) -> None:
        self._end_listening()
        living, self._living = self._living, None
        if living is not None:
            self._stopping = True
            self._changed.set()
            await asyncio.wait([living], timeout=STOP_SECONDS)
            living.cancel()
            await asyncio.wait([living])

    async def _live(self) -> None:
        while not self._stopping:
            self._changed.clear()
            if self._keeps():
                try:
                    async with asyncio.timeout(LOOK_LIMIT_S):
                        await self._look()
                except Exception as error:  # whatever it is: a keeper that ended would leave all as it is
                    log.warning("placements of queues are left as they are, trying again: %r", error)
            else:
                self._seen.clear()
                self._owed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._changed.wait()

    async def _look(self) -> None:
        definitions = self._queues.definitions
        queues = definitions.placed()
        if not queues:
            return
        partitions = await self._count()
        moves: dict[str, Placement] = {}
        unsettled: dict[str, Placement] = {}
        for queue in queues:
            placement = definitions.placement(queue)
            wanted = subset(queue, partitions, definitions.settings(queue).spread)
            if placement.sends != wanted:
                moves[queue] = placement.moved(wanted)
            elif not placement.settled:
                unsettled[queue] = placement
        await self._write(moves)
        if unsettled:
            numbers = {queue: definitions.moved(queue) for queue in unsettled}
            further = await self._further(definitions, unsettled)
            # Not those that another keeper has moved meanwhile.
            await self._write({queue: p for queue, p in further.items() if definitions.moved(queue) == numbers[queue]})

    async def _count(self) -> int:
        now_s = time.monotonic()
        if not self._partitions or now_s - self._counted_s > COUNT_S:
            self._partitions = (await ensure_topics(self._client)).messages_partitions
            self._counted_s = now_s
        return self._partitions

    async def _write(self, steps: Mapping[str, Placement]) -> None:
        if steps:
            await self._queues.replace({placement_key(queue): each.document() or None for queue, each in steps.items()})
        for queue, each in steps.items():
            if each.ends is None:
                sends, reads = _shown(each.sends), _shown(each.reads)
                log.info("queue %s: messages are sent to partitions %s, and read in %s", queue, sends, reads)

    async def _further(self, definitions: Definitions, unsettled: Mapping[str, Placement]) -> dict[str, Placement]:
        """Return the placements of which the next step can be taken."""
        # First this and then the ends: what is sent until then counts.
        over = {queue for queue in unsettled if self._is_over(definitions.moved(queue), queue)}
        if not over and all(placement.ends is None for placement in unsettled.values()):
            return {}
        steps: dict[str, Placement] = {}
        ends: dict[str, dict[int, int]] = {}
        async with former_partitions(self._client, self._owed) as former:
            log_ends = await former.ends({p for each in unsettled.values() for p in each.former(self._partitions)})
            for queue, placement in unsettled.items():
                if placement.ends is not None:
                    # A topic that was made anew may end before.
                    ends[queue] = {p: min(end, log_ends[p]) for p, end in placement.ends.items() if p in log_ends}
                elif queue in over:
                    steps[queue] = placement.ended({p: log_ends[p] for p in placement.former(self._partitions)})
            return steps | {queue: unsettled[queue].drained() for queue in await former.drained(definitions, ends)}

    def _is_over(self, move: int, queue: str) -> bool:
        """Whether nobody sends any more by what was known before a queue's last move."""
        now_s = time.monotonic()
        if self._seen.get(queue, (-1, 0.0))[0] != move:
            self._seen[queue] = (move, now_s)
        return now_s - self._seen[queue][1] >= self._grace_s


def _shown(partitions: Partitions) -> str:
    return "all" if partitions is None else ", ".join(map(str, partitions))
