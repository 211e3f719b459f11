"""What is judged of groups and of what they have to read, from facts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from app.checkup.findings import Finding, Level
from app.checkup.members import Page, behind, judge_pages
from app.checkup.reading import Place, Reader, judge_partitions, judge_reading, judge_retention, suspected
from marq.core.definitions import Definitions
from marq.core.markers import Source
from marq.core.topic_rules import TopicFacts
from marq.inspector import Waiting
from marq.settings import ClientSettings

CLIENT = ClientSettings.read("kafka:9092", {"prefix": "shop", "partitions": 4}, environment={})
NAMES = CLIENT.names
P0, P1 = Source("shop.messages", 0), Source("shop.messages", 1)
EMAILS = NAMES.group("emails")


def definitions(**queues: Mapping[str, Any]) -> Definitions:
    found = Definitions()
    for queue, document in queues.items():
        found.fold(f"file:{queue}".encode(), document)
    return found


def judged(first: Reader, second: Reader | None = None, waits: int = 1, **queues: Mapping[str, Any]) -> Finding:
    """``waits``: so many messages of emails."""
    known, looks = definitions(**queues), ([first], [second or first])
    suspects = suspected(CLIENT, known, *looks)
    [finding] = judge_reading(CLIENT, known, *looks, Waiting(Counter(dict.fromkeys(suspects, waits))), 2.0)
    return finding


def test_a_group_that_keeps_up_is_fine() -> None:
    found = judged(Reader(EMAILS, 1, {P0: Place(10, 0, 10)}))

    assert found.level is Level.OK


def test_a_group_that_does_not_move_is_named_with_its_partitions_and_queues() -> None:
    moved = Reader(EMAILS, 1, {P0: Place(3, 0, 10), P1: Place(5, 0, 10)})
    stands = Reader(EMAILS, 1, {P0: Place(3, 0, 20), P1: Place(6, 0, 10)})

    found = judged(moved, stands)

    assert found.level is Level.WARNING
    assert found.found == "it did not move for 2 s in shop.messages/0; it reads emails: 1 message waits"
    assert "handlers are slow or hang" in found.advice
    # What is behind it may be other queues', or Kafka's own.
    assert judged(moved, stands, waits=0).level is Level.OK
    # Whoever is paused need not move.
    assert judged(moved, stands, emails={"paused": True}).level is Level.OK
    # Nor does one that has just got something to read.
    assert judged(Reader(EMAILS, 1, {P0: Place(3, 0, 3)}), Reader(EMAILS, 1, {P0: Place(3, 0, 4)})).level is Level.OK


def test_handlers_that_nobody_runs_are_a_problem_even_when_nothing_waits() -> None:
    found = judged(Reader(NAMES.named_group("handlers"), 0), emails={"handler": "shop:send"})

    assert found.level is Level.PROBLEM
    assert "nobody runs the handlers of emails" in found.found
    assert found.commands == ("faust -A app worker",)


def test_a_queue_that_nobody_reads_is_a_warning_once_something_waits() -> None:
    assert judged(Reader(EMAILS, 0, {P0: Place(3, 0, 5)}), waits=0).level is Level.OK

    found = judged(Reader(EMAILS, 0, {P0: Place(3, 0, 5)}), waits=2)

    assert found.level is Level.WARNING
    assert found.found == "nobody reads emails; 2 messages wait"


def test_what_retention_took_before_it_was_read_is_a_problem() -> None:
    found = judged(Reader(EMAILS, 1, {P0: Place(3, 10, 10)}))

    assert found.level is Level.PROBLEM
    assert "has removed 7 records that it had not read" in found.found
    assert "--topic" in found.commands[0] or "shop.messages" in found.commands[0]


def test_the_former_group_of_a_queue_that_moved_is_nobodys_concern() -> None:
    assert judged(Reader(EMAILS, 0, {P0: Place(3, 10, 20)}), emails={"group": "background"}).level is Level.OK


def topics(partitions: int, **config: str) -> dict[str, TopicFacts]:
    return {NAMES.messages: TopicFacts(partitions, {name.replace("_", "."): value for name, value in config.items()})}


def test_fewer_partitions_than_settings_ask_for() -> None:
    assert judge_partitions(CLIENT, definitions(), topics(4)) == []
    assert judge_partitions(CLIENT, definitions(), topics(8)) == []

    [found] = judge_partitions(CLIENT, definitions(), topics(2))

    assert found.found == "it has 2 partitions, and MARQ_PARTITIONS is 4"
    assert found.commands == (
        "kafka-topics.sh --bootstrap-server kafka:9092 --alter --topic shop.messages --partitions 4",
    )


def test_a_spread_over_more_partitions_than_there_are() -> None:
    [found] = judge_partitions(CLIENT, definitions(emails={"spread": 6}), topics(4))

    assert (found.subject, found.expected) == ("queue emails", "at most 4")


def test_messages_that_are_kept_for_less_than_a_queue_has_them_wait() -> None:
    queues = definitions(emails={"delay": 120}, quick={"lease": 1})
    assert judge_retention(CLIENT, queues, topics(4, retention_ms="-1")) == []
    assert judge_retention(CLIENT, queues, topics(4, retention_ms="120000")) == []
    assert judge_retention(CLIENT, queues, {}) == []

    [found] = judge_retention(CLIENT, queues, topics(4, retention_ms="60000"))

    assert found.level is Level.PROBLEM
    assert "queue emails has messages wait or be held for 120000 ms" in found.found
    assert "retention.ms=120000" in found.commands[0]


def test_a_partition_of_the_markers_that_is_behind_and_not_read_stands_still() -> None:
    pages = [
        Page(
            "http://a",
            [{"partition": 3, "alarm": "", "state": "owner", "clock_jump_ms": 0, "lag": 12, "applied_offset": 7}],
        )
    ]

    [found] = judge_pages(pages, {("http://a", 3)})

    assert (found.level, found.subject) == (Level.PROBLEM, "markers partition 3")
    assert "12 records behind" in found.found
    assert judge_pages(pages, {("http://a", 4), ("http://b", 3)}) == []


def test_partitions_that_are_behind_are_known_with_how_far_they_were_read() -> None:
    parts = [{"partition": number, "lag": lag, "applied_offset": 7} for number, lag in ((3, 0), (4, 1))]

    assert behind([Page("http://a", parts), Page("http://b", None)]) == {("http://a", 4): 7}
