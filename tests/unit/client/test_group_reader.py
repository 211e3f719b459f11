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
from marq.kafka.queue_records import serving
from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.wire.markers import Source

P0 = Source("t", 0)


class FakeConsumer:
    """What the reader uses of AIOKafkaConsumer."""

    def __init__(self) -> None:
        self.sought: list[tuple[TopicPartition, int]] = []
        self.subscribed = 0
        self.committed: list[bool] = []
        self.subscribed_before = 0
        self.records: list[ConsumerRecord[bytes, bytes]] = []

    def pause(self, *partitions: TopicPartition) -> None: ...

    def resume(self, *partitions: TopicPartition) -> None: ...

    def subscribe(self, topics: list[str], listener: object) -> None:
        self.subscribed += 1

    def read_committed(self, committed: bool) -> None:
        self.committed.append(committed)
        self.subscribed_before = self.subscribed

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought.append((partition, offset))

    def positions(self) -> dict[TopicPartition, int]:
        return {TopicPartition(*P0): self.records[-1].offset + 1 if self.records else 0}


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the consumer's records say is what is fetched."""

    async def fetch_records(
        consumer: FakeConsumer, wait_s: float, max_records: int, _woken: object
    ) -> dict[Source, Records]:
        await asyncio.sleep(0)
        return {P0: Records.of(consumer.records)} if consumer.records else {}

    monkeypatch.setattr("marq.kafka.group_reader.fetch_records", fetch_records)


@pytest.mark.parametrize("other_queues", [False, True])
async def test_places_that_were_looked_up_before_a_rebalance_do_not_count(monkeypatch, other_queues) -> None:
    asked, gate = [], asyncio.Event()

    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        asked.append(served.queues)
        if len(asked) == 1:
            await gate.wait()
            return {P0: StartPosition(100, Positions({"here": 100}))}
        return {P0: StartPosition(7, Positions({"here": 100, "joins": 7}))}

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["here"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    reader._listener = None  # type: ignore[assignment]
    reader.assigned([P0])
    fetching = asyncio.create_task(reader.fetch(10))
    await asyncio.sleep(0)

    # The same partition again, as it is for the only member of a group.
    if other_queues:
        reader.serve(serving("t", ["here", "joins"], {}))
    reader.revoked()
    reader.assigned([P0])
    gate.set()
    assert await fetching == {}
    assert consumer.sought == []
    await reader.fetch(10)

    assert asked == [("here",), ("here", "joins") if other_queues else ("here",)]
    assert consumer.sought == [(TopicPartition("t", 0), 7)]


async def test_a_read_before_the_start_restarts_but_only_once_per_place(monkeypatch) -> None:
    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        return {P0: StartPosition(100, Positions({"here": 100}))}

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["here"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    reader._listener = None  # type: ignore[assignment]
    consumer.records = [ConsumerRecord("t", 0, 3, 0, 0, b"here", b"v", None, 0, 0, ())]
    reader.assigned([P0])

    assert await reader.fetch(10) == {}
    assert consumer.subscribed == 1
    reader.revoked()
    reader.assigned([P0])
    # The offset was there again: it is the topic's end that was lost, and this record was read before.
    assert [record.key for record in (await reader.fetch(10))[P0]] == [None]
    assert consumer.subscribed == 1


async def test_a_queues_own_topic_that_is_created_again_is_placed_again_before_its_records_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More records than the former topic had: aiokafka does not notice, because the next offset exists."""
    ids = {"t": "aaaaaaaaaaaa"}
    committed: dict[TopicPartition, Any] = {}

    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        return {P0: StartPosition(20 if ids["t"] == "aaaaaaaaaaaa" else 0, Positions(), topic_id=ids["t"])}

    async def topic_ids(partitions: object) -> set[tuple[str, str]]:
        return set(ids.items())

    async def commit(offsets) -> None:
        committed.update(offsets)

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("messages", ["here"], {"here": "t"}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    consumer.topic_ids, consumer.commit = topic_ids, commit
    consumer._coordinator = SimpleNamespace(generation=1, member_id="m")
    reader._listener = None  # type: ignore[assignment]
    reader.assigned([P0])
    consumer.records = [ConsumerRecord("t", 0, at, 0, 0, None, b"v", None, 0, 0, ()) for at in range(20, 30)]
    [former] = await reader.fetch(100)
    await reader.commit({former: 30})

    ids["t"] = "bbbbbbbbbbbb"
    assert await reader.fetch(100) == {}
    assert consumer.subscribed == 1
    reader.revoked()
    reader.assigned([P0])
    await reader.fetch(100)

    assert former == Source("t@aaaaaaaaaaaa", 0)
    assert topic_id_of(committed[TopicPartition("t", 0)].metadata) == "aaaaaaaaaaaa"
    assert consumer.sought == [(TopicPartition("t", 0), 20), (TopicPartition("t", 0), 0)]
    with pytest.raises(NotCommitted, match="no longer assigned"):
        await reader.commit({former: 30})


@pytest.mark.parametrize("start", [0, 50])
async def test_records_lost_since_reading_began_restart_it(monkeypatch, start: int) -> None:
    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        return {P0: StartPosition(start, Positions({"here": start}))}

    async def commit(offsets) -> None: ...

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["here"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    consumer._coordinator = SimpleNamespace(generation=1, member_id="m")
    consumer.commit = commit
    reader._listener = None  # type: ignore[assignment]
    reader.assigned([P0])
    log = [ConsumerRecord("t", 0, at, 0, 0, b"here", b"v", None, 0, 0, ()) for at in range(100)]
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
    progress, served = MemberPositions(), serving("t", ["here"], {})
    progress.begin(P0, Positions(), 0)
    for end in (100, 85):
        progress.take({P0: end}, progress.advanced_to(served, {P0: end}))

    fetched = {P0: Records.of([ConsumerRecord("t", 0, 85, 0, 0, b"here", b"v", None, 0, 0, ())])}

    assert progress.recreated(fetched) == {P0: 100}


async def test_a_place_in_a_log_that_has_lost_records_is_committed_at_once(monkeypatch) -> None:
    """Else the log may have grown past the former offset by the next start, which would skip its new records."""
    committed: list[dict[TopicPartition, int]] = []

    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        return {
            P0: StartPosition(90, Positions({"here": 90}), lost=True),
            Source("t", 1): StartPosition(5, Positions({"here": 5})),
        }

    async def commit(offsets) -> None:
        committed.append({partition: offset.offset for partition, offset in offsets.items()})

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["here"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    consumer._coordinator = SimpleNamespace(generation=1, member_id="m")
    consumer.commit = commit
    reader.assigned([P0, Source("t", 1)])
    await reader.fetch(10)

    assert committed == [{TopicPartition(*P0): 90}]


@pytest.mark.parametrize("committed", [False, True])
def test_copies_that_were_taken_back_are_seen_unless_nothing_may_be_delivered_twice(
    monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr("marq.kafka.group_reader.GroupConsumer", lambda **options: made.append(options))

    GroupReader(ClientSettings(), "g", serving("t", ["q"], {}), committed=committed)._make()

    assert made[0]["isolation_level"] == ("read_committed" if committed else "read_uncommitted")


def test_a_queue_with_ordering_is_read_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr("marq.kafka.group_reader.GroupConsumer", lambda **options: made.append(options))

    GroupReader(ClientSettings(), "g", serving("t", ["q"], {}, ordered=True))._make()

    assert made[0]["isolation_level"] == "read_committed"


@pytest.mark.parametrize(("told", "interval_ms"), [(None, 3_333), (500, 500)])
def test_a_member_learns_of_a_rebalance_within_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch, told: int | None, interval_ms: int
) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr("marq.kafka.group_reader.GroupConsumer", lambda **options: made.append(options))

    GroupReader(ClientSettings(), "g", serving("t", ["q"], {}), heartbeat_ms=told)._make()

    assert made[0]["heartbeat_interval_ms"] == interval_ms


@pytest.mark.parametrize("transactional", [False, True])
def test_a_queue_that_becomes_ordered_is_read_committed_from_then_on(transactional: bool) -> None:
    reader = GroupReader(ClientSettings(), "g", serving("t", ["q"], {}), committed=transactional)
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    reader._listener = None  # type: ignore[assignment]

    reader.serve(serving("t", ["q"], {}, ordered=True))
    reader.serve(serving("t", ["q"], {}))

    assert consumer.committed == [True, transactional]
    # Before the subscription, which drops fetches of the former level.
    assert (consumer.subscribed_before, consumer.subscribed) == (1, 2)


async def test_a_rebalance_that_ends_while_the_reader_stops_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assignee = SimpleNamespace(assigned=lambda: None)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["q"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    stopped: list[object] = []

    async def stop_consumer(stopping: FakeConsumer, limit_s: float) -> None:
        # As aiokafka's coordinator does before it leaves the group.
        await _Listener(reader, assignee).on_partitions_assigned([TopicPartition(*P0)])
        stopped.append(stopping)

    monkeypatch.setattr("marq.kafka.group_reader.stop_consumer", stop_consumer)
    await reader.stop(1)

    assert stopped == [consumer]


async def test_a_reader_tells_how_far_it_is_while_records_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of a handler process ends it if that does not change; one without room for more is left alone."""

    async def places(settings, group, served, sources) -> dict[Source, StartPosition]:
        return {P0: StartPosition(0, Positions())}

    monkeypatch.setattr("marq.kafka.group_reader.places", places)
    reader = GroupReader(ClientSettings(), "g", serving("t", ["here"], {}))
    reader._consumer = consumer = FakeConsumer()  # type: ignore[assignment]
    reader.assigned([P0])
    never_asked = reader.wanted()
    await reader.fetch(10)
    asked = reader.wanted()
    consumer.records = [ConsumerRecord("t", 0, 4, 0, 0, b"here", b"v", None, 0, 0, ())]
    await reader.fetch(10)
    read_on = reader.wanted()
    monkeypatch.setattr("marq.kafka.group_reader.WANTED_S", 0.0)
    without_room = reader.wanted()

    assert (never_asked, asked, read_on, without_room) == ({}, {P0: 0}, {P0: 5}, {})


async def test_a_reader_tells_that_it_rebalances_from_the_revocation_to_the_next_assignment() -> None:
    reader = GroupReader(ClientSettings(), "g", serving("t", ["q"], {}))
    reader._consumer = FakeConsumer()  # type: ignore[assignment]
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
