"""Measures for how long queues with waiting messages have had no consumer.

A tracker checks every few seconds. A queue whose messages are acquired has a consumer, so the tracker asks the broker
only about the groups of other queues with waiting messages. If messages of all queues are being acquired, it sends no
request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, NotCoordinatorForGroupError, for_code
from mode import Service

from marq.kafka.connection import client_options, close_admin
from marq.kafka.group_members import STABLE, DescribedGroup, described_members, listed_groups
from marq.kafka.paced_clients import paced
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.names import Names
from marq_worker.backlog.backlog_counter import BacklogCounter
from marq_worker.owner.tracker_owners import TrackerOwners

#: Seconds between two checks. After each check, the tracker also waits REST times as long as the check took.
LOOK_S, REST = 5.0, 20
#: Maximum time that counts between two checks: while this process was suspended, it saw nothing.
MAX_STEP_S = 2 * LOOK_S
#: Time limit of one check.
LOOK_LIMIT_S = 30.0
#: A queue without a consumer is reported after this long: a deployment stops one consumer before it starts the next.
NO_CONSUMER_S = 30.0
#: A queue with waiting messages is stalled if none is in flight and none was acquired for this long.
STALLED_S = 60.0

log = logging.getLogger("marq.worker")


@dataclass(slots=True)
class _WatchedQueue:
    acquired: int
    idle_s: float = 0.0
    waited: bool = False
    no_consumer_s: float = 0.0


@dataclass
class Unattended:
    """Adds up, from one check to the next, for how long queues have had no consumer; makes no requests."""

    _queues: dict[str, _WatchedQueue] = field(default_factory=dict)

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
                self._queues[name] = _WatchedQueue(count, waited=name in waiting)
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
        for name in suspects:
            queue = self._queues[name]
            queue.no_consumer_s = queue.no_consumer_s + passed_s if name in unattended else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        queue = self._queues.get(name)
        if queue is None:
            return {}
        return {"no_consumer_seconds": round(queue.no_consumer_s, 3), "idle_seconds": round(queue.idle_s, 3)}


class ConsumerWatch(Service):
    """Checks the queues of one worker.

    Args:
        owners: the owners of the worker's partitions, whose lease books count what is acquired.
        backlog: the counter of waiting messages.
        definitions: returns the definitions of queues, which name the paused ones.
        lookup: finds the queues without a consumer.
    """

    def __init__(
        self,
        owners: TrackerOwners,
        backlog: BacklogCounter,
        definitions: Callable[[], Definitions],
        lookup: ConsumerLookup,
    ) -> None:
        super().__init__()
        self._owners = owners
        self._backlog = backlog
        self._definitions = definitions
        self._lookup = lookup
        self._times = Unattended()
        self._failed = False

    def metrics(self, queue: str) -> dict[str, float]:
        """Return what :meth:`Unattended.metrics` does."""
        return self._times.metrics(queue)

    async def on_shutdown(self) -> None:
        await self._lookup.close()

    @Service.task
    async def _check(self) -> None:
        before_s = time.monotonic()
        while not self.should_stop:
            await asyncio.sleep(LOOK_S)
            began_s = time.monotonic()
            passed_s, before_s = min(began_s - before_s, MAX_STEP_S), began_s
            try:
                async with asyncio.timeout(LOOK_LIMIT_S):
                    await self._look(passed_s)
                self._failed = False
            except (KafkaError, OSError, TimeoutError) as error:
                # The times stay as they were, because nothing is known about the consumers at the moment.
                log.log(
                    logging.DEBUG if self._failed else logging.WARNING,
                    "cannot look up the consumers of queues with waiting messages: error=%r", error,
                )  # fmt: skip
                self._failed = True
            except Exception:
                log.exception("cannot look up the consumers of queues with waiting messages")
            await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def _look(self, passed_s: float) -> None:
        suspects = self._times.look(self._acquired(), self._waiting(), passed_s)
        if suspects:
            self._times.note(suspects, await self._lookup.unattended(suspects), passed_s)

    def _acquired(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        for owner in self._owners.owned.values():
            for queue, counts in owner.tracker.book.counts.items():
                sums[queue] += counts.acquired
        return sums

    def _waiting(self) -> set[str]:
        settings = self._definitions().settings
        return {
            queue for queue, counted in self._backlog.queues.items() if counted.waiting and not settings(queue).paused
        }


def has_no_consumer(metrics: Mapping[str, Any]) -> bool:
    """Return whether a queue has waiting messages and no consumer; ``metrics``: those of all workers, added up."""
    return bool(
        metrics.get("waiting")
        and metrics.get("no_consumer_seconds", 0.0) >= NO_CONSUMER_S
        # A client that acquires without being a member of the group is also a consumer; another worker may see it.
        and metrics.get("idle_seconds", 0.0) >= NO_CONSUMER_S
    )


def is_stalled(metrics: Mapping[str, Any]) -> bool:
    """Return whether a queue has waiting messages, and a consumer that receives none.

    A consumer with messages in flight is not stalled, however long its handlers take: it may have reached its limit.
    If it is dead, its leases end, and then nothing is in flight.
    """
    return bool(
        metrics.get("waiting")
        and not metrics["in_flight"]
        and metrics.get("idle_seconds", 0.0) >= STALLED_S
        and not has_no_consumer(metrics)
    )


async def unattended(
    admin: AIOKafkaAdminClient, names: Names, definitions: Definitions, queues: Collection[str]
) -> set[str]:
    """Return the queues that no member of their group reads; raises KafkaError.

    Queues whose group this client may not describe are left out. A group that the broker does not list is described
    anyway, because this client may have no permission to see it.
    """
    groups = {queue: definitions.consumer_group(queue, names) for queue in queues}
    listed = await listed_groups(admin)
    anywhere = next(iter(listed.values()), None)
    if anywhere is None:
        anywhere = int((await admin.describe_cluster())["brokers"][0]["node_id"])
    wanted = {group: listed.get(group, anywhere) for group in sorted(set(groups.values()))}
    described = {group.name: group for group in await described_members(admin, wanted)}
    # An unlisted group may have been looked up at a broker that is not its coordinator.
    missing = {
        name
        for name, group in described.items()
        if name not in listed and group.error == NotCoordinatorForGroupError.errno
    }
    return {
        queue
        for queue, group in groups.items()
        if group in missing or not is_read(queue, described[group], names, definitions)
    }


def is_read(queue: str, group: DescribedGroup, names: Names, definitions: Definitions) -> bool:
    """Return whether a member of a queue's group reads a partition of the queue, or may soon; raises KafkaError."""
    if group.error == GroupAuthorizationFailedError.errno:
        return True
    if group.error:
        raise for_code(group.error)(f"group {group.name} could not be described")
    if group.members and group.state != STABLE:
        # A rebalance: the members get their partitions at its end.
        return True
    own, reads = definitions.settings(queue).topic, definitions.placement(queue).reads
    return any(
        topic == own or (topic == names.messages and (reads is None or not set(reads).isdisjoint(numbers)))
        for member in group.members
        for topic, numbers in member.partitions.items()
        if numbers
    )


class ConsumerLookup:
    """Looks up consumers with its own admin client, created on first use and again after an error."""

    def __init__(self, client: ClientSettings, definitions: Callable[[], Definitions]) -> None:
        self._client = client
        self._definitions = definitions
        self._admin: AIOKafkaAdminClient | None = None

    async def unattended(self, queues: Collection[str]) -> set[str]:
        """Return what :func:`unattended` does; raise as it does."""
        try:
            if self._admin is None:
                self._admin = paced(AIOKafkaAdminClient(**client_options(self._client)))
                await self._admin.start()
            return await unattended(self._admin, self._client.names, self._definitions(), queues)
        except (KafkaError, OSError, TimeoutError, asyncio.CancelledError):
            await self.close()
            raise

    async def close(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await close_admin(admin)
