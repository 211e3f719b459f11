"""Which record belongs to which queue."""

from __future__ import annotations

import pytest

from marq.kafka.queue_records import Serving, serving
from marq.kafka.records import Records
from marq.wire.markers import Source
from tests.unit.client.fakes import FakeRecord

SHARED, OWN = Source("m", 0), Source("orders", 1)


def records(*keys: bytes | None) -> Records:
    return Records.of([FakeRecord(offset, key) for offset, key in enumerate(keys)])


def offsets(found: Serving, source: Source, read: Records) -> dict[str, list[int]]:
    return {queue: [record.offset for record in own] for queue, own in found.own(source, read)}


@pytest.fixture
def served() -> Serving:
    return serving("m", ["b", "a", "orders"], {"orders": "orders", "a": None})


def test_all_topics_are_read_and_each_once(served: Serving) -> None:
    assert served.topics == ["m", "orders"]
    assert served.queues == ("a", "b", "orders")


def test_in_the_shared_topic_the_key_decides(served: Serving) -> None:
    read = records(b"a", b"x", None, b"b", b"a", b"orders")

    assert offsets(served, SHARED, read) == {"a": [0, 4], "b": [3], "orders": [5]}
    assert served.count(SHARED, read) == 4


def test_in_its_own_topic_every_record_belongs_to_the_queue(served: Serving) -> None:
    read = records(b"a", None, b"customer")

    assert offsets(served, OWN, read) == {"orders": [0, 1, 2]}
    assert served.count(OWN, read) == 3
    assert served.end(OWN, read, 2) == 2


DEAD_LETTER = [
    ("tenant", b"x"),
    ("marq-deliver-at", b"1"),
    ("marq-type", b"welcome"),
    ("marq-ordering-key", b"customer"),
    ("marq-id", b"orders/0/7"),
    ("marq-attempt", b"5"),
    ("marq-key", b"customer"),
    ("marq-dead-lettered-at", b"9"),
]
REDELIVERY = DEAD_LETTER[:-1]


@pytest.mark.parametrize(
    ("source", "headers", "kept"),
    [
        (OWN, DEAD_LETTER, ["tenant", "marq-deliver-at", "marq-type", "marq-ordering-key"]),
        (OWN, REDELIVERY, ["tenant", "marq-deliver-at", "marq-type", "marq-ordering-key"]),
        (OWN, [("marq-attempt", b"5")], []),
        (SHARED, DEAD_LETTER, ["tenant", "marq-deliver-at", "marq-type", "marq-ordering-key", "marq-key"]),
        (SHARED, REDELIVERY, [name for name, _ in REDELIVERY]),
        (SHARED, [("marq-attempt", b"5")], ["marq-attempt"]),
    ],
)
def test_a_copied_record_loses_the_headers_of_the_record_that_it_was_copied_from(
    served: Serving, source: Source, headers: list[tuple[str, bytes | None]], kept: list[str]
) -> None:
    plain = FakeRecord(1, b"orders", headers=[("marq-deliver-at", b"2")])
    read = Records.of([FakeRecord(0, b"orders", headers=headers), plain])

    [(queue, own)] = served.own(source, read)

    assert queue == "orders"
    assert [[name for name, _ in row.headers] for row in own] == [kept, ["marq-deliver-at"]]


def test_room_ends_before_the_first_record_of_ours_that_has_none(served: Serving) -> None:
    read = records(b"x", b"a", b"x", b"b", b"x", b"a", b"x")

    assert served.end(SHARED, read, 0) == 1
    assert served.end(SHARED, read, 2) == 5
    assert served.end(SHARED, read, 3) == 7


@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_few_and_many_queues_get_the_same(count: int) -> None:
    names = [f"q{number:02}" for number in range(count)]
    read = records(*[names[number % count].encode() if number % 3 else b"other" for number in range(300)])

    found = offsets(serving("m", names, {}), SHARED, read)

    assert {queue: own for queue, own in found.items() if own} == {
        queue: own for queue in names if (own := [record.offset for record in read if record.key == queue.encode()])
    }


def test_a_record_without_queue_is_known_as_such(served: Serving) -> None:
    assert served.queue_of("m", b"x") is None
    assert served.queue_of("m", b"a") == "a"
    assert served.queue_of("orders", b"x") == "orders"
    # Without a key: one that was taken away, since its queue has had the record.
    assert served.queue_of("m", None) is None
