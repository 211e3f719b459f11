"""Names of topics and rules for queue names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.wire.errors import ConfigError
from marq.wire.names import (
    MAX_QUEUE_NAME_BYTES,
    Names,
    check_group_name,
    check_queue_name,
    check_topic_name,
    markers_partition,
    schedule_topic,
    synthetic_topic,
)


def test_the_default_names_are_those_of_the_design() -> None:
    names = Names()

    assert names.messages == "marq.messages"
    assert names.markers == "marq.markers"
    assert names.dead_letters == "marq.dead-letters"
    assert names.quarantine == "marq.quarantine"
    assert names.queues == "marq.queues"
    assert names.app_id == "marq-app"
    assert names.changelog == "marq-app-leases-changelog"
    assert names.group("emails") == "marq.queue.emails"
    assert names.named_group("background") == "marq.group.background"
    assert names.transactional_id(3) == "marq-tracker-3"
    assert names.start_id("marq.queue.emails", "a:b") == "marq-start-a%3Ab:marq.queue.emails"


def test_a_prefix_keeps_namespaces_apart() -> None:
    one, other = Names("one"), Names("other")

    for name in ("messages", "markers", "dead_letters", "quarantine", "queues", "app_id", "changelog"):
        assert getattr(one, name) != getattr(other, name)
    assert one.transactional_id(0) != other.transactional_id(0)
    assert one.group("q") != other.group("q")
    assert one.named_group("g") != other.named_group("g")


def test_records_have_keys_of_their_senders_in_topics_of_other_programs_only() -> None:
    names = Names("shop")

    assert names.is_senders_topic("shop.orders")
    assert not names.is_senders_topic("shop.messages")
    assert not names.is_senders_topic("shop.dead-letters")
    assert not names.is_senders_topic(synthetic_topic(7))
    assert not names.is_senders_topic(schedule_topic("nightly", "0123456789ab"))


def test_the_namespaces_own_topics_are_known() -> None:
    names = Names("shop")

    assert names.is_own_topic("shop.messages")
    assert names.is_own_topic("shop-app-leases-changelog")
    assert not names.is_own_topic("shop.orders")


@pytest.mark.parametrize("prefix", ["", "a b", "ü", "a/b", "x" * 101, "a\n"])
def test_a_prefix_that_can_be_no_part_of_a_topics_name_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^prefix="):
        Names(prefix)


@pytest.mark.parametrize("name", ["emails", "ünï", "a b", "x" * MAX_QUEUE_NAME_BYTES, "队列", "a/b:c"])
def test_a_readable_name_is_taken_as_it_is(name: str) -> None:
    assert check_queue_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        (None, "not NoneType"),
        (b"emails", "not bytes"),
        (7, "not int"),
        ("x" * (MAX_QUEUE_NAME_BYTES + 1), "201 bytes"),
        ("ü" * 101, "202 bytes"),
        ("a\nb", "unprintable characters"),
        ("\0", "unprintable characters"),
        ("a\u200bb", "unprintable characters"),
        ("\ud800", "UTF-8"),
    ],
)
def test_any_other_name_is_refused_with_the_reason(name: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_queue_name(name)


def test_a_group_is_named_by_the_rule_for_queues() -> None:
    assert check_group_name("back ground") == "back ground"
    with pytest.raises(ConfigError, match="a group's name must not be empty"):
        check_group_name("")
    with pytest.raises(ConfigError, match=r"group .*unprintable characters"):
        check_group_name("a\nb")


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ü", "x" * 250, None, "a\n"])
def test_a_topics_name_is_one_that_kafka_allows(name: object) -> None:
    assert check_topic_name("shop.orders_1-x") == "shop.orders_1-x"
    with pytest.raises(ConfigError, match="expected the name of a topic"):
        check_topic_name(name)


@given(st.text(max_size=30), st.integers(0, 1_000), st.integers(1, 100))
def test_the_markers_of_a_partition_stay_together_and_neighbours_spread(topic: str, partition: int, count: int) -> None:
    found = markers_partition(topic, partition, count)

    assert 0 <= found < count
    assert markers_partition(topic, partition + 1, count) == (found + 1) % count


def test_the_markers_partition_is_the_same_in_every_client() -> None:
    """crc32("marq.messages") is 0xbe8a419f: (0xbe8a419f + 0) mod 7 is 3."""
    assert [markers_partition("marq.messages", partition, 7) for partition in range(3)] == [3, 4, 5]
