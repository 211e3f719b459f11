"""Which queues have waiting messages that nobody takes, and for how long that has been so.

A tracker looks every few seconds. A queue whose messages are acquired has a consumer, so the broker is asked about
consumer groups only for queues that have waiting messages and of which nothing was acquired since the last look. An
installation in which everything moves makes no request at all, however many queues it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import KafkaError

from agents.census import Census
from agents.tracker import TrackerOwners
from marq.core.definitions import Definitions

#: Between two looks, and how many times as long as a look has taken the next one is put off.
LOOK_S, REST = 5.0, 20
#: Between two looks at most so much counts: what happened while this process was suspended is not known.
MAX_STEP_S = 2 * LOOK_S
#: A look may take this long.
LOOK_LIMIT_S = 30.0
#: A queue without a consumer is reported after this long: a deployment stops one consumer before it starts the next.
NO_CONSUMER_S = 30.0
#: A queue has stalled when nothing of it is in flight and nothing was acquired for this long.
STALLED_S = 60.0

log = logging.getLogger("marq.worker")


@dataclass(slots=True)
class _Queue:
    """What the last look found of a queue; ``acquired``: its counter then."""

    acquired: int
    idle_s: float = 0.0
    waited: bool = False
    no_consumer_s: float = 0.0


@dataclass
class Unattended:
    """Adds up for how long queues have had no consumer, from one look to the next; asks nobody."""

    _queues: dict[str, _Queue] = field(default_factory=dict)

    def look(self, acquired: Mapping[str, int], waiting: Collection[str], passed_s: float) -> list[str]:
        """Note counters and waiting queues; return the queues of which it must be known whether they have consumers.

        Args:
            acquired: how many messages of each queue were ever acquired.
            waiting: the queues that have waiting messages.
            passed_s: seconds since the last look in which this process was running.
        """
        before, self._queues = self._queues, {}
        suspects = []
        for name in acquired.keys() | waiting:
            count, known = acquired.get(name, 0), before.get(name)
            if known is None or known.acquired != count:
                self._queues[name] = _Queue(count, waited=name in waiting)
                continue
            self._queues[name] = known
            known.idle_s += passed_s
            if name not in waiting:
                known.no_consumer_s = 0.0
            elif known.waited:
                suspects.append(name)
            known.waited = name in waiting
        return suspects

    def note(self, suspects: Iterable[str], unattended: Collection[str], passed_s: float) -> None:
        """Note which of the suspects have no consumer."""
        for name in suspects:
            queue = self._queues[name]
            queue.no_consumer_s = queue.no_consumer_s + passed_s if name in unattended else 0.0

    def figures(self, name: str) -> dict[str, float]:
        """Return for how long a queue has had no consumer, 0 if it has one, and when its last message was acquired."""
        queue = self._queues.get(name)
        if queue is None:
            return {}
        return {"no_consumer_seconds": round(queue.no_consumer_s, 3), "idle_seconds": round(queue.idle_s, 3)}


@dataclass
class ConsumerWatch:
    """Looks, for one worker, until it is stopped.

    Args:
        owners: the owners of the worker's partitions, whose lease books count what is acquired.
        census: what knows the queues with waiting messages.
        definitions: returns the definitions of queues, which say what is paused.
        unattended: returns which of some queues have no consumer; raises KafkaError.
    """

    owners: TrackerOwners
    census: Census
    definitions: Callable[[], Definitions]
    unattended: Callable[[Collection[str]], Awaitable[Collection[str]]]
    _times: Unattended = field(default_factory=Unattended)
    _task: asyncio.Task[None] | None = None
    _failed: bool = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name="consumer watch")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def figures(self, queue: str) -> dict[str, float]:
        """Return what :meth:`Unattended.figures` does."""
        return self._times.figures(queue)

    async def _live(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            began_s = time.monotonic()
            passed_s, before_s = min(began_s - before_s, MAX_STEP_S), began_s
            try:
                async with asyncio.timeout(LOOK_LIMIT_S):
                    await self._look(passed_s)
                self._failed = False
            except (KafkaError, OSError, TimeoutError) as error:
                # The times stay as they were: nothing is known of the consumers now.
                log.log(
                    logging.DEBUG if self._failed else logging.WARNING,
                    "consumers of queues with waiting messages could not be looked up: error=%r", error,
                )  # fmt: skip
                self._failed = True
            except Exception:
                log.exception("consumers of queues with waiting messages could not be looked up")
            await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def _look(self, passed_s: float) -> None:
        suspects = self._times.look(self._acquired(), self._waiting(), passed_s)
        if suspects:
            self._times.note(suspects, await self.unattended(suspects), passed_s)

    def _acquired(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        for owner in self.owners.owned.values():
            for queue, counts in owner.tracker.book.counts.items():
                sums[queue] += counts.acquired
        return sums

    def _waiting(self) -> set[str]:
        settings = self.definitions().settings
        return {
            queue for queue, counted in self.census.queues.items() if counted.waiting and not settings(queue).paused
        }


def has_no_consumer(figures: Mapping[str, Any]) -> bool:
    """Return whether a queue has waiting messages and no consumer; ``figures``: those of all workers, added up."""
    return bool(
        figures.get("waiting")
        and figures.get("no_consumer_seconds", 0.0) >= NO_CONSUMER_S
        # Whoever acquires without being a member of the group is a consumer, too; it may do so at another worker.
        and figures.get("idle_seconds", 0.0) >= NO_CONSUMER_S
    )


def is_stalled(figures: Mapping[str, Any]) -> bool:
    """Return whether a queue has waiting messages, and a consumer that takes none.

    A consumer with messages in flight has not stalled, however long its handlers take: it may have as many as it is
    allowed to. When it is dead, its leases end, and nothing is in flight any more.
    """
    return bool(
        figures.get("waiting")
        and not figures["in_flight"]
        and figures.get("idle_seconds", 0.0) >= STALLED_S
        and not has_no_consumer(figures)
    )
