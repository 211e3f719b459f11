"""At most once: a message is spent before anybody sees it, and only when somebody wants it.

Between steps 3 and 4 of the flow. The messages of such a queue wait here, acquired and committed; as many as somebody
wants are spent by a SPEND marker, and handed out when that is durable and their leases are not over. Crash before it:
the tracker redelivers what nobody has seen. Crash after it: what was handed out is abandoned, and counted as that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import encode
from marq.core.markers import Source, Spend
from marq.core.names import markers_partition
from marq.flow_settings import FlowSettings
from marq.message import Message
from marq.shelf import Shelf
from marq.writer import MarkerRecord, MarkerWriter

log = logging.getLogger("marq")

#: Between two attempts to write what could not be written.
RETRY_S = 0.2


class Spending:
    """Messages that nobody has seen yet, by the shelf that they are for."""

    def __init__(
        self,
        writer: MarkerWriter,
        settings: FlowSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._unseen: dict[Shelf, deque[Message]] = {}
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """How many messages wait here."""
        return sum(map(len, self._unseen.values()))

    def put(self, shelf: Shelf, messages: Iterable[Message]) -> None:
        """Keep messages until they are wanted on their shelf."""
        self._unseen.setdefault(shelf, deque()).extend(messages)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="marq-spending")
        self.look()

    def look(self) -> None:
        """Somebody may want messages now."""
        self._wanted.set()

    def take_back(self, shelf: Shelf) -> list[Message]:
        """Return what waits for a shelf and is still held, and forget it."""
        return [message for message in self._unseen.pop(shelf, ()) if message.offset in message._lease.open]

    def take_of(self, shelf: Shelf, queue: str) -> list[Message]:
        """Return, and forget, what waits of one queue and is still held."""
        unseen = self._unseen.get(shelf, deque())
        found = [message for message in unseen if message._lease.queue == queue]
        self._unseen[shelf] = deque(message for message in unseen if message._lease.queue != queue)
        return [message for message in found if message.offset in message._lease.open]

    def take_hoard(self, shelf: Shelf, keep: int, now_s: float) -> list[Message]:
        """Return, and forget, what has waited here for a lease or longer and is more than is wanted at a time."""
        unseen, hoard = self._unseen.get(shelf, deque()), list[Message]()
        while len(unseen) > keep and now_s - unseen[-1]._lease.taken_s > unseen[-1]._lease.lease_s:
            message = unseen.pop()
            if message.offset in message._lease.open:
                hoard.append(message)
        return hoard

    async def stop(self) -> None:
        """Spend no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for shelf in list(self._unseen):
                if messages := self._choose(shelf):
                    try:
                        await self._spend(shelf, messages)
                    except asyncio.CancelledError:
                        # Spent or not, nobody has seen them.
                        self._unseen.setdefault(shelf, deque()).extend(messages)
                        raise

    def _choose(self, shelf: Shelf) -> list[Message]:
        unseen, now_s = self._unseen.get(shelf, deque()), self._clock()
        wanted = max(shelf.standing, shelf.asked) - len(shelf.ready)
        chosen: list[Message] = []
        while unseen and len(chosen) < wanted:
            message = unseen.popleft()
            if message.offset in message._lease.open and message._expiry_s > now_s:
                chosen.append(message)
        return chosen

    async def _spend(self, shelf: Shelf, messages: list[Message]) -> None:
        records = list(self._records(messages))
        while True:
            left_s = min([message._expiry_s for message in messages]) - self._clock()
            try:
                await self._writer.write(records, max(left_s, RETRY_S))
                break
            except BrokerUnavailable as error:
                # Perhaps written, perhaps not: what is spent twice by its holder is spent once.
                log.warning("messages not handed out: queue=%s messages=%d %s", shelf.queue, len(messages), error)
            if left_s <= 0:
                # Leases that are over are lost, and told of, by whoever watches them.
                return
            await self._sleep(RETRY_S)
        now_s = self._clock()
        # A SPEND that came after the end of the lease may not have counted: somebody else may have the message.
        live = [each for each in messages if each._expiry_s > now_s and each.offset in each._lease.open]
        shelf.show(live, len(live))

    def _records(self, messages: Sequence[Message]) -> Iterator[MarkerRecord]:
        lanes: dict[tuple[str, int, Source], list[int]] = {}
        for message in messages:
            lease = message._lease
            lanes.setdefault((lease.queue, lease.holder, lease.source), []).append(message.offset)
        for (queue, holder, source), offsets in lanes.items():
            batch = Spend(queue, holder, source, sorted(offsets), self._settings.lease_of(queue))
            yield MarkerRecord(markers_partition(*source, self._settings.markers_partitions), encode(batch))
