"""The reader that turns a Faust stream into what the five steps ask of their source."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import ConsumerRecord

from marq.kafka.committed_offsets import Committed, StartPosition, StartPositionResolver
from marq.kafka.group_reader import NotCommitted
from marq.kafka.protocol import Generation
from marq.kafka.queue_positions import Positions, topic_id_of
from marq.kafka.queue_records import Serving, serving
from marq.wire.errors import MarqError
from marq.wire.markers import Source
from marq.wire.names import Names
from marq_worker.transport import stream_reader
from marq_worker.transport.inbox import Fetched
from marq_worker.transport.stream_reader import NO_MEMBER, FaustConsumerPort, StreamReader

P0 = Source("messages", 0)
ORDERS = Source("orders", 0)


def records(start: int, end: int, queue: str | None = "emails", topic: str = "messages") -> list[ConsumerRecord]:
    key = None if queue is None else queue.encode()
    return [ConsumerRecord(topic, 0, offset, 0, 0, key, b"v", None, 0, 0, ()) for offset in range(start, end)]


def fetched(start: int, end: int, queue: str = "emails") -> Fetched:
    return Fetched(start, end, records(start, end, queue))


@dataclass
class Kafka:
    """Stands in for Faust's consumer; one partition of each topic."""

    offset: int | None = None
    metadata: str = ""
    log_start: int = 0
    log_end: int = 1_000
    sought: list[tuple[Source, int]] = field(default_factory=list)
    paused: bool = False
    refuses: bool = False
    silent: bool = False
    #: Lookups of the log's end fail; ``meanwhile`` runs during them.
    fails: bool = False
    meanwhile: Callable[[], Awaitable[None]] | None = None
    returned: dict[Source, int] = field(default_factory=dict)
    generation: Generation = field(default_factory=lambda: Generation(3, "member", None))
    committed_as: Generation | None = None
    topic_ids: dict[str, str] = field(default_factory=dict)

    @property
    def partitions(self) -> FaustConsumerPort:
        async def seek(source: Source, offset: int) -> None:
            self.sought.append((source, offset))

        async def settled() -> None:
            return

        async def commit(offsets: object, generation: Generation, limit_s: float) -> None:
            if self.refuses:
                raise KafkaConnectionError("gone")
            self.committed_as = generation
            ((self.offset, self.metadata),) = offsets.values()  # type: ignore[attr-defined]

        async def places(served: Serving, sources: Iterable[Source]) -> Mapping[Source, StartPosition]:
            if self.silent:
                self.silent = False
                raise KafkaConnectionError("gone")
            offsets = {} if self.offset is None else {P0: Committed(self.offset, self.metadata)}
            resolver = StartPositionResolver(Names(), Names().named_group("group"), served, sources, offsets, {})
            places = resolver.places(dict.fromkeys(sources, self.log_end))
            return {
                source: replace(place, topic_id=self.topic_ids.get(source.topic, ""))
                for source, place in places.items()
            }

        async def topic_ids(sources: Collection[Source]) -> Collection[tuple[str, str]]:
            return [
                (source.topic, self.topic_ids[source.topic]) for source in sources if source.topic in self.topic_ids
            ]

        async def log_start(source: Source) -> int:
            return self.log_start

        async def log_end(source: Source) -> int:
            if self.fails:
                raise KafkaConnectionError("gone")
            if self.meanwhile is not None:
                await self.meanwhile()
            return self.log_end

        return FaustConsumerPort(
            seek,
            settled,
            lambda _: setattr(self, "paused", True),
            lambda _: setattr(self, "paused", False),
            commit,
            places,
            log_start,
            log_end,
            self.returned.get,
            topic_ids,
            group="group",
            generation=lambda: self.generation,
        )


async def reading(kafka: Kafka, *queues: str, own_topics: Mapping[str, str] | None = None) -> StreamReader:
    reader = StreamReader(serving("messages", queues or ("emails",), own_topics or {}), kafka.partitions)
    reader.assigned([P0] if own_topics is None else [P0, ORDERS])
    await reader._place()
    await reader._seek_back()
    return reader


async def test_records_come_in_order_and_no_more_than_asked_for() -> None:
    reader = await reading(Kafka())
    await reader.deliver(P0, fetched(0, 5))

    first, second = await reader.fetch(3), await reader.fetch(10)

    assert [record.offset for record in first[P0]] == [0, 1, 2]
    assert [record.offset for record in second[P0]] == [3, 4]


async def test_a_fetch_without_records_ends_after_a_while() -> None:
    reader = await reading(Kafka())

    assert await reader.fetch(10) == {}


async def test_a_gap_is_read_again_instead_of_passed_over() -> None:
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 5))

    await reader.deliver(P0, fetched(8, 10))
    await reader.deliver(P0, fetched(5, 10))

    assert kafka.sought[-1] == (P0, 5)
    assert [record.offset for record in (await reader.fetch(100))[P0]] == list(range(10))


async def test_records_that_come_twice_are_taken_once() -> None:
    reader = await reading(Kafka())
    await reader.deliver(P0, fetched(0, 5))

    await reader.deliver(P0, fetched(3, 8))

    assert [record.offset for record in (await reader.fetch(100))[P0]] == list(range(8))


async def test_records_that_retention_removed_are_passed_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    kafka = Kafka()
    reader = await reading(kafka)
    kafka.log_start = 50

    await reader.deliver(P0, fetched(60, 70))
    await reader.deliver(P0, fetched(50, 70))

    assert kafka.sought[-1] == (P0, 50)
    assert "retention has removed records 0 to 49" in caplog.text
    assert (await reader.fetch(100))[P0][0].offset == 50


async def test_a_rewind_drops_what_was_read_until_the_consumer_has_gone_back() -> None:
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 10))
    await reader.fetch(5)

    reader.rewind({P0: 0})
    await reader.deliver(P0, fetched(10, 20))
    await reader._seek_back()
    await reader.deliver(P0, fetched(0, 10))

    assert kafka.sought[-1] == (P0, 0)
    assert [record.offset for record in (await reader.fetch(100))[P0]] == list(range(10))


async def test_a_commit_that_is_refused_is_said_to_be_none() -> None:
    kafka = Kafka(refuses=True)
    reader = await reading(kafka)

    with pytest.raises(NotCommitted):
        await reader.commit({P0: 5})

    assert kafka.offset is None


async def test_a_commit_of_a_partition_that_has_gone_is_refused() -> None:
    reader = await reading(Kafka())
    reader.revoked()

    with pytest.raises(NotCommitted):
        await reader.commit({P0: 5})


async def test_a_queue_that_joins_gets_its_old_records_and_the_others_do_not() -> None:
    kafka = Kafka(offset=5, metadata=Positions({"emails": 5}).encode(5))
    reader = await reading(kafka, "emails", "reports")
    mixed = [*records(0, 3, "emails"), *records(3, 5, "reports"), *records(5, 7, "emails")]

    await reader.deliver(P0, Fetched(0, 7, mixed))

    assert kafka.sought[-1] == (P0, 0)
    found = (await reader.fetch(100))[P0]
    assert [record.key for record in found] == [None, None, None, b"reports", b"reports", b"emails", b"emails"]


async def test_what_was_committed_while_catching_up_survives_a_restart() -> None:
    kafka = Kafka(offset=5, metadata=Positions({"emails": 5}).encode(5))
    reader = await reading(kafka, "emails", "reports")
    await reader.commit({P0: 2})

    again = await reading(kafka, "emails", "reports")
    await again.deliver(P0, fetched(2, 6, "emails"))

    assert kafka.sought[-1] == (P0, 2)
    assert [record.key for record in (await again.fetch(100))[P0]] == [None, None, None, b"emails"]


async def test_reading_pauses_while_much_waits_and_goes_on_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "MAX_WAITING", 10)
    kafka = Kafka()
    reader = await reading(kafka)

    await reader.deliver(P0, fetched(0, 12))
    paused = kafka.paused
    await reader.fetch(10)

    assert paused
    assert not kafka.paused


async def test_reading_goes_on_after_a_rewind_while_it_was_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "MAX_WAITING", 10)
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 20))
    await reader.fetch(5)
    assert kafka.paused

    reader.rewind({P0: 0})

    assert not kafka.paused


async def test_nothing_is_taken_before_it_is_known_where_to_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "FETCH_WAIT_SECONDS", 0.01)
    kafka = Kafka(offset=5, metadata=Positions({"emails": 5}).encode(5), silent=True)
    reader = StreamReader(serving("messages", ["emails"], {}), kafka.partitions)
    reader.assigned([P0])
    # Faust begins at the group's committed offset, which may be wrong for our queues.
    await reader.deliver(P0, fetched(5, 8))

    nothing = await reader.fetch(100)
    sought_before = list(kafka.sought)
    await reader.fetch(100)
    await reader.deliver(P0, fetched(5, 8))

    assert nothing == {}
    assert sought_before == []
    assert kafka.sought == [(P0, 5)]
    assert [record.offset for record in (await reader.fetch(100))[P0]] == [5, 6, 7]


async def test_all_records_of_a_queues_own_topic_are_its_messages() -> None:
    kafka = Kafka()
    reader = await reading(kafka, "emails", "orders", own_topics={"orders": "orders"})

    await reader.deliver(P0, Fetched(0, 2, [*records(0, 1, "emails"), *records(1, 2, "orders")]))
    await reader.deliver(ORDERS, Fetched(0, 2, [*records(0, 1, None, "orders"), *records(1, 2, "emails", "orders")]))

    found = await reader.fetch(100)
    assert {source: len(read) for source, read in found.items()} == {P0: 2, ORDERS: 2}
    assert [record.key for record in found[ORDERS]] == [None, b"emails"]


async def test_a_commit_of_a_queues_own_topic_tells_of_that_queue_only() -> None:
    kafka = Kafka()
    reader = await reading(kafka, "emails", "orders", own_topics={"orders": "orders"})

    await reader.commit({ORDERS: 5})

    assert Positions.decode(kafka.offset, kafka.metadata).by_queue == {"orders": 5}


async def test_a_batch_at_the_end_of_the_log_that_was_fetched_and_does_not_come_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_reader, "DELIVERY_SECONDS", 0)
    monkeypatch.setattr(stream_reader, "FETCH_WAIT_SECONDS", 0.01)
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 5))
    await reader.fetch(100)
    kafka.sought.clear()

    kafka.returned[P0] = 8
    await reader.fetch(100)
    sought_at_once = list(kafka.sought)
    await reader.fetch(100)
    await reader.deliver(P0, fetched(5, 8))

    assert sought_at_once == []
    assert kafka.sought == [(P0, 5)]
    assert [record.offset for record in (await reader.fetch(100))[P0]] == [5, 6, 7]


async def test_what_has_come_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "DELIVERY_SECONDS", 0)
    monkeypatch.setattr(stream_reader, "FETCH_WAIT_SECONDS", 0.01)
    kafka = Kafka(returned={P0: 8})
    reader = await reading(kafka)
    kafka.sought.clear()

    # On its way at the first look, and there at the second; then it is all there is.
    await reader.fetch(100)
    await reader.deliver(P0, fetched(0, 8))
    for _ in range(3):
        await reader.fetch(100)

    assert kafka.sought == []


async def test_a_reader_says_how_far_it_is_while_records_are_wanted_and_none_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the watchdog of a handler process ends it for; one without room for more is left alone."""
    reader = await reading(Kafka())
    never_asked = reader.standings()
    await reader.fetch(10)
    asked = reader.standings()
    await reader.deliver(P0, fetched(0, 5))
    has_some = reader.standings()
    await reader.fetch(10)
    read_on = reader.standings()
    monkeypatch.setattr(stream_reader, "ASKING_SECONDS", 0.0)
    without_room = reader.standings()

    assert (never_asked, has_some, without_room) == ({}, {}, {})
    assert (asked[P0].position, read_on[P0].position) == (0, 5)
    assert asked[P0].progress != read_on[P0].progress


async def test_a_recreated_topic_is_noticed_and_read_again() -> None:
    kafka = Kafka(offset=100, metadata=Positions({"emails": 100}).encode(100))
    reader = await reading(kafka)

    await reader.deliver(P0, fetched(90, 110))
    assert [record.offset for record in (await reader.fetch(20))[P0]] == list(range(100, 110))
    kafka.log_end = 7
    await reader.deliver(P0, fetched(0, 7))

    with pytest.raises(MarqError, match=r"messages, partition 0: the log ends at 7, but it was read up to 110"):
        await reader.fetch(20)


@pytest.mark.parametrize("start", [0, 50])
async def test_records_lost_since_reading_began_are_noticed(start: int) -> None:
    kafka = Kafka(offset=start or None, metadata=Positions({"emails": start}).encode(start) if start else "")
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(start, 100))
    await reader.fetch(100)

    # Offsets 80 to 99 were lost, and 80 to 84 are new records.
    kafka.log_end = 85
    await reader.deliver(P0, fetched(0, 85))

    with pytest.raises(MarqError, match="the log ends at 85, but it was read up to 100"):
        await reader.fetch(20)


async def test_nothing_is_committed_in_a_recreated_topic() -> None:
    kafka = Kafka(log_end=100)
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 100))
    await reader.fetch(100)
    kafka.log_end, kafka.offset = 7, None
    await reader.deliver(P0, fetched(0, 7))

    # Otherwise the next process would begin at 7, and skip the new records.
    with pytest.raises(NotCommitted, match="the log ends at 7"):
        await reader.commit({P0: 100})
    with pytest.raises(NotCommitted, match="the log ends at 7"):
        reader.commit_of({P0: 100})
    with pytest.raises(NotCommitted, match="the log ends at 7"):
        await reader.verify([P0])
    assert kafka.offset is None


async def test_a_queues_own_topic_that_is_created_again_ends_the_process_before_its_records_are_returned() -> None:
    kafka = Kafka(topic_ids={"orders": "aaaaaaaaaaaa"})
    reader = await reading(kafka, "emails", "orders", own_topics={"orders": "orders"})
    await reader.deliver(ORDERS, Fetched(0, 20, records(0, 20, None, "orders")))
    [source] = await reader.fetch(100)
    await reader.commit({source: 20})
    kafka.topic_ids["orders"] = "bbbbbbbbbbbb"
    await reader.deliver(ORDERS, Fetched(20, 40, records(20, 40, None, "orders")))

    with pytest.raises(MarqError, match="own topic was deleted and created again"):
        await reader.fetch(100)

    assert source == Source("orders@aaaaaaaaaaaa", 0)
    assert topic_id_of(kafka.metadata) == "aaaaaaaaaaaa"


async def test_a_rewind_is_not_taken_for_lost_records() -> None:
    kafka = Kafka(log_end=100)
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 100))
    await reader.fetch(60)

    reader.rewind({P0: 0})
    await reader.deliver(P0, fetched(60, 100))
    await reader._seek_back()
    kafka.fails = True
    await reader.deliver(P0, fetched(0, 60))

    assert [record.offset for record in (await reader.fetch(100))[P0]] == list(range(60))


async def test_a_rewind_while_the_end_of_the_log_is_looked_up_skips_no_record() -> None:
    kafka = Kafka(log_end=100)
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 50))
    await reader.fetch(50)

    async def rewind() -> None:
        reader.rewind({P0: 0})
        await reader._seek_back()

    kafka.meanwhile = rewind
    await reader.deliver(P0, fetched(40, 100))
    await reader.deliver(P0, fetched(0, 100))

    assert [record.offset for record in (await reader.fetch(200))[P0]] == list(range(100))


async def test_an_unknown_end_of_the_log_is_looked_up_again() -> None:
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 100))
    await reader.fetch(100)

    kafka.log_end, kafka.fails = 85, True
    await reader.deliver(P0, fetched(0, 80))
    kafka.fails = False
    await reader.deliver(P0, fetched(80, 85))

    with pytest.raises(MarqError, match="the log ends at 85"):
        await reader.fetch(20)


async def test_a_restart_after_lost_records_delivers_those_sent_since() -> None:
    """The process once ended at each start until the log had grown, and then skipped the new records."""
    kafka = Kafka(offset=100, metadata=Positions({"emails": 100}).encode(100), log_end=90)

    await reading(kafka)
    # Meanwhile the log grows past the former offset.
    kafka.log_end = 101
    again = await reading(kafka)
    await again.deliver(P0, fetched(89, 101))

    found = (await again.fetch(100))[P0]
    assert [(record.offset, record.key) for record in found] == [(offset, b"emails") for offset in range(90, 101)]


async def test_a_commit_has_the_generation_of_its_assignment() -> None:
    kafka = Kafka()
    reader = await reading(kafka)

    # The member has joined again, but its former partitions are not revoked yet.
    kafka.generation = Generation(4, "member", None)
    await reader.commit({P0: 5})

    assert kafka.committed_as == Generation(3, "member", None)


async def test_a_commit_in_a_transaction_has_the_generation_of_its_assignment() -> None:
    kafka = Kafka()
    reader = await reading(kafka)
    await reader.deliver(P0, fetched(0, 5))
    await reader.fetch(10)

    # The member has joined again, but its former partitions are not revoked yet: the group refuses this commit.
    kafka.generation = Generation(4, "member", None)
    commit = reader.commit_of({P0: 5})

    assert (commit.group, commit.generation) == ("group", Generation(3, "member", None))
    [(partition, offset)] = commit.offsets.items()
    assert (partition.topic, partition.partition, offset.offset) == (*P0, 5)
    reader.committed(commit)
    reader.revoked()
    with pytest.raises(NotCommitted, match="no longer assigned"):
        reader.commit_of({P0: 5})


async def test_a_member_that_was_removed_commits_nothing_in_a_transaction() -> None:
    reader = await reading(Kafka(generation=NO_MEMBER))

    with pytest.raises(NotCommitted, match="has removed this member"):
        reader.commit_of({P0: 0})
