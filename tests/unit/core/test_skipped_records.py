"""Which records of a queue are skipped, as the queues topic says it and as consumers pass them over."""

from __future__ import annotations

import json

import pytest

from marq.consumer.acquire import unskipped
from marq.kafka.records import Records
from marq.queues.subscription_start import start_document
from marq.settings.definitions import Definitions, purge_key, start_key
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import ConfigError
from marq.wire.markers import Source

P0, P1 = Source("marq.messages", 0), Source("marq.messages", 1)
PURGE = SkippedRecords(5_000, {P0: 10, P1: 3}, in_flight={P0: 4})


def records(*offsets: int, at_ms: int = 1_000) -> Records:
    count = len(offsets)
    return Records(list(offsets), [at_ms] * count, [b"q"] * count, [b"v"] * count)


def test_a_purge_is_read_as_it_was_written() -> None:
    definitions = Definitions()

    assert definitions.fold(purge_key("emails"), json.loads(json.dumps(PURGE.document()))) == "emails"

    assert definitions.purge("emails") == PURGE
    # A purge does not define the queue: it keeps the defaults and is not listed by name.
    assert definitions.names() == []
    assert definitions.after({}).purge("emails") == PURGE
    definitions.fold(purge_key("emails"), None)
    assert definitions.purge("emails") is None


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"until_ms": -1},
        {"until_ms": True},
        {"until_ms": 1, "ends": []},
        {"until_ms": 1, "ends": {"topic": 1}},
        {"until_ms": 1, "ends": {"topic/x": 1}},
        {"until_ms": 1, "ends": {"topic/1": "2"}},
    ],
)
def test_one_that_can_t_be_read_changes_nothing(document: object) -> None:
    definitions = Definitions()
    definitions.fold(purge_key("emails"), PURGE.document())

    with pytest.raises(ConfigError, match="the record 'purge:emails'"):
        definitions.fold(purge_key("emails"), document)  # type: ignore[arg-type]

    assert definitions.purge("emails") == PURGE


def test_a_second_purge_skips_also_the_records_of_the_first_one() -> None:
    again = SkippedRecords(9_000, {P0: 20, P1: 2}, in_flight={P1: 2}).after(PURGE, {P0: 20, P1: 9})

    assert (again.until_ms, again.ends, again.in_flight) == (9_000, {P0: 20, P1: 3}, {P0: 4, P1: 2})


def test_a_purge_keeps_the_purged_records_of_a_queue_s_former_topics() -> None:
    """The queue may return to them."""
    former, topic = Source("shop-orders", 0), Source("shop-orders-2", 0)
    purge = SkippedRecords(9_000, {topic: 50}).after(SkippedRecords(5_000, {former: 100}), {topic: 50})

    for again in (purge, SkippedRecords.read(json.loads(json.dumps(purge.document())))):
        assert again.ends == {former: 100, topic: 50}
        assert [again.until_of(source) for source in (former, topic)] == [5_000, 9_000]
    third = SkippedRecords(12_000, {topic: 60}).after(purge, {topic: 60})
    assert [third.until_of(source) for source in (former, topic)] == [5_000, 12_000]


def test_a_purge_of_a_recreated_topic_does_not_skip_up_to_the_end_of_a_purge_of_the_former_one() -> None:
    former = SkippedRecords(5_000, {P0: 1_000}, in_flight={P0: 1_000})

    again = SkippedRecords(9_000, {P0: 3}).after(former, {P0: 5})

    assert (again.ends, again.in_flight) == ({P0: 3}, {})
    assert again.left(P0, 5, 8_000)


def test_records_before_the_end_are_passed_over_and_do_not_count_as_known() -> None:
    left, known_to = unskipped(PURGE, P0, records(4, 9, 10, 12))

    assert list(left.offsets) == [10, 12]
    assert known_to == 10
    assert unskipped(PURGE, P0, records(4, 9))[1] == 10
    assert not len(unskipped(PURGE, P0, records(4, 9))[0])


def test_what_comes_after_it_is_as_ever() -> None:
    own = records(10, 12)

    assert unskipped(PURGE, P0, own) == (own, 0)
    assert unskipped(None, P0, own) == (own, 0)
    assert unskipped(PURGE, Source("other", 0), own) == (own, 0)


def test_a_recreated_topic_starts_at_0_and_loses_nothing() -> None:
    own = records(0, 1, at_ms=5_001)

    left, known_to = unskipped(PURGE, P0, own)

    assert list(left.offsets) == [0, 1]
    assert known_to == 0


def test_a_purge_of_a_recreated_topic_does_not_skip_up_to_the_start_of_the_queue_in_the_former_one() -> None:
    topic = Source("shop-orders", 0)
    definitions = Definitions()
    definitions.fold(start_key("audit"), SkippedRecords(5_000, {topic: 1_000}).document())
    definitions.fold(purge_key("audit"), SkippedRecords(9_000, {topic: 20}).document())

    skipped = definitions.skipped("audit")

    assert skipped is not None
    assert [skipped.left(topic, offset, 8_000) for offset in (19, 20)] == [False, True]


def test_a_purge_and_a_start_skip_no_record_that_is_newer_than_theirs() -> None:
    topic = Source("shop-orders", 0)
    definitions = Definitions()
    definitions.fold(purge_key("audit"), SkippedRecords(5_000, {P0: 20}).document())
    definitions.fold(start_key("audit"), SkippedRecords(9_000, {topic: 10}).document())

    skipped = definitions.skipped("audit")

    assert skipped is not None
    assert [skipped.left(P0, 15, sent_ms) for sent_ms in (5_000, 5_001)] == [False, True]
    assert [skipped.left(topic, 5, sent_ms) for sent_ms in (9_000, 9_001)] == [False, True]


def test_a_purge_still_counts_after_its_queue_has_started_in_another_topic() -> None:
    former, topic = Source("shop-orders", 0), Source("shop-orders-2", 0)
    definitions = Definitions()
    definitions.fold(start_key("audit"), start_document("shop-orders", {former: 10}, 1_000))
    definitions.fold(purge_key("audit"), SkippedRecords(5_000_000, {former: 100}).document())
    begin = definitions.begin("audit")
    definitions.fold(start_key("audit"), start_document("shop-orders-2", {topic: 50}, 9_000, begin))

    skipped = definitions.skipped("audit")

    assert skipped is not None
    assert skipped.ends == {former: 100, topic: 50}
    assert [skipped.until_of(source) for source in (former, topic)] == [5_000_000, 9_600_000]


def test_a_start_keeps_the_highest_timestamp_of_the_former_topic() -> None:
    former, topic = Source("shop-orders", 0), Source("shop-orders-2", 0)
    definitions = Definitions()
    start = SkippedRecords(5_000, {former: 10})
    definitions.fold(start_key("audit"), start.document())
    later = SkippedRecords(9_000, {topic: 20}).along_with(start).document()
    definitions.fold(start_key("audit"), json.loads(json.dumps(later)))

    begin = definitions.begin("audit")

    assert begin is not None
    assert [begin.until_of(source) for source in (former, topic)] == [5_000, 9_000]
    compacted = Definitions()
    compacted.fold(start_key("audit"), later)
    assert compacted.begin("audit") == begin
