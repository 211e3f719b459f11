"""The reader of a consumer group: where it goes on after a rebalance."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from marq.kafka.committed_offsets import StartPosition
from marq.kafka.group_reader import GroupReader, NotCommitted, _Listener
from marq.kafka.queue_positions import MemberPositions, Positions, topic_id_of
from marq.kafka.queue_records import Serving, serving
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.wire.markers import Source

P0, P1 = Source("t", 0), Source("t", 1)
HERE = serving("t", ["here"], {})


def records(offsets: range, key: bytes | None = b"here") -> list[ConsumerRecord[bytes, bytes]]:
    return [ConsumerRecord("t", 0, at, 0, 0, key, b"v", None, 0, 0, ()) for at in offsets]


class FakeConsumer:
    """What the reader uses of AIOKafkaConsumer."""

    def __init__(self) -> None:
        self.sought: list[tuple[TopicPartition, int]] = []
        self.subscribed = 0
        self.read_committed_calls: list[bool] = []
        self.subscribed_before = 0
        self.records: list[ConsumerRecord[bytes, bytes]] = []
        self.committed: dict[TopicPartition, Any] = {}
        self._coordinator = SimpleNamespace(generation=1, member_id="m")

    def pause(self, *partitions: TopicPartition) -> None: ...

    def resume(self, *partitions: TopicPartition) -> None: ...

    def subscribe(self, topics: list[str], listener: object) -> None:
        self.subscribed += 1

    def read_committed(self, committed: bool) -> None:
        self.read_committed_calls.append(committed)
        self.subscribed_before = self.subscribed

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought.append((partition, offset))

    def positions(self) -> dict[TopicPartition, int]:
        return {TopicPartition(*P0): self.records[-1].offset + 1 if self.records else 0}

    async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
        self.committed.update(offsets)


class Reading:
    """A reader whose start positions and records are those that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.starts: dict[Source, StartPosition] = {}
        monkeypatch.setattr("marq.kafka.group_reader.places", self._places)
        monkeypatch.setattr("marq.kafka.group_reader.fetch_records", self._fetch)
        self.make()

    def make(self, served: Serving = HERE, **options: Any) -> GroupReader:
        self.reader = GroupReader(ClientSettings(), "g", served, **options)
        self.reader._consumer = self.consumer = FakeConsumer()  # type: ignore[assignment]
        self.reader._listener = None  # type: ignore[assignment]
        return self.reader

    async def _places(self, settings: object, group: str, served: Serving, sources: object) -> dict[Source, Any]:
        return self.starts

    async def _fetch(self, consumer: FakeConsumer, wait_s: float, count: int, woken: object) -> dict[Source, Records]:
        await asyncio.sleep(0)
        return {P0: Records.of(consumer.records)} if consumer.records else {}

    def begin(self, start: StartPosition) -> None:
        self.starts = {P0: start}
        self.reader.assigned([P0])

    def reassign(self) -> None:
        self.reader.revoked()
        self.reader.assigned([P0])

    def consumer_options(self, served: Serving = HERE, **options: Any) -> dict[str, object]:
        """Return the options of the consumer that a reader makes."""
        made: list[dict[str, object]] = []
        self._monkeypatch.setattr("marq.kafka.group_reader.GroupConsumer", lambda **options: made.append(options))
        GroupReader(ClientSettings(), "g", served, **options)._make()
        return made[0]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


@pytest.mark.parametrize("other_queues", [False, True])
async def test_places_that_were_looked_up_before_a_rebalance_do_not_count(reading, monkeypatch, other_queues) -> None:
    asked, gate = [], asyncio.Event()

    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        asked.append(served.queues)
        if len(asked) == 1:
            await gate.wait()
            return {P0: StartPosition(100, Positions({"here": 100}))}
        return {P0: StartPosition(7, Positions({"here": 100, "joins": 7}))}

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = reading.reader
    reader.assigned([P0])
    fetching = asyncio.create_task(reader.fetch(10))
    await asyncio.sleep(0)

    # The same partition again, as it is for the only member of a group.
    if other_queues:
        reader.serve(serving("t", ["here", "joins"], {}))
    reading.reassign()
    gate.set()
    assert await fetching == {}
    assert reading.consumer.sought == []
    await reader.fetch(10)

    assert asked == [("here",), ("here", "joins") if other_queues else ("here",)]
    assert reading.consumer.sought == [(TopicPartition("t", 0), 7)]


async def test_a_read_before_the_start_restarts_but_only_once_per_place(reading) -> None:
    reading.consumer.records = records(range(3, 4))
    reading.begin(StartPosition(100, Positions({"here": 100})))

    assert await reading.reader.fetch(10) == {}
    assert reading.consumer.subscribed == 1
    reading.reassign()
    # The offset was there again: it is the topic's end that was lost, and this record was read before.
    assert [record.key for record in (await reading.reader.fetch(10))[P0]] == [None]
    assert reading.consumer.subscribed == 1


async def test_a_queues_own_topic_that_is_created_again_is_placed_again_before_its_records_are_returned(
    reading,
) -> None:
    """More records than the former topic had: aiokafka does not notice, because the next offset exists."""
    reader, ids = reading.make(serving("messages", ["here"], {"here": "t"})), {"t": "aaaaaaaaaaaa"}

    async def topic_ids(partitions: object) -> set[tuple[str, str]]:
        return set(ids.items())

    reading.consumer.topic_ids = topic_ids
    reading.consumer.records = records(range(20, 30), key=None)
    reading.begin(StartPosition(20, Positions(), topic_id="aaaaaaaaaaaa"))
    [former] = await reader.fetch(100)
    await reader.commit({former: 30})

    ids["t"] = "bbbbbbbbbbbb"
    reading.starts = {P0: StartPosition(0, Positions(), topic_id="bbbbbbbbbbbb")}
    assert await reader.fetch(100) == {}
    assert reading.consumer.subscribed == 1
    reading.reassign()
    await reader.fetch(100)

    assert former == Source("t@aaaaaaaaaaaa", 0)
    assert topic_id_of(reading.consumer.committed[TopicPartition("t", 0)].metadata) == "aaaaaaaaaaaa"
    assert reading.consumer.sought == [(TopicPartition("t", 0), 20), (TopicPartition("t", 0), 0)]
    with pytest.raises(NotCommitted, match="no longer assigned"):
        await reader.commit({former: 30})


@pytest.mark.parametrize("start", [0, 50])
async def test_records_lost_since_reading_began_restart_it(reading, start: int) -> None:
    reader, consumer, log = reading.reader, reading.consumer, records(range(100))
    reading.begin(StartPosition(start, Positions({"here": start})))
    consumer.records = log[start:]
    await reader.fetch(100)
    await reader.commit({P0: 60})
    # A failed cycle reads again.
    consumer.records = log[60:]
    assert set((await reader.fetch(100))[P0].keys) == {b"here"}
    await reader.commit({P0: 100})
    assert consumer.subscribed == 0

    # Offsets 80 to 99 were lost, and 80 to 84 are new records.
    consumer.records = log[:85]

    assert await reader.fetch(100) == {}
    assert consumer.subscribed == 1


def test_records_read_again_after_a_loss_do_not_hide_it() -> None:
    """The loss was not noticed yet, because nothing was committed."""
    progress = MemberPositions()
    progress.begin(P0, Positions(), 0)
    for end in (100, 85):
        progress.take({P0: end}, progress.advanced_to(HERE, {P0: end}))

    assert progress.recreated({P0: Records.of(records(range(85, 86)))}) == {P0: 100}


async def test_a_place_in_a_log_that_has_lost_records_is_committed_at_once(reading) -> None:
    """Else the log may have grown past the former offset by the next start, which would skip its new records."""
    reading.starts = {
        P0: StartPosition(90, Positions({"here": 90}), lost=True),
        P1: StartPosition(5, Positions({"here": 5})),
    }
    reading.reader.assigned([P0, P1])
    await reading.reader.fetch(10)

    assert {place: commit.offset for place, commit in reading.consumer.committed.items()} == {TopicPartition(*P0): 90}


@pytest.mark.parametrize(
    ("served", "committed", "level"),
    [
        (HERE, False, "read_uncommitted"),
        (HERE, True, "read_committed"),
        (serving("t", ["here"], {}, ordered=True), False, "read_committed"),
    ],
    ids=["redeliveries that were taken back are seen", "nothing may be delivered twice", "a queue with ordering"],
)
def test_what_a_reader_sees_of_open_transactions(reading, served: Serving, committed: bool, level: str) -> None:
    assert reading.consumer_options(served, committed=committed)["isolation_level"] == level


@pytest.mark.parametrize(("told", "interval_ms"), [(None, 3_333), (500, 500)])
def test_a_member_learns_of_a_rebalance_within_its_heartbeat(reading, told: int | None, interval_ms: int) -> None:
    assert reading.consumer_options(heartbeat_ms=told)["heartbeat_interval_ms"] == interval_ms


@pytest.mark.parametrize("transactional", [False, True])
def test_a_queue_that_becomes_ordered_is_read_committed_from_then_on(reading, transactional: bool) -> None:
    reader = reading.make(committed=transactional)

    reader.serve(serving("t", ["here"], {}, ordered=True))
    reader.serve(HERE)

    assert reading.consumer.read_committed_calls == [True, transactional]
    # Before the subscription, which drops fetches of the former level.
    assert (reading.consumer.subscribed_before, reading.consumer.subscribed) == (1, 2)


async def test_a_rebalance_that_ends_while_the_reader_stops_is_not_an_error(reading, monkeypatch) -> None:
    assignee, stopped = SimpleNamespace(assigned=lambda: None), list[object]()

    async def stop_consumer(stopping: FakeConsumer, limit_s: float) -> None:
        # As aiokafka's coordinator does before it leaves the group.
        await _Listener(reading.reader, assignee).on_partitions_assigned([TopicPartition(*P0)])
        stopped.append(stopping)

    monkeypatch.setattr("marq.kafka.group_reader.stop_consumer", stop_consumer)
    await reading.reader.stop(1)

    assert stopped == [reading.consumer]


async def test_a_reader_tells_how_far_it_is_while_records_are_wanted(reading, monkeypatch) -> None:
    """The watchdog of a handler process ends it if that does not change; one without room for more is left alone."""
    reader = reading.reader
    reading.begin(StartPosition(0, Positions()))
    never_asked = reader.wanted()
    await reader.fetch(10)
    asked = reader.wanted()
    reading.consumer.records = records(range(4, 5))
    await reader.fetch(10)
    read_on = reader.wanted()
    monkeypatch.setattr("marq.kafka.group_reader.WANTED_S", 0.0)

    assert (never_asked, asked, read_on, reader.wanted()) == ({}, {P0: 0}, {P0: 5}, {})


async def test_a_reader_tells_that_it_rebalances_from_the_revocation_to_the_next_assignment(reading) -> None:
    reader = reading.reader
    told: list[tuple[bool, int | None]] = []

    def note() -> None:
        told.append((reader.rebalancing, reader.partitions))

    async def revoked() -> None:
        note()

    listener = _Listener(reader, SimpleNamespace(revoked=revoked, assigned=note))
    note()
    await listener.on_partitions_revoked(set())
    await listener.on_partitions_assigned([TopicPartition(*P0)])
    await listener.on_partitions_revoked({TopicPartition(*P0)})
    await listener.on_partitions_assigned([])

    assert told == [(False, None), (True, None), (False, 1), (True, 1), (False, 0)]
