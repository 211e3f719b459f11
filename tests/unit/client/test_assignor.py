"""The assignment of partitions in a group, from the queues that its members read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata

from marq.kafka.assignor import SpreadAssignor, decoded, encoded, holders_of, shared_out
from marq.kafka.queue_records import serving
from marq.settings.placements import Partitions

MESSAGES = "marq.messages"


class Cluster:
    def __init__(self, **counts: int) -> None:
        self._counts = {name.replace("_", "."): count for name, count in counts.items()}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        count = self._counts.get(topic)
        return None if count is None else set(range(count))


def member(reads: Partitions, *topics: str) -> ConsumerProtocolMemberMetadata:
    said = {} if reads is None else {MESSAGES: reads}
    return SpreadAssignor(lambda: said).metadata([MESSAGES, *topics])


def assigned(
    cluster: Cluster, members: Mapping[str, ConsumerProtocolMemberMetadata]
) -> dict[str, dict[str, list[int]]]:
    # As it goes over the wire.
    heard = {name: ConsumerProtocolMemberMetadata.decode(each.encode()) for name, each in members.items()}
    found = SpreadAssignor(dict).assign(cluster, heard)
    return {name: {topic: list(each) for topic, each in share.assignment} for name, share in found.items()}


def test_only_partitions_that_a_member_reads_are_assigned() -> None:
    members = {"a": member((1, 5)), "b": member((1, 5))}

    assert assigned(Cluster(marq_messages=8), members) == {"a": {MESSAGES: [1]}, "b": {MESSAGES: [5]}}


def test_members_that_differ_are_given_what_they_read_themselves() -> None:
    members = {"a": member((1, 5)), "b": member((5, 6)), "c": member((0,))}

    assert assigned(Cluster(marq_messages=8), members) == {
        "a": {MESSAGES: [1]},
        "b": {MESSAGES: [5, 6]},
        "c": {MESSAGES: [0]},
    }


def test_members_without_user_data_read_all_as_older_ones_do() -> None:
    members = {"a": member((1,)), "old": RoundRobinPartitionAssignor.metadata([MESSAGES])}

    assert assigned(Cluster(marq_messages=4), members) == {"a": {MESSAGES: [1]}, "old": {MESSAGES: [0, 2, 3]}}


def test_an_older_leader_understands_what_members_say_and_assigns_all() -> None:
    members = {"a": member((1,)), "b": member((1,))}

    found = RoundRobinPartitionAssignor.assign(Cluster(marq_messages=4), members)

    assert sorted(partition.partition for share in found.values() for partition in share.partitions()) == [0, 1, 2, 3]


def test_where_all_read_the_same_it_is_round_robin() -> None:
    cluster, members = Cluster(marq_messages=5, orders=4), {name: member(None, "orders") for name in ("a", "b", "c")}

    ours = assigned(cluster, members)

    theirs = RoundRobinPartitionAssignor.assign(cluster, members)
    assert ours == {name: {topic: list(each) for topic, each in share.assignment} for name, share in theirs.items()}


def test_a_topic_of_a_queues_own_is_read_as_a_whole() -> None:
    members = {"a": member((1,), "orders"), "b": member((1,), "orders")}

    assert assigned(Cluster(marq_messages=4, orders=2), members) == {
        "a": {MESSAGES: [1], "orders": [1]},
        "b": {"orders": [0]},
    }


def test_unknown_topics_and_partitions_are_not_assigned() -> None:
    assert assigned(Cluster(marq_messages=2), {"a": member((1, 7), "orders")}) == {"a": {MESSAGES: [1]}}


def test_each_partition_goes_to_the_one_of_its_readers_that_has_the_fewest_so_far() -> None:
    shares = shared_out({"t": range(6)}, {"a": {"t": None}, "b": {"t": (0, 1, 2)}, "c": {}})

    assert shares == {"a": {"t": [0, 2, 3, 4, 5]}, "b": {"t": [1]}, "c": {}}


def test_a_member_names_its_holders_which_older_members_pass_over() -> None:
    said = SpreadAssignor(dict, lambda: [0xA11CE, 2**64 - 1]).metadata([MESSAGES]).user_data

    assert said.startswith(b'{"partitions":{},"holders":["00000000000a11ce","ffffffffffffffff"],"pid":')
    assert holders_of(said) == {0xA11CE, 2**64 - 1}
    assert decoded(said, MESSAGES) is None
    assert decoded(encoded({MESSAGES: (3,)}, [7]), MESSAGES) == (3,)
    for other in (None, b"", b"[]", b"\xff", b'{"holders":[1]}', b'{"holders":["x"]}', b'{"holders":3}'):
        assert holders_of(other) == frozenset()


@pytest.mark.parametrize(
    "user_data", [None, b"", b"[]", b"{}", b'{"partitions":[1]}', b'{"partitions":{"t":3}}', b"\xff", b"[" * 100_000]
)
def test_what_can_not_be_read_means_all(user_data: bytes | None) -> None:
    assert decoded(user_data, "t") is None


def test_what_a_member_says_is_short() -> None:
    assert encoded({}) == b'{"partitions":{}}'
    assert encoded({"marq.messages": (3, 7)}, pid=17) == b'{"partitions":{"marq.messages":[3,7]},"pid":17}'
    assert decoded(encoded({}, pid=17), "marq.messages") is None
    assert decoded(encoded({"t": (3, 7)}), "t") == (3, 7)
    assert decoded(encoded({"t": (3, 7)}), "other") is None


def test_a_group_reads_where_any_of_its_queues_is() -> None:
    assert serving(MESSAGES, ["a", "b"], {}, {"a": (1,), "b": (4, 1)}).reads == {MESSAGES: (1, 4)}
    assert serving(MESSAGES, ["a", "b"], {}, {"a": (1,)}).reads == {}
    assert serving(MESSAGES, ["a"], {"a": "orders"}, {"a": (1,)}).reads == {MESSAGES: (1,)}
    assert serving(MESSAGES, [], {}).reads == {}
