"""A transport for Faust that hands an agent one event per fetched batch instead of one per record.

Stock Faust delivers about 12,800 events a second, because each takes several turns of the event loop. Here an event's
value is a :class:`Fetched`: all records that one fetch brought of one partition. The transport also

* reads markers ``read_committed``, so that one written in an aborted transaction is never seen;
* says where each batch began, so that its reader can tell a gap from the offsets that Kafka's control records take;
* commits given offsets at once and says whether that worked, for the queue consumer agent's third step.

What of Faust's private interface this relies on is listed in app/faust_api.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, cast

import aiokafka
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata
from faust import Event, Schema
from faust.transport.drivers import aiokafka as driver
from faust.types import TP, ConsumerMessage

from agents.fetched import Fetched
from marq.connection import stop_consumer
from marq.group_consumer import GroupConsumer
from marq.reconnects import paced

#: Longest wait for records in one poll; a stop or rebalance waits for it.
_POLL_SECONDS = 1.0
#: Least time from one fetch to the next. A fetch costs about a millisecond, however few records it brings: with some
#: hundred small ones a second a worker took half a processor.
_SPACING_SECONDS = 0.005
#: What leaving the group may take.
_STOP_SECONDS = 3.0
#: No partition: a poll of it fetches nothing and still counts as one.
_NOTHING = TP("marq", -1)


class BatchThread(driver.AIOKafkaConsumerThread):
    """The thread that runs the Kafka consumer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        #: What the fetch under way has read of each partition: from, to.
        self._reads: dict[TP, list[tuple[int, int]]] = {}
        #: What fetches have read without finding records, by partition: from, to.
        self._passed: dict[TP, tuple[int, int]] = {}

    def _create_worker_consumer(self, transport: driver.Transport) -> aiokafka.AIOKafkaConsumer:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = self.app.isolation_level
        consumer._fetch_max_wait_ms = 500
        if self.app.group_assignor is not None:
            consumer._partition_assignment_strategy = (self.app.group_assignor,)
        consumer.__class__ = GroupConsumer
        consumer.on_fenced = self.app.fenced
        return paced(consumer)

    async def on_thread_stop(self) -> None:
        # Not that of Faust's thread: without a broker aiokafka's stop passes on a cancellation of its own, and the
        # thread would end by it, with the application waiting for what it had still to do.
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
        found = {TP(tp.topic, tp.partition): batch for tp, batch in records.items() if batch}
        return {
            tp: fetched
            # Not only those of before: the set is Faust's own, and a rebalance adds to it while the fetch is under way.
            for tp in reads.keys() | found.keys()
            if (fetched := self._fetched(tp, reads.get(tp, ()), found.get(tp))) is not None
        }

    def _fetched(self, tp: TP, reads: Sequence[tuple[int, int]], records: list[Any] | None) -> Fetched | None:
        """Join what was read without a gap; whatever was not seen to be read is not claimed."""
        passed = self._passed.pop(tp, None)
        for start, end in reads:
            passed = (passed[0], end) if passed is not None and passed[1] == start else (start, end)
        if records:
            start, end = records[0].offset, records[-1].offset + 1
            return Fetched(
                *(passed if passed is not None and passed[0] <= start < end <= passed[1] else (start, end)), records
            )
        if passed is not None:
            # Only control records, say: nothing to deliver, but the next batch begins where this one did.
            self._passed[tp] = passed
        return None

    def _note_reads(self, consumer: aiokafka.AIOKafkaConsumer, tp: TP) -> None:
        """Let the partition's state note what is read: positions before and after a fetch may differ by a seek."""
        state = self._state(consumer, tp)
        if state is not None and "consumed_to" not in vars(state):
            state.consumed_to = partial(self._consumed, tp, state)

    def _consumed(self, tp: TP, state: Any, position: int) -> None:
        self._reads.setdefault(tp, []).append((state._position, position))
        type(state).consumed_to(state, position)

    def _state(self, consumer: aiokafka.AIOKafkaConsumer, tp: TP) -> Any:
        assignment = consumer._subscription.subscription.assignment if consumer._subscription.subscription else None
        return assignment.state_value(_aiokafka(tp)) if assignment else None

    def returned_to(self, tp: TP) -> int | None:
        """Return the offset after the last record of a partition that a fetch has brought; None: not known."""
        state = self._state(self._ensure_consumer(), tp)
        position = None if state is None else state._position
        passed_from, passed_to = self._passed.get(tp, (None, None))
        return passed_from if passed_to == position else position

    def log_end(self, tp: TP) -> int | None:
        """Return where a partition ended at the last fetch, less what that found no records in; None: not known."""
        consumer = self._consumer
        state = None if consumer is None else self._state(consumer, tp)
        if state is None:
            return None
        # A transaction ends with a record of Kafka's own, which is not waiting for anybody.
        passed_from, passed_to = self._passed.get(tp, (None, None))
        return passed_from if passed_to == state.highwater else state.highwater

    @property
    def member(self) -> str:
        """The id by which the group knows this consumer."""
        return str(self._ensure_consumer()._coordinator.member_id)

    async def log_range(self, tp: TP) -> tuple[int, int]:
        """Return where a partition begins and ends."""
        found: tuple[int, int] = await self.call_thread(self._log_range, _aiokafka(tp))
        return found

    async def _log_range(self, partition: aiokafka.TopicPartition) -> tuple[int, int]:
        # Both at once: a broker answers them after a fetch that waits for records, and one by one after two.
        consumer = self._ensure_consumer()
        starts, ends = await asyncio.gather(consumer.beginning_offsets([partition]), consumer.end_offsets([partition]))
        return int(starts[partition]), int(ends[partition])

    async def commit_exactly(self, offsets: Mapping[TP, tuple[int, str]]) -> None:
        """Commit offsets, each with its metadata.

        Raises:
            aiokafka.errors.KafkaError: refused, or whether it took effect is unknown.
        """
        await self.call_thread(self._commit_exactly, offsets)

    async def _commit_exactly(self, offsets: Mapping[TP, tuple[int, str]]) -> None:
        now = monotonic()
        self.tp_last_committed_at.update(dict.fromkeys(offsets, now))
        await self._ensure_consumer().commit({_aiokafka(tp): OffsetAndMetadata(*each) for tp, each in offsets.items()})


def _aiokafka(tp: TP) -> aiokafka.TopicPartition:
    return aiokafka.TopicPartition(tp.topic, tp.partition)


class BatchConsumer(driver.Consumer):
    """Delivers one event per fetched batch of a partition."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resumed = asyncio.Event()
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> BatchThread:
        return BatchThread(self, loop=self.loop, beacon=self.beacon)

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        super().resume_partitions(tps)
        self._resumed.set()

    def _new_offset(self, tp: TP) -> int | None:
        # Batches of a partition are acknowledged in order, so the last one's end is what may be committed.
        acked = self._acked[tp]
        if not acked:
            return None
        end = max(acked) + 1
        acked.clear()
        self._acked_index[tp].clear()
        return int(end)

    @property
    def member(self) -> str:
        """The id by which the group knows this consumer."""
        return self.thread.member

    @property
    def thread(self) -> BatchThread:
        """The thread that talks to Kafka."""
        return cast("BatchThread", self._thread)

    async def _drain_messages(self, fetcher: Any) -> None:
        try:
            while not (self.should_stop or fetcher.should_stop):
                fetched, active = await self._wait_next_records(_POLL_SECONDS)
                next_s = monotonic() + _SPACING_SECONDS
                generation = self.app.consumer_generation_id
                # The fetch may have been answered from a buffer without giving way to anybody.
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
        # Nothing is assigned, or all of it is paused. Faust would sleep for a second, and a consumer that polls nothing
        # for long (broker_max_poll_interval) leaves the group, and never comes back.
        self._resumed.clear()
        await self.thread.getmany({_NOTHING}, 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._resumed.wait()
        return {}, set()

    async def _seek_back(self) -> None:
        # What was fetched is dropped while the flow is stopped: go back, or it would be passed over.
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
                (),
                None,
                batch,
                None,
                0,
                0,
                tp,
                generation_id=generation,
            )
            await self.wait_first(self.callback(message), self.suspend_flow.wait())
            self._read_offset[tp] = batch.end - 1

    def _is_held(self, tp: TP) -> bool:
        """Whether a partition was paused by an agent, perhaps while it was fetched.

        A batch that was dropped then would be missed only when a later one comes, and at the end of the log none does.
        """
        return tp in self._paused_partitions and not self._is_changelog_tp(tp)


class PacedProducer(driver.Producer):
    """Faust's producer, which shares the process' connection attempts at a broker that is down."""

    def _new_producer(self, transactional_id: str | None = None) -> aiokafka.AIOKafkaProducer:
        return paced(super()._new_producer(transactional_id))


class BatchTransport(driver.Transport):
    """Faust's aiokafka transport with :class:`BatchConsumer`."""

    Consumer = BatchConsumer
    Producer = PacedProducer


class BatchSchema(Schema):
    """Decodes nothing: the event's value is the :class:`Fetched` itself."""

    def compile(self, app: Any, **kwargs: Any) -> Any:
        async def decode(message: Any, *, propagate: bool = False) -> Event:
            return Event(app, None, message.value, {}, message)

        return decode
