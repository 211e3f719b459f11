"""Hazards of Faust that its transport and its settings have, shown without a broker.

Numbers are those of issues in faust-streaming/faust; test_faust_hazards.py has the hazards that take a real worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.subscription_state import TopicPartitionState
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from faust.types import TP, ConsumerMessage
from faust.types.enums import ProcessingGuarantee

from marq_worker.app import app
from marq_worker.transport.batch_transport import BatchConsumer, BatchThread
from marq_worker.transport.inbox import Fetched
from marq_worker.worker_folders import claim_folder


async def test_records_of_a_partition_that_becomes_active_during_a_fetch_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """#175, #640: Faust adds to the set of active partitions while a fetch with it is under way, in another thread.

    A TICK that was dropped so stopped its partition for good: on a quiet partition no later record shows the gap.
    """
    known, added = TP("markers", 0), TP("markers", 1)
    active = {known}
    tick = SimpleNamespace(offset=7)

    async def fetch(*_: object, **__: object) -> dict[TopicPartition, list[SimpleNamespace]]:
        active.add(added)
        return {TopicPartition(*added): [tick]}

    monkeypatch.setattr(AIOKafkaConsumerThread, "_fetch_records", fetch)
    thread = new_thread()

    found = await thread._fetch_records(Consumer(), active)

    assert found == {added: Fetched(7, 8, [tick])}


async def test_a_partition_that_was_not_read_since_a_rebalance_is_no_error_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two minutes after its start a worker logged an error for each partition, whenever another one joined or left."""
    thread, consumer = new_thread(), Consumer()
    consumer._fetcher = SimpleNamespace(_subscriptions=consumer._subscription)
    thread._consumer, thread.time_started = consumer, 0.0

    for look in (thread.verify_event_path, thread.verify_recovery_event_path):
        look(1_000.0, TP(*Consumer.partition))

    assert not caplog.records


def new_thread() -> BatchThread:
    thread = object.__new__(BatchThread)
    thread._passed, thread._reads = {}, {}
    return thread


class Consumer:
    """Stands in for aiokafka's: one partition, with the real state of it."""

    partition = TP("messages", 0)

    def __init__(self, position: int = 0) -> None:
        self.state = TopicPartitionState(None)
        self.state.seek(position)
        assignment = SimpleNamespace(state_value=lambda tp: self.state if tp == self.partition else None)
        self._subscription = SimpleNamespace(subscription=SimpleNamespace(assignment=assignment))

    def reads(self, end: int, *offsets: int) -> list[SimpleNamespace]:
        """What the fetcher does to read on to an offset; records are at these offsets, the others are control's."""
        self.state.consumed_to(end)
        return [SimpleNamespace(offset=offset) for offset in offsets]


async def fetched(
    monkeypatch: pytest.MonkeyPatch, thread: BatchThread, consumer: Consumer, fetch: Callable[[], list[SimpleNamespace]]
) -> Fetched | None:
    async def fetch_records(*_: object, **__: object) -> dict[TopicPartition, list[SimpleNamespace]]:
        return {TopicPartition(*consumer.partition): fetch()}

    monkeypatch.setattr(AIOKafkaConsumerThread, "_fetch_records", fetch_records)
    found = await thread._fetch_records(consumer, {consumer.partition})
    return found.get(consumer.partition)


async def test_a_seek_forward_during_a_fetch_never_makes_records_pass_for_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """#216, #221: Faust seeks to the committed offsets whenever it likes, and a queue may be behind them."""
    thread, consumer = new_thread(), Consumer(position=100)

    def with_records() -> list[SimpleNamespace]:
        consumer.state.seek(500)
        return consumer.reads(502, 500, 501)

    def without_records() -> list[SimpleNamespace]:
        consumer.state.seek(900)
        return []

    first = await fetched(monkeypatch, thread, consumer, with_records)
    nothing = await fetched(monkeypatch, thread, consumer, without_records)
    last = await fetched(monkeypatch, thread, consumer, lambda: consumer.reads(901, 900))

    assert first is not None
    assert (first.start, first.end) == (500, 502)
    assert nothing is None
    assert last is not None
    assert (last.start, last.end) == (900, 901)


async def test_control_records_are_read_with_the_records_after_them_despite_seeks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark of a transaction is at 100: a reader that waits for a record there would return to it without end."""
    thread, consumer = new_thread(), Consumer(position=500)

    def back_to_the_mark() -> list[SimpleNamespace]:
        consumer.state.seek(100)
        return consumer.reads(101)

    nothing = await fetched(monkeypatch, thread, consumer, back_to_the_mark)
    batch = await fetched(monkeypatch, thread, consumer, lambda: consumer.reads(104, 101, 102))

    assert nothing is None
    assert batch is not None
    assert (batch.start, batch.end) == (100, 104)


async def test_a_batch_that_was_fetched_while_its_partition_is_paused_is_delivered_all_the_same() -> None:
    """Stock Faust drops it, and reads on after it."""
    paused, gone, changelog = TP("messages", 0), TP("messages", 1), TP("changelog", 0)
    delivered: list[TP] = []

    async def callback(message: ConsumerMessage) -> None:
        delivered.append(message.tp)

    async def wait_first(delivery: Awaitable[None], suspended: Awaitable[bool]) -> None:
        await delivery
        asyncio.ensure_future(suspended).cancel()

    consumer = object.__new__(BatchConsumer)
    consumer.__dict__.update(
        app=SimpleNamespace(consumer_generation_id=1, tables=SimpleNamespace(changelog_topics={changelog.topic})),
        flow_active=True,
        suspend_flow=asyncio.Event(),
        callback=callback,
        wait_first=wait_first,
        _paused_partitions={paused, changelog},
        _read_offset={},
    )
    batch = Fetched(0, 1, [SimpleNamespace(offset=0, timestamp=0, timestamp_type=0)])

    await consumer._deliver(dict.fromkeys([paused, gone, changelog], batch), set(), 1)

    assert delivered == [paused]


def test_two_workers_on_one_machine_never_share_a_data_directory(tmp_path: Path) -> None:
    first, _, held = claim_folder(tmp_path)
    second, _, also_held = claim_folder(tmp_path)
    held.close()
    third, _, again_held = claim_folder(tmp_path)

    assert (first, second, third) == (0, 1, 0)
    also_held.close()
    again_held.close()


def test_what_fausts_own_exactly_once_and_standbys_break_is_not_used() -> None:
    assert app.conf.processing_guarantee is ProcessingGuarantee.AT_LEAST_ONCE
    assert app.conf.table_standby_replicas == 0
    assert not app.conf.autodiscover
    assert app.conf.topic_disable_leader
