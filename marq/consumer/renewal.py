"""Renews leases: every third of a lease, one RENEW for each queue, source partition and holder.

A message is renewed until ``max_lease`` after it was acquired, because a hanging handler must lose it eventually. The
client's own clock decides when a lease expires, measured from before the marker was sent. The consumer notices an
expired lease at once, even while a renewal waits for a broker that does not answer, because from then on the handler's
work is wasted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from math import floor, inf

from marq.client.background import failure_of
from marq.consumer.lost_leases_log import LostLeasesLog
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter, marker_records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.held import HeldBatch
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Renew, Source

#: A lease is renewed if less than this fraction is left.
_RENEW_BELOW = 0.75
#: The resolution of leases.
_LEAST_S = 0.001


class Renewal:
    """Renews all batches that still have messages.

    ``queues`` returns the queues that are served now. Renewal calls ``before`` ahead of each renewal, to release
    unwanted messages, ``lost`` with a batch and the offsets whose lease has ended, and ``failed`` with the error if it
    cannot go on.
    """

    def __init__(
        self,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        *,
        queues: Callable[[], Iterable[str]],
        finished: Callable[[str, int], None],
        before: Callable[[float], None],
        lost: Callable[[HeldBatch, Sequence[int]], None],
        failed: Callable[[BaseException], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._queues = queues
        self._before = before
        self._lost = lost
        self._failed = failed
        self._writer = writer
        self._settings = settings
        self._finished = finished
        self._clock = clock
        self._sleep = sleep
        self._log = LostLeasesLog()
        self._not_renewed = RepeatedWarning("leases not renewed: leases=%d error=%s")
        self._leases: list[HeldBatch] = []
        self._grown_to = 0
        self._task: asyncio.Task[None] | None = None
        self._pause_s = inf
        self._pausing: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._watched_s = inf
        self._stopped = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="marq-renewal")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A watch that add() has replaced was cancelled, too.
        stopping = self._stopped or task not in (self._task, self._watch)
        if (error := failure_of(task, stopping=stopping)) is not None:
            self._failed(error)

    async def stop(self) -> None:
        self._stopped = True
        tasks = [task for task in (self._task, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._log.write(self._clock(), stopping=True)

    def add(self, lease: HeldBatch) -> None:
        """Renew a batch until its messages have ended."""
        self._leases.append(lease)
        if not lease.ends and lease.lease_s < 3 * self._pause_s - _LEAST_S and self._pausing is not None:
            # The settings of its queue were changed: its lease would end before the current pause does.
            self._pausing.cancel()
        if len(self._leases) > 2 * self._grown_to + 256:
            self._drop_ended()
        if lease.expires_s < self._watched_s:
            if self._watch is not None:
                self._watch.cancel()
            self._watched_s = lease.expires_s
            self._watch = asyncio.create_task(self._wait_for_expiry(), name="marq-expiry")
            self._watch.add_done_callback(self._ended)

    def holders(self, limit: int) -> list[int]:
        """Return the holders of messages in flight, newest first."""
        return list(dict.fromkeys(lease.holder for lease in reversed(self._leases) if lease.open))[:limit]

    def find(self, holder: int, source: Source, offset: int) -> HeldBatch | None:
        """Return the batch of a message that is held here."""
        for lease in self._leases:
            if lease.holder == holder and lease.source == source and offset in lease.open:
                return lease
        return None

    def _drop_ended(self) -> None:
        self._leases = [lease for lease in self._leases if lease.open]
        self._grown_to = len(self._leases)

    async def _run(self) -> None:
        renewed = True
        while True:
            interval_s = self._shortest_lease_ms() / 3000
            # Sooner after a failure, so that there are several attempts before the leases expire.
            self._pause_s = interval_s if renewed else interval_s / 4
            self._pausing = asyncio.ensure_future(self._sleep(self._pause_s))
            try:
                await asyncio.wait([self._pausing])
            finally:
                self._pausing.cancel()
            renewed = await self.renew()

    async def _wait_for_expiry(self) -> None:
        """Lose leases at the moment they end; keep waiting for those that were renewed meanwhile."""
        while self._watched_s < inf:
            await self._sleep(max(self._watched_s - self._clock(), 0))
            now_s = self._clock()
            self._lose_expired(now_s)
            self._watched_s = min([_next_expiry_s(lease, now_s) for lease in self._leases if lease.open], default=inf)

    async def renew(self) -> bool:
        """Renew all leases, and return whether the markers are durable."""
        now_s = self._clock()
        self._before(now_s)
        self._lose_expired(now_s)
        self._drop_ended()
        shares = list(self._shares(now_s))
        if not shares:
            return True
        try:
            await self._writer.write(list(self._records(shares)), self._shortest_lease_ms() / 3000)
        except BrokerUnavailable as error:
            self._not_renewed.write(self._clock(), len(shares), error)
            return False
        done_s = self._clock()
        for lease, lease_ms, offsets in shares:
            until_s = now_s + lease_ms / 1000
            # A RENEW after the lease has expired has no effect: the tracker may have redelivered the message.
            if done_s < lease.expires_s:
                lease.expires_s = until_s
                for offset in offsets if lease.own_expiry_s else ():
                    if lease.own_expiry_s.get(offset, done_s) < until_s:
                        lease.own_expiry_s.pop(offset, None)
        return True

    def _shortest_lease_ms(self) -> int:
        """Return the shortest lease of the queues that are served or have messages in flight."""
        held = {self._full_ms(lease) for lease in self._leases if lease.open and not lease.ends}
        return min([self._settings.shortest_lease_ms(self._queues()), *held])

    def _full_ms(self, lease: HeldBatch) -> int:
        return lease.fixed_ms or self._settings.lease_of(lease.queue)

    def _shares(self, now_s: float) -> Iterator[tuple[HeldBatch, int, list[int]]]:
        """Return each batch to renew, its new lease within ``max_lease``, and its offsets."""
        for lease in self._leases:
            if lease.ends:
                continue
            full_ms = self._full_ms(lease)
            # Rounded down, also below zero: one millisecond more would exceed max_lease.
            left_ms = floor((lease.taken_s - now_s) * 1000) + self._settings.max_lease_of(lease.queue)
            lease_ms = min(full_ms, left_ms)
            # Queues with different leases are renewed at their own pace.
            early = lease.expires_s - now_s > full_ms * _RENEW_BELOW / 1000
            if not early and now_s + lease_ms / 1000 > lease.expires_s:
                yield lease, lease_ms, _to_renew(lease, now_s + lease_ms / 1000)

    def _lose_expired(self, now_s: float) -> None:
        for lease in self._leases:
            if not lease.open or (now_s < lease.expires_s and not lease.own_expiry_s):
                continue
            lost = [offset for offset in lease.open if now_s >= lease.expiry_s(offset)]
            if not lost:
                continue
            lease.open.difference_update(lost)
            count = len(lost) if lease.lines is None else lease.lines.lost(lease, lost)
            self._log.add(lease, lost, self._settings.max_lease_of(lease.queue))
            self._lost(lease, lost)
            # Last: a breaker's test message that its handler lost is a failure; `finished` would only admit another.
            if count:
                self._finished(lease.queue, count)
        self._log.write(now_s)

    def _records(self, shares: list[tuple[HeldBatch, int, list[int]]]) -> Iterator[MarkerRecord]:
        groups: dict[tuple[str, int, Source, int], list[int]] = {}
        for lease, lease_ms, offsets in shares:
            # Empty if all messages of the batch have longer leases of their own.
            if offsets:
                groups.setdefault((lease.queue, lease.holder, lease.source, lease_ms), []).extend(offsets)
        for (queue, holder, source, lease_ms), offsets in groups.items():
            batch = Renew(queue, holder, source, sorted(set(offsets)), lease_ms)
            yield from marker_records(batch, self._settings.markers_partitions, self._settings.limit_bytes)


def _next_expiry_s(lease: HeldBatch, now_s: float) -> float:
    return min([each for each in (lease.expires_s, *lease.own_expiry_s.values()) if each > now_s], default=inf)


def _to_renew(lease: HeldBatch, until_s: float) -> list[int]:
    """Return the offsets of a batch, except those whose own leases end later."""
    own = lease.own_expiry_s
    return [offset for offset in lease.open if own.get(offset, 0.0) < until_s] if own else list(lease.open)
