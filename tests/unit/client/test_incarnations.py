"""The check that fetched records are from the topic that reading began with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import pytest
from aiokafka.errors import KafkaConnectionError

from marq.kafka import incarnations
from marq.kafka.committed_offsets import Committed, of_incarnations
from marq.kafka.incarnations import Incarnations, Recreated
from marq.kafka.queue_positions import MAX_METADATA_BYTES, Positions, topic_id_of
from marq.kafka.queue_records import serving
from marq.kafka.records import Records, Row
from marq.wire.markers import Source
from marq.wire.names import check_topic_name, incarnation, incarnation_id, log_name, markers_partition

MESSAGES, ORDERS = Source("messages", 0), Source("orders", 0)
FORMER, NOW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
SERVED = serving("messages", ["emails", "orders"], {"orders": "orders"})


def records(first: int = 0) -> Records:
    return Records.of([Row(offset, 0, b"emails", b"v", ()) for offset in range(first, first + 3)])


class Reading:
    """A member of a group that reads a topic, and the broker's answers about it."""

    def __init__(self) -> None:
        self.ids: set[tuple[str, str]] = {("orders", FORMER)}
        self.error: Exception | None = None
        self.asked: list[list[Source]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.went_back: list[dict[Source, int]] = []
        self.incarnations = Incarnations(self._topic_ids, lambda offsets: self.went_back.append(dict(offsets)))
        self.incarnations.begin(MESSAGES, "")
        self.source = self.incarnations.begin(ORDERS, FORMER)

    async def _topic_ids(self, partitions: Collection[Source]) -> Collection[tuple[str, str]]:
        self.asked.append(sorted(partitions))
        self.meanwhile()
        if self.error is not None:
            raise self.error
        return self.ids

    async def checked(self, fetched: Mapping[Source, Records]) -> dict[Source, Records]:
        return await self.incarnations.checked(SERVED, fetched)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnations, "PAUSE_S", 0)


async def test_records_of_an_own_topic_have_the_source_of_its_incarnation() -> None:
    reading = Reading()

    fetched = await reading.checked({MESSAGES: records(), ORDERS: records()})

    assert fetched.keys() == {MESSAGES, Source(f"orders@{FORMER}", 0)}


async def test_records_of_the_messages_topic_are_not_checked() -> None:
    reading = Reading()
    await reading.checked({})
    reading.asked.clear()

    assert (await reading.checked({MESSAGES: records()})).keys() == {MESSAGES}
    assert reading.asked == []


async def test_records_of_a_topic_that_was_created_again_are_not_returned(
    caplog: pytest.LogCaptureFixture, logged: Callable[[], list[str]]
) -> None:
    reading = Reading()
    reading.ids = {("orders", NOW)}

    with caplog.at_level(logging.WARNING), pytest.raises(Recreated):
        await reading.checked({ORDERS: records(20)})

    [line] = logged()
    assert "topic orders was deleted and created again" in line
    assert FORMER in line
    assert NOW in line


async def test_a_topic_without_new_records_is_checked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new topic may end where the former one did, so that its records are never fetched."""
    reading = Reading()
    await reading.checked({})
    assert await reading.checked({}) == {}
    assert reading.asked == [[ORDERS]]
    monkeypatch.setattr(incarnations, "CHECK_S", 0)
    reading.ids = {("orders", NOW)}

    with pytest.raises(Recreated):
        await reading.checked({})


@pytest.mark.parametrize("error", [KafkaConnectionError("gone"), None], ids=["no answer", "the topic is deleted"])
async def test_records_whose_topic_has_an_unknown_id_are_read_again(error: Exception | None) -> None:
    reading = Reading()
    reading.error, reading.ids = error, set()

    assert await reading.checked({ORDERS: records(20)}) == {}

    assert reading.went_back == [{ORDERS: 20}]


async def test_records_of_the_messages_topic_do_not_wait_for_the_ids_of_other_topics() -> None:
    """One broker that did not answer held up all queues of the group, even if no record came from it."""
    reading = Reading()
    reading.error = KafkaConnectionError("gone")

    assert (await reading.checked({MESSAGES: records(7)})).keys() == {MESSAGES}
    assert (await reading.checked({MESSAGES: records(10), ORDERS: records(20)})).keys() == {MESSAGES}
    assert reading.went_back == [{}, {ORDERS: 20}]


async def test_a_failed_check_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that took as long as its pause would follow each fetch."""
    reading, now_s = Reading(), [100.0]
    monkeypatch.setattr(incarnations.time, "monotonic", lambda: now_s[0])

    def pass_time() -> None:
        now_s[0] += incarnations.CHECK_LIMIT_S

    reading.error, reading.meanwhile = KafkaConnectionError("gone"), pass_time
    await reading.checked({MESSAGES: records()})
    await reading.checked({MESSAGES: records(3)})

    assert reading.asked == [[ORDERS]]


async def test_an_outage_without_new_records_is_no_warning_of_its_own(
    caplog: pytest.LogCaptureFixture, logged: Callable[[], list[str]]
) -> None:
    reading = Reading()
    reading.error = KafkaConnectionError("gone")

    with caplog.at_level(logging.WARNING):
        assert await reading.checked({}) == {}

    assert logged() == []


async def test_brokers_without_ids_are_asked_in_vain() -> None:
    reading = Reading()
    reading.incarnations.begin(ORDERS, "")
    reading.ids = set()

    assert (await reading.checked({ORDERS: records()})).keys() == {ORDERS}


async def test_a_rewind_during_the_check_drops_the_records_of_that_source_only() -> None:
    """They would be delivered before the records that are read again, and the others would be skipped."""
    reading = Reading()
    reading.meanwhile = lambda: reading.incarnations.rewind({reading.source: 2, Source(f"orders@{NOW}", 0): 1})

    fetched = await reading.checked({ORDERS: records(20), MESSAGES: records(7)})

    assert fetched.keys() == {MESSAGES}
    assert reading.went_back == [{ORDERS: 2}]


async def test_partitions_that_are_revoked_during_the_check_return_nothing() -> None:
    reading = Reading()
    reading.meanwhile = reading.incarnations.clear

    assert await reading.checked({ORDERS: records(20)}) == {}


# --- committed offsets ------------------------------------------------------------------------------------------------


def commit(topic_id: str, offset: int = 20) -> Committed:
    return Committed(offset, Positions({"orders": offset}).encode(offset, "somebody", 3, topic_id))


@pytest.mark.parametrize(
    ("committed", "present", "counts"),
    [(FORMER, FORMER, True), (FORMER, NOW, False), ("", NOW, True), (FORMER, "", True)],
    ids=["the same", "a former one", "set by a program", "brokers without ids"],
)
def test_a_committed_offset_counts_in_its_incarnation_only(committed: str, present: str, *, counts: bool) -> None:
    offsets = {ORDERS: commit(committed)}

    assert bool(of_incarnations([ORDERS.of(present)], offsets)) is counts


def test_a_commit_for_a_former_incarnation_is_a_warning(
    caplog: pytest.LogCaptureFixture, logged: Callable[[], list[str]]
) -> None:
    with caplog.at_level(logging.WARNING):
        of_incarnations([ORDERS.of(NOW)], {ORDERS: commit(FORMER)}, "group")

    [line] = logged()
    assert "topic orders, partition 0: it was deleted and created again: group group starts over" in line


def test_the_metadata_of_a_commit_always_has_room_for_the_id() -> None:
    many = {f"a-queue-that-has-left-{number}": number for number in range(500)}

    metadata = Positions({**many, "orders": 1_000}).encode(1_000, "somebody", 3, FORMER)

    assert len(metadata.encode()) <= MAX_METADATA_BYTES
    assert topic_id_of(metadata) == FORMER
    assert Positions.decode(1_000, metadata).by_queue["orders"] == 1_000


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["orders", "o" * 249])
def test_the_name_of_an_incarnation_fits_into_a_marker_and_has_the_topics_name(topic: str) -> None:
    name = incarnation(check_topic_name(topic), "0123456789abcdef" * 2)

    assert len(name.encode()) <= 255
    assert log_name(name) == topic
    assert incarnation_id(name) == "0123456789ab"[: 254 - len(topic)]


def test_all_incarnations_of_a_partition_have_one_tracker() -> None:
    partitions = {markers_partition(*Source("orders", 3).of(topic_id), 16) for topic_id in ("", FORMER, NOW)}

    assert len(partitions) == 1
