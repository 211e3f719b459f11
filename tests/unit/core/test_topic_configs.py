from __future__ import annotations

import pytest

from marq.settings.topic_configs import Rule, TopicFacts, broken_rules, plans, rules, wrong_partitions
from marq.wire.names import ENVELOPE_ROOM_BYTES, Names

NAMES = Names("shop")
LIMIT = 1_000_000


def as_planned() -> dict[str, TopicFacts]:
    """All topics as we would make them, with the broker's defaults for what we do not say."""
    made = plans(NAMES, LIMIT, partitions=4, markers_partitions=2, markers_retention_ms=3_600_000)
    defaults = {"cleanup.policy": "delete", "max.message.bytes": str(LIMIT), "message.timestamp.type": "CreateTime"}
    return {name: TopicFacts(plan.partitions, {**defaults, **plan.config}) for name, plan in made.items()}


def test_topics_that_are_made_by_the_plan_keep_all_rules() -> None:
    assert broken_rules(rules(NAMES, LIMIT, changelog=True), as_planned()) == []
    assert wrong_partitions(NAMES, as_planned()) == []


def test_the_topics_that_carry_a_message_and_more_have_room_for_it() -> None:
    made = plans(NAMES, LIMIT, partitions=4, markers_partitions=2, markers_retention_ms=3_600_000)

    for name in (NAMES.markers, NAMES.dead_letters, NAMES.changelog):
        assert made[name].config["max.message.bytes"] == str(LIMIT + ENVELOPE_ROOM_BYTES)


def test_a_broken_rule_says_what_is_needed() -> None:
    found = as_planned()
    found[NAMES.markers] = TopicFacts(2, {**found[NAMES.markers].config, "max.message.bytes": "1000"})

    [broken] = broken_rules(rules(NAMES, LIMIT, changelog=True), found)

    assert str(broken) == "topic shop.markers: max.message.bytes is 1000, but marq needs 1065536 or more"


@pytest.mark.parametrize(
    ("setting", "value", "fits"),
    [
        ("max.message.bytes", "10", True),
        ("max.message.bytes", "11", True),
        ("max.message.bytes", "9", False),
        ("max.message.bytes", "", False),
        ("max.message.bytes", "-1", False),
        ("delete.retention.ms", "-1", True),
        ("retention.ms", "-1", True),
    ],
)
def test_a_number_may_be_larger_and_a_retention_without_end(setting: str, value: str, fits: bool) -> None:
    assert Rule("topic", setting, "10", at_least=True).fits(value) is fits


def test_wrong_partition_counts_are_named() -> None:
    found = as_planned()
    found[NAMES.queues] = TopicFacts(3, {})
    found[NAMES.changelog] = TopicFacts(5, {})

    queues, changelog = wrong_partitions(NAMES, found)

    assert "shop.queues has 3 partitions, but marq needs 1" in queues
    assert "shop-app-leases-changelog has 5 partitions and shop.markers has 2" in changelog


def test_topics_that_are_missing_break_no_rule() -> None:
    assert broken_rules(rules(NAMES, LIMIT, changelog=True), {}) == []
    assert wrong_partitions(NAMES, {}) == []
