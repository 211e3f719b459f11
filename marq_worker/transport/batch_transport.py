"""A transport for Faust that gives agents one event per fetched batch instead of one per record.

Stock Faust delivers about 12,800 events a second, because each takes several turns of the event loop. Here the value of
an event is a :class:`Fetched`: all records of one partition in one fetch. The transport also

* reads markers ``read_committed``, so that a marker of an aborted transaction is never seen;
* reports where each batch began, so that owners can tell a gap from the offsets of control records.

tests/worker/faust_reliances.py lists the private interfaces of Faust that it uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import aiokafka
import uvloop
from aiokafka.errors import KafkaError
from faust import Event, Schema
from faust.transport.drivers import aiokafka as driver
from faust.types import TP, ConsumerMessage
from mode import Service

from marq.kafka.connection import stop_consumer
from marq.kafka.group_consumer import GroupConsumer
from marq.kafka.paced_clients import paced
from marq_worker.transport.inbox import Fetched

if TYPE_CHECKING:
    from marq_worker.app.faust_app import MarqApp

#: Longest wait for records in one poll; a stop or rebalance waits for it.
_POLL_SECONDS = 1.0
#: Least time between two fetches. A fetch costs about a millisecond, however few records it returns: with hundreds of
#: small ones a second a worker used half a processor. Messages that are due may wait this long.
_SPACING_SECONDS = 0.01
#: Interval for checking whether the consumer has failed.
_LOOK_SECONDS = 1.0
#: Time limit for leaving the group.
_STOP_SECONDS = 3.0
#: No partition: polling it fetches nothing, but counts as a poll.
_NOTHING = TP("marq", -1)


class BatchThread(driver.AIOKafkaConsumerThread):
    app: MarqApp

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Ranges that the current fetch has read, by partition.
        self._reads: dict[TP, list[tuple[int, int]]] = {}
        #: Range that fetches have read without finding records, by partition.
        self._passed: dict[TP, tuple[int, int]] = {}

    def _create_worker_consumer(self, transport: driver.Transport) -> aiokafka.AIOKafkaConsumer:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        consumer._fetch_max_wait_ms = 500
        consumer.__class__ = GroupConsumer
        consumer.on_fenced = self.app.fenced
        return paced(consumer)

    async def on_thread_stop(self) -> None:
        # Skips Faust's thread: without a broker aiokafka's stop passes on a cancellation of its own, which would end
        # the thread while the application waits for its remaining work.
        await super(driver.AIOKafkaConsumerThread, self).on_thread_stop()
        if self._consumer is not None:
            await stop_consumer(self._consumer, _STOP_SECONDS)

    async def _fetch_records(
        self,
        consumer: aiokafka.AIOKafkaConsumer,
        active_partitions: set[TP],
        timeout: float | None = None,
        max_records: int | None = None,
    ) -> Mapping[TP, Any]:
        for tp in tuple(active_partitions or ()):
            self._note_reads(consumer, tp)
        records = await super()._fetch_records(consumer, active_partitions, timeout=timeout, max_records=max_records)
        reads, self._reads = self._reads, {}
        batches = {TP(tp.topic, tp.partition): batch for tp, batch in records.items() if batch}
        return {
            tp: fetched
            # Not only the initial ones: the set is Faust's own, and a rebalance adds to it during the fetch.
            for tp in reads.keys() | batches.keys()
            if (fetched := self._fetched(tp, reads.get(tp, ()), batches.get(tp))) is not None
        }

    def _fetched(self, tp: TP, reads: Sequence[tuple[int, int]], records: list[Any] | None) -> Fetched | None:
        """Join ranges that were read without a gap; claim no offset that was not read."""
        passed = self._passed.pop(tp, None)
        for start, end in reads:
            passed = (passed[0], end) if passed is not None and passed[1] == start else (start, end)
        if records:
            start, end = records[0].offset, records[-1].offset + 1
            if passed is None or not passed[0] <= start < end <= passed[1]:
                passed = start, end
            return Fetched(*passed, records)
        if passed is not None:
            # For example, only control records: the next batch begins where this one did.
            self._passed[tp] = passed
        return None

    def _note_reads(self, consumer: aiokafka.AIOKafkaConsumer, tp: TP) -> None:
        """Record each read of a partition: positions before and after a fetch may also differ because of a seek."""
        state = self._state(consumer, tp)
        if state is not None and "consumed_to" not in vars(state):
            state.consumed_to = partial(self._consumed, tp, state)

    def _consumed(self, tp: TP, state: Any, position: int) -> None:
        self._reads.setdefault(tp, []).append((state._position, position))
        type(state).consumed_to(state, position)

    def _state(self, consumer: aiokafka.AIOKafkaConsumer, tp: TP) -> Any:
        assignment = consumer._subscription.subscription.assignment if consumer._subscription.subscription else None
        return assignment.state_value(_aiokafka(tp)) if assignment else None

    def log_end(self, tp: TP) -> int | None:
        """Return where a partition ended at the last fetch, without trailing control records; None if not known."""
        consumer = self._consumer
        state = None if consumer is None else self._state(consumer, tp)
        if state is None:
            return None
        passed_from, passed_to = self._passed.get(tp, (None, None))
        return passed_from if passed_to == state.highwater else state.highwater

    @property
    def member(self) -> str:
        return str(self._ensure_consumer()._coordinator.member_id)

    @property
    def failure(self) -> BaseException | None:
        """Why the consumer can no longer receive; None if it can, or is not running."""
        return None if self._consumer is None else self._consumer.failure

    async def log_range(self, tp: TP) -> tuple[int, int]:
        """Return the first and end offset of a partition."""
        range_: tuple[int, int] = await self.call_thread(self._log_range, _aiokafka(tp))
        return range_

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Skip Faust's search for stalled partitions: after each rebalance it logs errors until the first fetch.

        Our watchdog compares what was read with the broker's log.
        """

    def verify_recovery_event_path(self, now: float, tp: TP) -> None:
        """Skip it for changelogs, too."""

    async def _log_range(self, partition: aiokafka.TopicPartition) -> tuple[int, int]:
        # Concurrently: a broker answers after the fetch that waits for records; the second request would wait again.
        consumer = self._ensure_consumer()
        starts, ends = await asyncio.gather(consumer.beginning_offsets([partition]), consumer.end_offsets([partition]))
        return int(starts[partition]), int(ends[partition])


def _aiokafka(tp: TP) -> aiokafka.TopicPartition:
    return aiokafka.TopicPartition(tp.topic, tp.partition)


class BatchConsumer(driver.Consumer):
    """Delivers one event per fetched batch of a partition."""

    app: MarqApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resumed = asyncio.Event()
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> BatchThread:
        # Without a loop from us, mode would make one of asyncio's own.
        thread = BatchThread(self, loop=self.loop, thread_loop=uvloop.new_event_loop(), beacon=self.beacon)
        # As mode does with a loop that it has made.
        thread._close_thread_loop_on_stop = True
        return thread

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        super().resume_partitions(tps)
        self._resumed.set()

    def _new_offset(self, tp: TP) -> int | None:
        # Batches of a partition are acknowledged in order, so the last one's end may be committed.
        acked = self._acked[tp]
        if not acked:
            return None
        end = max(acked) + 1
        acked.clear()
        self._acked_index[tp].clear()
        return int(end)

    @property
    def member(self) -> str:
        return self.thread.member

    @property
    def thread(self) -> BatchThread:
        return cast("BatchThread", self._thread)

    @Service.task
    async def _look_for_failure(self) -> None:
        """End the process if the consumer has failed: Faust never asks aiokafka for such an error."""
        while not self.should_stop:
            if (failure := self.thread.failure) is not None:
                self.app.consumer_failed(failure)
                return
            await self.sleep(_LOOK_SECONDS)

    async def _drain_messages(self, fetcher: Any) -> None:
        try:
            while not (self.should_stop or fetcher.should_stop):
                fetched, active = await self._wait_next_records(_POLL_SECONDS)
                next_s = monotonic() + _SPACING_SECONDS
                generation = self.app.consumer_generation_id
                # The fetch may have been answered from a buffer without yielding.
                await asyncio.sleep(0)
                if not fetched or self.should_stop:
                    continue
                if not self.flow_active:
                    await self._seek_back()
                    continue
                await self._deliver(fetched, active, generation)
                await asyncio.sleep(max(0.0, next_s - monotonic()))
        except self.consumer_stopped_errors:
            if not self.app.should_stop:
                raise
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise

    async def _wait_next_records(self, timeout: float) -> tuple[Any, set[TP] | None]:
        if not self.flow_active or self._get_active_partitions():
            return await super()._wait_next_records(timeout)
        # Nothing is assigned, or everything is paused. Faust would sleep for a second, and a consumer that does not
        # poll for long (broker_max_poll_interval) leaves the group for good.
        self._resumed.clear()
        await self.thread.getmany({_NOTHING}, 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._resumed.wait()
        return {}, set()

    async def _seek_back(self) -> None:
        # While the flow is stopped, fetched batches are dropped: seek back, or they would be lost.
        try:
            await self.perform_seek()
        except KafkaError as error:
            self.log.warning("could not seek back to the committed offsets: %r", error)

    async def _deliver(self, fetched: Mapping[TP, Fetched], active: set[TP] | None, generation: int) -> None:
        for tp, batch in fetched.items():
            if not self.flow_active or generation != self.app.consumer_generation_id:
                return
            if not (active is None or tp in active or self._is_held(tp)):
                continue
            last = batch.records[-1]
            message = ConsumerMessage(
                tp.topic,
                tp.partition,
                batch.end - 1,
                last.timestamp / 1000.0,
                last.timestamp_type,
                [],
                None,
                batch,  # type: ignore[arg-type]  # BatchSchema takes it as it is
                None,
                0,
                0,
                tp,
                generation_id=generation,
            )
            await self.wait_first(self.callback(message), self.suspend_flow.wait())
            self._read_offset[tp] = batch.end - 1

    def _is_held(self, tp: TP) -> bool:
        """Return whether an agent has paused a partition, perhaps during the fetch.

        If its batch were dropped, only a later one would reveal the gap, and at the end of the log none comes.
        """
        return tp in self._paused_partitions and not self._is_changelog_tp(tp)


class PacedProducer(driver.Producer):
    """Faust's producer, which shares the process's connection attempts while a broker is down."""

    def _new_producer(self, transactional_id: str | None = None) -> aiokafka.AIOKafkaProducer:
        return paced(super()._new_producer(transactional_id))


class BatchTransport(driver.Transport):
    Consumer = BatchConsumer
    Producer = PacedProducer


class BatchSchema(Schema[None, Fetched]):
    """Decodes nothing: the event's value is the :class:`Fetched` itself."""

    def compile(self, app: Any, **kwargs: Any) -> Any:
        async def decode(message: Any, *, propagate: bool = False) -> Event:
            return Event(app, None, message.value, {}, message)

        return decode
