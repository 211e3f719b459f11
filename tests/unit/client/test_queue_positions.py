"""How far each queue of a shared read is."""

import pytest

from marq.kafka.queue_positions import MAX_METADATA_BYTES, OffsetSnapshot, Positions, committed_by, fits, is_older
from marq.wire.errors import ConfigError


def test_without_a_commit_no_queue_has_had_anything() -> None:
    positions = Positions.decode(None, "")

    assert positions.start(["emails"], log_start=7) == 7
    assert not positions.has_received("emails", 7)


@pytest.mark.parametrize("metadata", ["", "x", "[]", "{}", '{"at":1,"past":{}}', '{"at":[],"past":{"a":"x"}}'])
def test_metadata_of_another_writer_makes_no_queue_miss_a_record(metadata: str) -> None:
    positions = Positions.decode(50, metadata)

    assert positions.start(["emails"], log_start=0) == 0


def test_where_names_of_queues_that_left_take_too_much_room_the_oldest_is_forgotten() -> None:
    left = {f"queue-{number:0100}": number for number in range(MAX_METADATA_BYTES // 100)}
    positions = Positions({**left, "emails": 500})

    decoded = Positions.decode(500, positions.encode(500))

    assert decoded.by_queue["emails"] == 500
    assert max(left) in decoded.by_queue
    assert min(left) not in decoded.by_queue


def test_too_many_queues_for_the_metadata_are_not_committed_without_a_snapshot() -> None:
    positions = Positions(dict.fromkeys((f"queue-{n:0100}" for n in range(MAX_METADATA_BYTES // 100)), 5))

    with pytest.raises(ConfigError, match="too many"):
        positions.encode(5)


def test_as_many_queues_as_fit_into_the_metadata_keep_their_positions_while_one_of_them_catches_up() -> None:
    queues = ["late"]
    while fits(queues, MAX_METADATA_BYTES):
        queues.append(f"queue-number-{len(queues)}")
    positions = Positions(dict.fromkeys(queues[1:-1], 10**11) | {"late": 7})

    assert len(queues) > 100
    assert Positions.decode(7, positions.encode(7)) == positions


def test_a_group_whose_offset_was_set_externally_continues_there() -> None:
    assert Positions.decode(50, "", "emails").by_queue == {"emails": 50}
    assert Positions.decode(None, "", "emails").by_queue == {}


def test_a_member_that_does_not_know_a_queue_commits_nothing_for_it() -> None:
    both = Positions({"emails": 100, "reports": 100})

    after = both.advanced_to(["emails"], 200)
    read_back = Positions.decode(200, after.encode(200))

    assert read_back.by_queue == {"emails": 200, "reports": 100}
    assert read_back.newcomers(["emails", "reports"], 200) == ["reports"]
    assert read_back.start(["emails", "reports"], log_start=0) == 100
    assert both.by_queue == {"emails": 100, "reports": 100}


def test_a_commit_names_its_committer_and_means_the_same() -> None:
    positions = Positions({"emails": 100, "reports": 17})

    signed = positions.encode(100, by='worker "a" on h (process 7)')

    assert signed == '{"at":["emails"],"past":{"reports":17},"by":"worker \\"a\\" on h (process 7)"}'
    assert committed_by(signed) == 'worker "a" on h (process 7)'
    assert Positions.decode(100, signed) == positions
    assert [committed_by(text) for text in ("", "x", "[]", positions.encode(100), '{"by":3}')] == [None] * 5


def test_a_commit_that_names_a_snapshot_names_its_committer() -> None:
    snapshot = OffsetSnapshot("9f86d081884c7d65", {"emails": 0}, {})
    positions = Positions({"emails": 40}, snapshot.metadata({}, {}))

    signed = positions.encode(40, by="a")

    assert committed_by(signed) == "a"
    assert Positions.decode(40, signed, snapshots={snapshot.id: snapshot}) == positions


def test_queue_names_take_precedence_over_the_committer() -> None:
    positions = Positions({f"queue-{number:04}": 100 for number in range(300)})

    assert positions.encode(100, by="x" * 200) == positions.encode(100)


def test_a_commit_tells_up_to_where_its_writer_knew_the_definitions() -> None:
    positions = Positions({"emails": 100})

    metadata = positions.encode(100, by="a", changed_at=7)

    assert metadata == '{"at":["emails"],"past":{},"changed_at":7,"by":"a"}'
    assert Positions.decode(100, metadata) == positions
    assert not is_older(metadata, 7)
    assert is_older(metadata, 8)


@pytest.mark.parametrize("metadata", ["x", "[]", '{"at":[],"past":{}}', '{"changed_at":"x"}', '{"changed_at":null}'])
def test_a_commit_that_does_not_tell_is_older_than_any_definition(metadata: str) -> None:
    assert is_older(metadata, 0)


def test_an_offset_that_an_operator_has_set_is_not_questioned() -> None:
    assert not is_older("", 7)


def test_a_queue_with_ordering_that_another_group_has_read_further_is_still_known_as_one() -> None:
    theirs = Positions().advanced_to(("orders", "sms"), 40, {"orders": 17})
    positions = Positions({"orders": 3, "sms": 3})

    for queue in theirs.by_queue:
        positions.advance([queue], theirs.by_queue[queue], theirs.behind)

    assert positions.by_queue == {"orders": 17, "sms": 40}
    read = Positions.decode(20, positions.encode(20))
    assert (set(read.behind), read.by_queue) == ({"orders"}, {"orders": 17, "sms": 40})
