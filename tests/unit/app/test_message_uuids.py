"""SQS message ids: UUIDs, one for each message."""

from __future__ import annotations

from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.wire.markers import Source
from marq.wire.record_headers import record_id
from marq_worker.message_uuids import MessageIds, readable_id

IDS = MessageIds("marq.messages", "topic-1")
TOPICS = st.sampled_from(["marq.messages", "marq.messages2", "orders", "~0f3a", "~schedule/daily/ab12", "t" * 249])
RECORD_IDS = st.builds(
    lambda topic, partition, offset: record_id(Source(topic, partition), offset),
    TOPICS,
    st.integers(0, 2**31),
    st.integers(0, 2**62),
)
#: Any producer may write the header of a redelivery, so an id may be any text.
ANY_IDS = RECORD_IDS | st.text(min_size=1) | st.text(min_size=1).map("marq.messages/{}".format)


@pytest.mark.parametrize(
    ("marq_id", "message_id"),
    [
        # printf marq.messages/topic-1 | sha256sum
        ("marq.messages/0/0", "00000000-d25d-88e7-8000-000000000000"),
        ("marq.messages/31/123456789", "0000001f-d25d-88e7-8000-0000075bcd15"),
        ("marq.messages/4294967295/1152921504606846975", "ffffffff-d25d-88e7-8fff-ffffffffffff"),
    ],
)
def test_the_id_of_a_message_in_the_messages_topic_shows_where_it_is(marq_id: str, message_id: str) -> None:
    assert IDS.of(marq_id) == message_id


@given(ANY_IDS)
def test_every_id_is_a_uuid_in_its_canonical_form(marq_id: str) -> None:
    message_id = IDS.of(marq_id)
    read = UUID(message_id)

    assert str(read) == message_id
    assert read.variant == RFC_4122
    assert read.version in (5, 8)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**60 - 1))
def test_partition_and_offset_can_be_read_from_an_id(partition: int, offset: int) -> None:
    digits = IDS.of(f"marq.messages/{partition}/{offset}").replace("-", "")

    assert (int(digits[:8], 16), int(digits[-15:], 16)) == (partition, offset)


@given(ANY_IDS, ANY_IDS)
def test_two_messages_have_two_ids(one: str, other: str) -> None:
    assert (IDS.of(one) == IDS.of(other)) is (one == other)


@pytest.mark.parametrize(
    "marq_id",
    [
        "orders/3/17", "~0f3a/3/17", "marq.messages/03/17", "marq.messages/3-17", "marq.messages/3/17/1",
        "marq.messages/\u0663/17", "marq.messages/3/17\n", f"marq.messages/3/{2**60}", f"marq.messages/{2**32}/17",
    ],
)  # fmt: skip
def test_an_id_that_is_not_of_the_messages_topic_is_hashed(marq_id: str) -> None:
    assert UUID(IDS.of(marq_id)).version == 5


@pytest.mark.parametrize(("topic", "topic_id"), [("shop.messages", "topic-1"), ("marq.messages", "topic-2")])
def test_other_namespaces_and_recreated_topics_have_other_ids(topic: str, topic_id: str) -> None:
    other = MessageIds(topic, topic_id)

    assert other.of(f"{topic}/3/17") != IDS.of("marq.messages/3/17")
    assert other.of("~0f3a/3/17") != IDS.of("~0f3a/3/17")


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**60 - 1))
def test_a_page_finds_a_message_of_the_messages_topic_by_its_uuid(partition: int, offset: int) -> None:
    marq_id = f"marq.messages/{partition}/{offset}"

    assert readable_id(IDS.of(marq_id).upper(), "marq.messages") == marq_id


@pytest.mark.parametrize("identity", ["", "marq.messages/0/1", IDS.of("~0f3a/0/1"), "0-17"])
def test_any_other_id_stays_as_it_is(identity: str) -> None:
    assert readable_id(identity, "marq.messages") == identity
