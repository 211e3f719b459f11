"""SQS message ids: of SQS's characters, one for each message, and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.wire.markers import Source
from marq.wire.record_headers import record_id
from marq_worker.app.sqs.message_ids import MessageIds

IDS = MessageIds("marq.messages")
SQS_ID = re.compile(r"[A-Za-z0-9_-]{1,80}", re.ASCII)
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
        ("marq.messages/0/0", "0-0"),
        ("marq.messages/31/123456789", "31-123456789"),
        ("orders/3/17", "mb3JkZXJzLzMvMTc"),
        ("marq.messages/03/17", "mbWFycS5tZXNzYWdlcy8wMy8xNw"),
        ("marq.messages/3-17", "mbWFycS5tZXNzYWdlcy8zLTE3"),
        ("x" * 59, "m" + "eHh4" * 19 + "eHg"),
        # printf %060d 0 | sha256sum
        ("0" * 60, "heb3e68a9f0448bba8e01933cf1cddf2c"),
    ],
)
def test_ids_have_one_of_three_forms(marq_id: str, message_id: str) -> None:
    assert IDS.of(marq_id) == message_id
    assert len(message_id) <= 80


@given(ANY_IDS)
def test_every_id_is_one_that_sqs_allows_and_comes_back_if_it_fits(marq_id: str) -> None:
    message_id = IDS.of(marq_id)

    assert SQS_ID.fullmatch(message_id)
    assert IDS.marq_id(message_id) == (None if message_id.startswith("h") else marq_id)
    assert message_id.startswith("h") is (len(marq_id.encode()) > 59 and not message_id[0].isdigit())


@given(ANY_IDS, ANY_IDS)
def test_two_messages_have_two_ids(one: str, other: str) -> None:
    assert (IDS.of(one) == IDS.of(other)) is (one == other)


@given(st.text() | st.from_regex(SQS_ID, fullmatch=True) | st.from_regex(r"m[A-Za-z0-9_-]{1,60}", fullmatch=True))
def test_no_other_text_stands_for_a_message(message_id: str) -> None:
    marq_id = IDS.marq_id(message_id)

    assert marq_id is None or IDS.of(marq_id) == message_id


@pytest.mark.parametrize(
    "message_id",
    ["", "m", "0/0", "00-1", "1-01", "-1", "1-", "1-2-3", "\u0661-1", "m=", "mA", "m//8", "m_-8", "h0", "0-1\n"],
)
def test_texts_that_resemble_an_id_are_not_one(message_id: str) -> None:
    assert IDS.marq_id(message_id) is None


def test_an_id_of_another_namespace_is_not_that_of_its_messages_topic() -> None:
    assert MessageIds("shop.messages").of("marq.messages/3/17") != IDS.of("marq.messages/3/17")
    assert MessageIds("shop.messages").marq_id("3-17") == "shop.messages/3/17"
