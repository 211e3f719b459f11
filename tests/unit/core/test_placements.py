"""Which partitions a queue lives on, and the steps of its placement."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from marq.settings.definitions import Definitions, placement_key
from marq.settings.placements import EVERYWHERE, GRACE_S, SENT_S, SYNCED_S, Placement, subset, union
from marq.settings.queue import QueueSettings, check_document, queue_settings
from marq.wire.errors import ConfigError

QUEUES = [f"queue-{number}" for number in range(2_000)]


@pytest.mark.parametrize(
    ("queue", "partitions", "wanted", "found"),
    [
        ("emails", 16, 1, (10,)),
        ("emails", 16, 2, (10, 15)),
        ("emails", 16, 4, (1, 2, 10, 15)),
        ("größe", 8, 3, (3, 4, 5)),
        ("emails", 4, 4, None),
        ("emails", 4, 9, None),
        ("emails", 4, None, None),
    ],
)
def test_the_partitions_of_a_queue_are_the_same_everywhere(
    queue: str, partitions: int, wanted: int | None, found: tuple[int, ...] | None
) -> None:
    assert subset(queue, partitions, wanted) == found


def test_queues_are_spread_evenly() -> None:
    counts = Counter(partition for queue in QUEUES for partition in subset(queue, 16, 2) or ())

    assert len(counts) == 16
    assert sum(counts.values()) == 2 * len(QUEUES)
    # 250 in each, with a standard deviation of 15.
    assert 190 < min(counts.values()) <= max(counts.values()) < 310


def test_more_partitions_include_the_previous_ones() -> None:
    for queue in QUEUES[:100]:
        for narrow, wide in pairwise(subset(queue, 32, count) or () for count in range(1, 32)):
            assert set(narrow) < set(wide)


def test_a_topic_that_grows_moves_few_queues_and_only_to_new_partitions() -> None:
    moved = 0
    for queue in QUEUES:
        before, after = subset(queue, 16, 2), subset(queue, 20, 2)
        assert before is not None
        assert after is not None
        assert set(after) - set(before) <= {16, 17, 18, 19}
        moved += before != after

    # Each of two partitions has a chance of one in five.
    assert moved < 0.45 * len(QUEUES)


def test_two_queues_seldom_share_all_of_their_partitions() -> None:
    pairs = Counter(subset(queue, 16, 2) for queue in QUEUES)

    assert len(pairs) == 16 * 15 / 2


def test_all_partitions_and_some_are_all() -> None:
    assert union([(1, 2), None]) is None
    assert union([(4, 2), (3, 2)]) == (2, 3, 4)
    assert union([]) == ()


def test_senders_use_a_placement_for_less_than_the_grace_period() -> None:
    assert SYNCED_S < SENT_S < GRACE_S


# --- placements -------------------------------------------------------------------------------------------------------


def test_a_queue_that_moves_is_read_wherever_it_was_until_that_is_drained() -> None:
    narrow = EVERYWHERE.moved((1,))
    assert (narrow.sends, narrow.reads, narrow.settled) == ((1,), None, False)
    assert narrow.former(4) == [0, 2, 3]

    ended = narrow.ended({0: 10, 2: 0, 3: 7})
    assert ended.ends == {0: 10, 2: 0, 3: 7}

    drained = ended.drained()
    assert drained == Placement((1,), (1,))
    assert drained.settled
    assert drained.former(4) == []


def test_several_moves_in_a_row_are_read_everywhere_and_ends_are_looked_up_again() -> None:
    first = Placement((1,), (1,)).moved((1, 3)).moved((3,))
    assert first == Placement((3,), (1, 3))
    assert first.former(8) == [1]

    again = first.ended({1: 5}).moved((1,))
    assert again == Placement((1,), (1, 3))
    assert again.ends is None

    wide = again.moved(None)
    assert wide == EVERYWHERE
    assert wide.settled


def test_partitions_that_a_topic_does_not_have_are_not_waited_for() -> None:
    assert Placement((1,), (1, 3, 9)).former(4) == [3]


@pytest.mark.parametrize(
    "placement",
    [
        EVERYWHERE.moved((0, 9)),
        Placement((3,), (1, 3)).ended({1: 2**40}),
        Placement((3,), (3,)),
        Placement((0, 1), None, None, "all"),
        Placement((2,), (1, 2), {1: 5}, 1),
    ],
)
def test_a_placement_can_be_read_again(placement: Placement) -> None:
    assert Placement.read(json.loads(json.dumps(placement.document()))) == placement


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "expected a table"),
        ({"sends": [1], "reads": [2]}, "not read"),
        ({"sends": None, "reads": [2]}, "not read"),
        ({"sends": [], "reads": None}, "sends: expected a list of partitions"),
        ({"sends": [True], "reads": None}, "sends: expected a list of partitions"),
        ({"sends": [-1], "reads": None}, "sends: expected a list of partitions"),
        ({"sends": [1], "reads": "all"}, "reads: expected a list of partitions"),
        ({"sends": [1], "reads": None, "ends": [3]}, "ends: expected a table"),
        ({"sends": [1], "reads": None, "ends": {"x": 3}}, "ends: expected a table"),
        ({"sends": None, "reads": None, "fixed": "few"}, "fixed: expected a number"),
        ({"sends": None, "reads": None, "fixed": True}, "fixed: expected"),
        ({"sends": None, "reads": None, "fixed": 2}, "must be named in sends"),
    ],
)
def test_a_placement_that_would_lose_messages_or_is_none_is_refused(document: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Placement.read(document)


def test_definitions_have_the_placements_and_tell_when_one_has_changed() -> None:
    definitions = Definitions()
    assert definitions.placement("emails") is EVERYWHERE
    assert definitions.placed() == []

    definitions.fold(b"file:reports", {"partitions": 3})
    definitions.fold(b"file:others", {"lease": 3})
    assert definitions.fold(placement_key("emails"), {"sends": [1], "reads": None}) == "emails"
    assert definitions.placement("emails") == Placement((1,), None)
    assert definitions.placed() == ["emails", "reports"]
    assert definitions.names() == ["others", "reports"]
    assert (definitions.moves, definitions.moved("emails"), definitions.moved("reports")) == (1, 1, 0)

    with pytest.raises(ConfigError, match="the record 'placement:emails': reads: expected"):
        definitions.fold(placement_key("emails"), {"sends": [1], "reads": 7})
    assert definitions.placement("emails") == Placement((1,), None)

    definitions.fold(placement_key("emails"), None)
    assert definitions.placement("emails") == EVERYWHERE
    assert (definitions.placed(), definitions.moves, definitions.moved("emails")) == (["reports"], 2, 2)


# --- the setting ------------------------------------------------------------------------------------------------------


def test_partitions_is_a_number_or_all() -> None:
    assert queue_settings().partitions is None
    assert queue_settings(check_document({"partitions": 2}, "here")).partitions == 2
    assert queue_settings({"partitions": 2}, check_document({"partitions": "all"}, "here")).partitions is None


# --- ordered queues ---------------------------------------------------------------------------------------------------

ORDERED, ORDERED_ON_2 = QueueSettings(ordering="key"), QueueSettings(ordering="key", partitions=2)


def test_an_ordered_queue_names_all_partitions_and_keeps_them_when_the_topic_grows() -> None:
    first = EVERYWHERE.following("orders", 4, ORDERED)

    assert first == Placement((0, 1, 2, 3), None, None, "all")
    assert first.following("orders", 6, ORDERED) is None
    assert first.ended({}).drained().following("orders", 6, ORDERED) is None
    few = EVERYWHERE.following("orders", 4, ORDERED_ON_2)
    assert few == Placement(subset("orders", 4, 2), None, None, 2)
    assert few.following("orders", 40, ORDERED_ON_2) is None


def test_an_ordered_queue_that_wants_more_partitions_than_there_are_keeps_what_it_has() -> None:
    wide = QueueSettings(ordering="key", partitions=6)

    placement = EVERYWHERE.following("orders", 4, wide)

    assert placement == Placement((0, 1, 2, 3), None, None, 6)
    assert placement.following("orders", 8, wide) is None


def test_an_ordered_queue_moves_with_its_setting_and_with_a_topic_that_has_become_smaller() -> None:
    placement = Placement((0, 1, 2, 3), (0, 1, 2, 3), None, "all")
    few = subset("orders", 4, 2)

    assert placement.following("orders", 4, ORDERED_ON_2) == Placement(few, (0, 1, 2, 3), None, 2)
    assert placement.following("orders", 3, ORDERED) == Placement((0, 1, 2), (0, 1, 2, 3), None, "all")
    assert placement.following("orders", 4, QueueSettings()) == EVERYWHERE
    assert Placement(few, few, None, 2).following("orders", 4, QueueSettings(partitions=2)) == Placement(few, few)


def test_keys_are_sent_by_a_fixed_placement_that_does_not_move() -> None:
    first = EVERYWHERE.following("orders", 4, ORDERED)
    assert first is not None
    moving = first.drained().moved((0, 1), 2)

    assert not EVERYWHERE.takes_keys
    assert not Placement((0, 1), (0, 1)).takes_keys
    # Nothing with a key was sent before.
    assert first.takes_keys
    assert first.drained().takes_keys
    assert [placement.takes_keys for placement in (moving, moving.ended({2: 7, 3: 0}), moving.ended({}).drained())] == [
        False, False, True,
    ]  # fmt: skip


def test_an_ordered_queue_needs_a_placement() -> None:
    definitions = Definitions()
    definitions.fold(b"file:orders", {"ordering": "key"})
    definitions.fold(b"file:emails", {})

    assert definitions.placed() == ["orders"]
