"""Step 5 of :mod:`marq.consumer.receiver`: outcomes, starts and RENEWs are written, and leases end.

One task decides when to write what :mod:`marq.leases.held` has decided; all others only append. At most one write of
outcomes and one of RENEWs are in progress: the next batch of outcomes grows meanwhile, so batches are large under load
and small when a call waits, and neither kind waits for the other, so a broker that is slow to take outcomes costs no
leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from math import inf
from typing import Any

from marq.client.background import Time, failure_of
from marq.client.message_token import Token
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter, marker_records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.failure_log import FailureLog
from marq.leases.held import Ended, Held, LeasedBatch, Lost, OutcomeBatch, OutcomeMarker, Share, renewals
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Ack

log = logging.getLogger("marq")

#: How long an ack waits for others if no call waits for it, and how long a call waits for others in a shared writer.
LINGER_S, SHARED_LINGER_S = 0.005, 0.01
#: Pause after a failed write of outcomes, doubled each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 2.0
#: Time limit of one write of outcomes.
WRITE_LIMIT_S = 15.0
#: Least seconds between two log lines about lost leases of one queue.
SUMMARY_S = 5.0


class Listener:
    """What the rest of a consumer learns from its writer; this one holds no messages."""

    def served(self) -> Iterable[str]:
        """Return the queues that are served now."""
        return ()

    def left(self, queue: str, count: int) -> None:
        """Note that messages are no longer in flight."""

    def settled(self, ended: Sequence[Ended]) -> None:
        """Note that outcomes are durable."""

    def lost(self, lost: Lost) -> None:
        """Note that leases have ended."""

    def renewing(self, now_s: float) -> None:
        """Release messages that should not be renewed."""

    def pass_time(self, now_s: float) -> float:
        """Do what is due; return when something is due next, at the latest."""
        return inf

    def fail(self, error: BaseException) -> None:
        """Note that nothing more can be written."""


class OutcomeWriter:
    """Writes for one consumer.

    If many programs share it (``shared``), a call that arrives during a write waits ``SHARED_LINGER_S`` for others.
    """

    def __init__(
        self,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        time: Time,
        listener: Listener,
        *,
        shared: bool = False,
    ) -> None:
        self.settings = settings
        self.now_s, self.wall_s = time.now_s, time.wall_s
        self.state: Any = None
        self.failures = FailureLog(time.now_s)
        #: Why nothing more can be written.
        self.error: BaseException | None = None
        self.held = Held(settings)
        self._writer = writer
        self._time = time
        self._listener = listener
        self._shared = shared
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        # Outcomes: whether to write them now, the timer that says so, what waits for the next write, and the current.
        self._due = False
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._not_written = RepeatedWarning("outcomes not written, retrying: batches=%d error=%s")
        # Leases: when to renew them, and when the first may end.
        self._renew_s = self._expiry_s = inf
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s = inf
        self._not_renewed = RepeatedWarning("leases not renewed: leases=%d error=%s")
        self._lost = LostLeases()
        self._writes: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._renew_s = self.now_s() + self._interval_s()
        self._task = asyncio.create_task(self._run(), name="marq-writer")
        self._task.add_done_callback(self._ended)

    async def stop(self, limit_s: float) -> bool:
        """Write the remaining outcomes for at most ``limit_s``; return whether all were written.

        Leases are renewed meanwhile: the tracker must not redeliver messages whose outcomes wait for a slow broker.
        """
        self._closing = True
        self.flush_soon()
        self._wake.set()
        if self._task is None:
            return not self.held.has_outcomes
        if self.unwritten:
            await asyncio.wait([self._task], timeout=limit_s)
        written = not self.unwritten
        tasks = [self._task, *self._writes, *([] if self._alarm is None else [self._alarm])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_waiters()
        self._lost.write(self.now_s(), self.settings, stopping=True)
        return written

    @property
    def unwritten(self) -> bool:
        """Whether an outcome is not durable yet, and will be."""
        writes = self._task is not None and not self._task.done()
        return writes and (self.held.has_outcomes or self._writing is not None)

    def add(self, batch: LeasedBatch) -> None:
        """Renew a batch until its messages have ended."""
        self.held.add(batch)
        # If the settings of its queue were changed, its lease may end before the next renewal.
        renew_s = inf if batch.ends else batch.taken_s + batch.lease_s / 3
        if renew_s < self._renew_s or batch.expires_s < self._expiry_s:
            self._renew_s, self._expiry_s = min(self._renew_s, renew_s), min(self._expiry_s, batch.expires_s)
            self._wake.set()

    def wake(self) -> None:
        """Look again at what is due."""
        self._wake.set()

    # --- when to write outcomes ---------------------------------------------------------------------------------------

    def touch(self, batch: LeasedBatch) -> None:
        self.held.touch(batch)
        if batch.in_order:
            # Messages may wait until its outcomes are durable.
            self.flush_soon()
        else:
            self._flush_later()

    def settle_foreign(self, marker: OutcomeMarker) -> None:
        """Write an outcome or a RENEW of messages that this consumer does not hold."""
        self.held.settle_foreign(marker)
        self._flush_for_call()

    def ack_by_token(self, token: Token) -> None:
        """Ack a message held by this or another consumer."""
        batch = self.held.find(token.holder, token.source, token.offset)
        if batch is None:
            self.settle_foreign(Ack(token.queue, token.holder, token.source, [token.offset]))
        elif batch.decide(token.offset):
            batch.ack(token.offset)

    def _flush_for_call(self) -> None:
        """Write on behalf of a call that waits."""
        if self._shared and self._writing is not None and not self._closing:
            self._flush_later()
        elif self._timer is None or not self._shared:
            self.flush_soon()

    def _flush_later(self) -> None:
        if self._timer is None and not self._due:
            linger_s = SHARED_LINGER_S if self._shared else LINGER_S
            self._timer = asyncio.get_running_loop().call_later(linger_s, self.flush_soon)

    def flush_soon(self) -> None:
        """Write now: no more outcomes will come soon, or a call waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._due:
            self._due = True
            self._wake.set()

    async def settled(self) -> None:
        """Return when all outcomes so far are durable.

        Raises:
            BrokerUnavailable: the consumer was stopped before that.
        """
        if not self.held.has_outcomes:
            if self._writing is not None:
                await asyncio.shield(self._writing)
            return
        if self._task is None or self._task.done():
            raise BrokerUnavailable("the consumer is stopped: later outcomes were not written")
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        self._flush_for_call()
        await asyncio.shield(self._settled)

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        renewing: asyncio.Task[None] | None = None
        while not self._closing or self.held.has_outcomes or self._writing is not None:
            self._wake.clear()
            now_s = self.now_s()
            renew_s = self._renew_s if renewing is None or renewing.done() else inf
            if now_s >= min(self._expiry_s, renew_s):
                self.lose_expired()
            if now_s >= renew_s:
                self._renew_s = renew_s = inf
                renewing = self._begin(self._renew_all(), "marq-renewal")
            due_s = self._listener.pass_time(now_s)
            if (self._due or self._closing) and self._writing is None:
                self._due = False
                if self.held.has_outcomes:
                    self._write_outcomes()
            self.wake_at(min(due_s, self._expiry_s, renew_s))
            await self._wake.wait()

    def wake_at(self, due_s: float) -> None:
        """Look again at this time at the latest; an earlier alarm stays, because a new one for each write costs CPU."""
        if due_s < self._alarm_s:
            former, self._alarm_s = self._alarm, due_s
            self._alarm = asyncio.create_task(self._ring(due_s - self.now_s()), name="marq-alarm")
            self._alarm.add_done_callback(self._rung)
            if former is not None:
                former.cancel()

    async def _ring(self, left_s: float) -> None:
        await self._time.sleep(max(left_s, 0))

    def _rung(self, task: asyncio.Task[None]) -> None:
        if task is self._alarm:
            self._alarm_s = inf
            self._ended(task)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._writes.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        self._wake.set()
        if (error := failure_of(task, stopping=self._closing)) is not None:
            self.error = error
            self._fail_waiters()
            self._listener.fail(error)

    def _fail_waiters(self) -> None:
        for waiter in (self._settled, self._writing):
            if waiter is not None and not waiter.done():
                waiter.set_exception(
                    BrokerUnavailable("the consumer stopped before the broker confirmed: unknown whether it is written")
                )
                waiter.exception()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _write_outcomes(self) -> None:
        self._writing = self._settled or asyncio.get_running_loop().create_future()
        self._settled = None
        outcomes = self.held.take_outcomes(self.now_s())
        for batch, count in outcomes.left:
            if count:
                self._listener.left(batch.queue, count)
        self._begin(self._write(outcomes), "marq-outcomes")

    async def _write(self, outcomes: OutcomeBatch) -> None:
        sent_s, pause_s = self.now_s(), FIRST_RETRY_S
        # Empty if it has only starts, and their leases have ended meanwhile.
        while records := self._records([*outcomes.markers, *self.held.starts(outcomes.starting, sent_s)]):
            try:
                await self._writer.write(records, WRITE_LIMIT_S)
                break
            except BrokerUnavailable as error:
                # Some markers may have been written. Writing them twice changes nothing, so all are written again.
                self._not_written.write(self.now_s(), len(records), error)
            await asyncio.sleep(pause_s)
            sent_s, pause_s = self.now_s(), min(pause_s * 2, MAX_RETRY_S)
        self.held.written(outcomes, sent_s, self.now_s())
        if outcomes.ended:
            self._listener.settled(outcomes.ended)
        writing, self._writing = self._writing, None
        if writing is not None and not writing.done():
            writing.set_result(None)

    def _records(self, markers: Iterable[OutcomeMarker]) -> list[MarkerRecord]:
        partitions, limit_bytes = self.settings.markers_partitions, self.settings.limit_bytes
        return [record for marker in markers for record in marker_records(marker, partitions, limit_bytes)]

    # --- leases -------------------------------------------------------------------------------------------------------

    def _interval_s(self) -> float:
        return self.held.shortest_lease_ms(self._listener.served()) / 3000

    async def _renew_all(self) -> None:
        renewed = await self.renew()
        # Sooner after a failure, so that there are several attempts before the leases expire.
        interval_s = self._interval_s() if renewed else self._interval_s() / 4
        self._renew_s = min(self._renew_s, self.now_s() + interval_s)

    async def renew(self) -> bool:
        """Renew all leases, and return whether the markers are durable."""
        now_s = self.now_s()
        self._listener.renewing(now_s)
        shares: Sequence[Share] = self.held.shares(now_s)
        if not shares:
            return True
        try:
            await self._writer.write(self._records(renewals(shares)), self._interval_s())
        except BrokerUnavailable as error:
            self._not_renewed.write(self.now_s(), len(shares), error)
            return False
        self.held.renewed(shares, now_s, self.now_s())
        return True

    def lose_expired(self) -> None:
        """Lose leases at the moment they end."""
        now_s = self.now_s()
        for lost in self.held.expire(now_s):
            self._lost.add(lost)
            self._listener.lost(lost)
        self._lost.write(now_s, self.settings)
        self._expiry_s = self.held.next_expiry_s(now_s)


class LostLeases:
    """Log lines about lost leases: one for a queue at once, then summaries, so that an outage adds few lines."""

    def __init__(self) -> None:
        #: Those that the log does not mention yet, by queue and level.
        self._lost: dict[tuple[str, int], list[Lost]] = {}
        self._logged_s: dict[tuple[str, int], float] = {}

    def add(self, lost: Lost) -> None:
        level = logging.DEBUG if lost.batch.ends else logging.WARNING
        self._lost.setdefault((lost.batch.queue, level), []).append(lost)

    def write(self, now_s: float, settings: ReceiverSettings, *, stopping: bool = False) -> None:
        """Write the lines that are due, or all of them before a stop."""
        for key in list(self._lost):
            if stopping or now_s - self._logged_s.get(key, -inf) >= SUMMARY_S:
                queue, level = key
                lost, self._logged_s[key] = self._lost.pop(key), now_s
                log.log(
                    level,
                    "leases lost, the messages will be redelivered: queue=%s messages=%d first_partition=%d"
                    " first_offset=%d held=%.0fs max_lease=%gs",
                    queue, sum([len(some.offsets) for some in lost]), lost[0].batch.source.partition,
                    min(lost[0].offsets), now_s - min([some.batch.taken_s for some in lost]),
                    settings.max_lease_of(queue) / 1000,
                )  # fmt: skip
