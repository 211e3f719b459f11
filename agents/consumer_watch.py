"""Measures for how long queues with waiting messages have had no consumer.

A tracker checks every few seconds. A queue whose messages are acquired has a consumer. So the tracker asks the broker
only about the consumer groups of queues that have waiting messages, and of which nothing was acquired since the last
check. If messages of all queues are being acquired, it makes no request at all, however many queues there are.
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

#: Seconds between two checks. After each check, the tracker also waits REST times as long as the check took.
LOOK_S, REST = 5.0, 20
#: Most time that counts between two checks: while this process was suspended, it saw nothing.
MAX_STEP_S = 2 * LOOK_S
#: Time limit of one check.
LOOK_LIMIT_S = 30.0
#: A queue without a consumer is reported after this long: a deployment stops one consumer before it starts the next.
NO_CONSUMER_S = 30.0
#: A queue with waiting messages is stalled if none is in flight and none was acquired for this long.
STALLED_S = 60.0

log = logging.getLogger("marq.worker")


@dataclass(slots=True)
class _Queue:
    """A queue as of the last check; ``acquired`` is its counter at that time."""

    acquired: int
    idle_s: float = 0.0
    waited: bool = False
    no_consumer_s: float = 0.0


@dataclass
class Unattended:
    """Adds up, from one check to the next, for how long queues have had no consumer; makes no requests."""

    _queues: dict[str, _Queue] = field(default_factory=dict)

    def look(self, acquired: Mapping[str, int], waiting: Collection[str], passed_s: float) -> list[str]:
        """Note counters and waiting queues; return the queues whose consumers must be looked up.

        Args:
            acquired: by queue, the number of messages that were ever acquired.
            waiting: the queues that have waiting messages.
            passed_s: seconds since the last check in which this process was running.
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
        """Return for how long a queue has had no consumer (0 if it has one) and no message was acquired."""
        queue = self._queues.get(name)
        if queue is None:
            return {}
        return {"no_consumer_seconds": round(queue.no_consumer_s, 3), "idle_seconds": round(queue.idle_s, 3)}


@dataclass
class ConsumerWatch:
    """Checks the queues of one worker until it is stopped.

    Args:
        owners: the owners of the worker's partitions, whose lease books count what is acquired.
        census: the counter of waiting messages.
        definitions: returns the definitions of queues, which name the paused ones.
        unattended: returns those of the given queues that have no consumer; raises KafkaError.
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
                # The times stay as they were, because nothing is known about the consumers now.
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
        # A client that acquires without being a member of the group is also a consumer; another worker may see it.
        and figures.get("idle_seconds", 0.0) >= NO_CONSUMER_S
    )


def is_stalled(figures: Mapping[str, Any]) -> bool:
    """Return whether a queue has waiting messages, and a consumer that receives none.

    A consumer with messages in flight is not stalled, however long its handlers take: it may have reached its limit.
    If it is dead, its leases end, and then nothing is in flight.
    """
    return bool(
        figures.get("waiting")
        and not figures["in_flight"]
        and figures.get("idle_seconds", 0.0) >= STALLED_S
        and not has_no_consumer(figures)
    )
