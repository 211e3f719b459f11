"""Keeps what is held: every third of the lease, one RENEW for each queue, source partition and holder.

A message is renewed until ``max_lease`` after it was acquired: a handler that hangs must lose its messages some day.
Whether a lease is over is judged by the client's own clock, counted from before the marker was sent. It is noticed soon
after it happened, also while a renewal waits for a broker that does not answer: a handler then works for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import floor, inf

from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import encode
from marq.core.markers import MAX_BATCH_MARKERS, Renew, Source
from marq.core.names import markers_partition
from marq.flow_settings import FlowSettings
from marq.lease import Lease
from marq.writer import FRAME_BYTES, MarkerRecord, MarkerWriter

log = logging.getLogger("marq")

#: Bytes of an offset in a batch whose offsets have gaps.
_OFFSET_BYTES = 4
#: A lease is renewed when less than this part of it is left.
_RENEW_BELOW = 0.75
#: Leases have no smaller parts.
_LEAST_S = 0.001


class Renewal:
    """All leases that have messages left.

    ``before`` is called before each renewal, to give back what nobody wants; ``lost`` with a lease and the offsets for
    which it is over.
    """

    def __init__(
        self,
        writer: MarkerWriter,
        settings: FlowSettings,
        finished: Callable[[str, int], None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        before: Callable[[float], None],
        lost: Callable[[Lease, Sequence[int]], None],
    ) -> None:
        self._before = before
        self._lost = lost
        self._writer = writer
        self._settings = settings
        self._finished = finished
        self._clock = clock
        self._sleep = sleep
        self._leases: list[Lease] = []
        self._grown_to = 0
        self._task: asyncio.Task[None] | None = None
        self._pause_s = inf
        self._pausing: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._watched_s = inf

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="marq-renewal")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, lease: Lease) -> None:
        """Keep a lease until its messages have ended."""
        self._leases.append(lease)
        if lease.lease_s < 3 * self._pause_s - _LEAST_S and self._pausing is not None:
            # The settings of its queue were changed: it would be over before the pause under way is.
            self._pausing.cancel()
        if len(self._leases) > 2 * self._grown_to + 256:
            self._drop_ended()
        if lease.expires_s < self._watched_s:
            if self._watch is not None:
                self._watch.cancel()
            self._watched_s = lease.expires_s
            self._watch = asyncio.create_task(self._wait_for_expiry(), name="marq-expiry")

    def holders(self, limit: int) -> list[int]:
        """Return the holders of messages in flight, the newest first."""
        return list(dict.fromkeys(lease.holder for lease in reversed(self._leases) if lease.open))[:limit]

    def find(self, holder: int, source: Source, offset: int) -> Lease | None:
        """Return the lease of a message that is held here."""
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
            # After a failure much sooner: there is time for some attempts before the leases are over.
            self._pause_s = interval_s if renewed else interval_s / 4
            self._pausing = asyncio.ensure_future(self._sleep(self._pause_s))
            try:
                await asyncio.wait([self._pausing])
            finally:
                self._pausing.cancel()
            renewed = await self.renew()

    async def _wait_for_expiry(self) -> None:
        """Lose what is over as soon as it is; leases that were renewed meanwhile are waited for again."""
        while self._watched_s < inf:
            await self._sleep(max(self._watched_s - self._clock(), 0))
            now_s = self._clock()
            self._lose_expired(now_s)
            self._watched_s = min([_next_expiry_s(lease, now_s) for lease in self._leases if lease.open], default=inf)

    async def renew(self) -> bool:
        """Renew all that is held and forget what is lost; return whether the markers are durable."""
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
            log.warning("leases not renewed: leases=%d %s", len(shares), error)
            return False
        done_s = self._clock()
        for lease, lease_ms, offsets in shares:
            until_s = now_s + lease_ms / 1000
            # A RENEW that came after the end of the lease revives nothing: the tracker may have fired meanwhile.
            if done_s < lease.expires_s:
                for offset in lease.renewing:
                    # Its own RENEW is not durable yet: until it is, the earlier end counts.
                    if offset not in lease.own_expiry_s:
                        lease.renewed_until(offset, lease.expires_s)
                lease.expires_s = until_s
                for offset in offsets if lease.own_expiry_s else ():
                    if lease.own_expiry_s.get(offset, done_s) < until_s:
                        lease.own_expiry_s.pop(offset, None)
        return True

    def _shortest_lease_ms(self) -> int:
        """Of the queues that are served, and of those that are not any more and have messages held."""
        held = {self._full_ms(lease) for lease in self._leases if lease.open}
        return min([self._settings.shortest_lease_ms, *held])

    def _full_ms(self, lease: Lease) -> int:
        return lease.fixed_ms or self._settings.lease_of(lease.queue)

    def _shares(self, now_s: float) -> Iterator[tuple[Lease, int, list[int]]]:
        """Each lease to renew, for how many ms, and its offsets: never for longer than ``max_lease`` in all."""
        for lease in self._leases:
            full_ms = self._full_ms(lease)
            # Down, also below zero: a millisecond too many would renew what can't be kept any longer.
            left_ms = floor((lease.taken_s - now_s) * 1000) + self._settings.max_lease_ms
            lease_ms = min(full_ms, left_ms)
            # Of queues with different leases each is renewed at its own pace.
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
            self._finished(lease.queue, len(lost))
            log.warning(
                "leases lost, the messages will be redelivered: queue=%s partition=%d messages=%d first_offset=%d",
                lease.queue, lease.source.partition, len(lost), min(lost),
            )  # fmt: skip
            self._lost(lease, lost)

    def _records(self, shares: list[tuple[Lease, int, list[int]]]) -> Iterator[MarkerRecord]:
        lanes: dict[tuple[str, int, Source, int], list[int]] = {}
        for lease, lease_ms, offsets in shares:
            lanes.setdefault((lease.queue, lease.holder, lease.source, lease_ms), []).extend(offsets)
        size = min(MAX_BATCH_MARKERS, (self._settings.limit_bytes - 2 * FRAME_BYTES) // _OFFSET_BYTES)
        for (queue, holder, source, lease_ms), found in lanes.items():
            ordered = sorted(set(found))
            partition = markers_partition(source.topic, source.partition, self._settings.markers_partitions)
            for start in range(0, len(ordered), size):
                batch = Renew(queue, holder, source, ordered[start : start + size], lease_ms)
                yield MarkerRecord(partition, encode(batch))


def _next_expiry_s(lease: Lease, now_s: float) -> float:
    return min([each for each in (lease.expires_s, *lease.own_expiry_s.values()) if each > now_s], default=inf)


def _to_renew(lease: Lease, until_s: float) -> list[int]:
    """Without those that renewed themselves for longer, or are about to.

    The tracker takes the last RENEW, also when it is shorter, and that could be this one.
    """
    own, renewing = lease.own_expiry_s, lease.renewing
    if not own and not renewing:
        return list(lease.open)
    return [offset for offset in lease.open if own.get(offset, 0.0) < until_s and offset not in renewing]
