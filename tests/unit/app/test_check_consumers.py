"""What is judged of groups and of what they have to read, from facts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from marq.dead_letters.selection import CountKey
from marq.kafka.topics import Look
from marq.settings.client import ClientSettings
from marq.settings.topic_configs import TopicFacts
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Source
from marq_worker.check.consumers import (
    GroupPosition,
    ReadingGroup,
    ended_processes,
    judge_backlogs,
    judge_large_messages,
    judge_partitions,
    judge_reading,
    judge_retention,
    unhandled,
    with_large_messages,
)
from marq_worker.check.examination import MAX_GROUPS, Examination
from marq_worker.check.permissions import WORKER
from marq_worker.config.settings import AppSettings
from marq_worker.findings import CheckFinding, Level
from marq_worker.web.conditions import STALLED_S, backlogs, judge_workers
from marq_worker.web.partition_statistics import empty_metrics
from marq_worker.web.statistics import namespace_statistics, worker_statistics
from tests.unit.app.definitions import in_file

CLIENT = ClientSettings.read("kafka:9092", {"prefix": "shop", "partitions": 4}, environment={})
NAMES = CLIENT.names
P0, P1 = Source("shop.messages", 0), Source("shop.messages", 1)
EMAILS = NAMES.group("emails")


def judged(*readers: ReadingGroup, waits: int | None = 1, **queues: Mapping[str, Any]) -> list[CheckFinding]:
    """``waits``: this many messages of emails, None: not known."""
    return judge_reading(CLIENT, in_file(**queues), readers, None if waits is None else {"emails": waits})


def test_a_group_that_has_lost_nothing_is_fine() -> None:
    # However far behind it is: consumers with slow handlers commit nothing for as long as their handlers take.
    [found] = judged(ReadingGroup(EMAILS, 1, {P0: GroupPosition(10, 0)}))

    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("waits", "said"),
    [(0, "0 messages wait"), (1, "1 message waits"), (None, "the number of waiting messages is unknown")],
)
def test_handlers_that_no_worker_runs_are_a_problem_even_without_messages(waits: int | None, said: str) -> None:
    reader = ReadingGroup(NAMES.named_group("handlers"), 0)

    [found] = judged(reader, waits=waits, emails={"handler": "shop:send"})

    assert found.level is Level.PROBLEM
    assert found.found == f"no worker runs the handlers of emails; {said}"
    assert found.commands == ("marq worker",)
    assert unhandled(CLIENT, in_file(emails={"handler": "shop:send"}), [reader]) == ["emails"]


def test_a_group_whose_handler_process_is_stuck_needs_no_other_worker() -> None:
    reader, emails = ReadingGroup(NAMES.named_group("handlers"), 0), {"handler": "shop:send"}

    [found] = judge_reading(CLIENT, in_file(emails=emails), [reader], None, stuck={reader.group})

    assert found.level is Level.OK
    # Else its backlog would be one without a consumer, with the same advice.
    assert unhandled(CLIENT, in_file(emails=emails), [reader]) == ["emails"]


def test_what_retention_took_before_it_was_read_is_a_problem() -> None:
    [found] = judged(ReadingGroup(EMAILS, 1, {P0: GroupPosition(3, 10)}))

    assert found.level is Level.PROBLEM
    assert "removed 7 records before it read them" in found.found
    assert "--topic" in found.commands[0] or "shop.messages" in found.commands[0]


def test_the_former_group_of_a_queue_that_moved_is_ignored() -> None:
    [found] = judged(ReadingGroup(EMAILS, 0, {P0: GroupPosition(3, 10)}), emails={"group": "background"})

    assert found.level is Level.OK


def test_groups_that_were_not_examined_are_not_said_to_have_lost_nothing() -> None:
    [found] = judge_reading(CLIENT, in_file(), [ReadingGroup(EMAILS, 1, {P0: GroupPosition(10, 0)})], None, left_out=12)

    assert found.level is Level.WARNING
    assert "12 of 13 groups that read queues were not examined" in found.found


@pytest.mark.parametrize(("answers", "examined", "left_out"), [(True, MAX_GROUPS, 4), (False, 0, MAX_GROUPS + 4)])
async def test_groups_with_handlers_are_examined_first_and_those_beyond_the_limit_are_counted(
    answers: bool, examined: int, left_out: int
) -> None:
    async def readers(groups: Sequence[str]) -> list[ReadingGroup]:
        assert groups[0] == NAMES.named_group("handlers")
        if not answers:
            raise BrokerUnavailable("away")
        return [ReadingGroup(group, 1) for group in groups]

    numbered = [NAMES.group(f"queue-{number:02}") for number in range(MAX_GROUPS + 3)]
    view = Mock(group_names=AsyncMock(return_value=[NAMES.named_group("forgotten"), *numbered]), readers=readers)
    examination = Examination(AppSettings(), CLIENT, [WORKER])

    found = await examination._readers(view, Look(topics(4)), {}, in_file(emails={"handler": "shop:send"}))

    assert found is not None
    assert (len(found[0]), found[1]) == (examined, left_out)


def topics(partitions: int, **config: str) -> dict[str, TopicFacts]:
    return {NAMES.messages: TopicFacts(partitions, {name.replace("_", "."): value for name, value in config.items()})}


def test_as_many_partitions_as_settings_ask_for_and_more_are_fine() -> None:
    for partitions in (4, 8):
        assert not [*judge_partitions(CLIENT, in_file(emails={"partitions": 4}), topics(partitions))]


def test_messages_that_are_kept_for_less_than_a_queue_has_them_wait() -> None:
    queues = in_file(emails={"delay": 120}, quick={"lease": 1})
    for enough in (topics(4, retention_ms="-1"), topics(4, retention_ms="120000"), {}):
        assert not [*judge_retention(CLIENT, queues, enough)]

    [found] = judge_retention(CLIENT, queues, topics(4, retention_ms="60000"))

    assert found.level is Level.PROBLEM
    assert "messages of queue emails may wait or be in flight for 120000 ms" in found.found
    assert "retention.ms=120000" in found.commands[0]


def test_a_markers_partition_has_stalled_only_when_its_worker_has_read_nothing_of_it_for_a_while() -> None:
    def judge(stalled_s: float) -> list[CheckFinding]:
        part = {
            "partition": 3,
            "alarm": "",
            "state": "owner",
            "clock_jump_ms": 0,
            "lag": 1,
            "stalled_seconds": stalled_s,
        }
        workers = [worker_statistics("http://a", {"partitions": [part]})]
        return judge_workers(namespace_statistics(workers, settled=True))

    # On a busy machine a record may not have been read for some seconds.
    assert judge(STALLED_S - 1) == []
    [found] = judge(STALLED_S)

    assert (found.level, found.subject) == (Level.PROBLEM, "markers partition 3")
    assert found.found == "it is 1 records behind, and http://a has read none for 10 s"


@pytest.mark.parametrize(("removed", "warned"), [({}, True), ({"emails": {"handler": "a:b", "seconds": 400.0}}, False)])
def test_a_queue_whose_handler_was_removed_is_not_called_stalled(removed: Mapping[str, Any], warned: bool) -> None:
    waits = {"waiting": 3, "oldest_waiting_seconds": 500.0, "idle_seconds": 500.0, "no_consumer_seconds": 0.0}
    listed = backlogs({"emails": empty_metrics() | waits}, removed)

    [finding] = judge_backlogs(in_file(emails={}), listed, [])
    assert ("have received no message" in finding.found) is warned


def test_a_queue_with_messages_that_are_too_large_names_one_of_their_records() -> None:
    place = "orders/0/17 has 3145736 bytes, and a marker has room for 1108916"
    dead = {CountKey("orders", f"too large: {place}"): 1, CountKey("orders", "too large: orders/0/9"): 2}

    assert with_large_messages({"orders": {"too_large": 3}, "emails": {"too_large": 0}}) == ["orders"]
    [finding] = judge_large_messages(dead)

    assert (finding.level, finding.subject) == (Level.WARNING, "queue orders")
    assert finding.found == f"3 messages were too large: {place}"
    assert list(finding.commands) == ["marq dead orders --reason 'too large, so its value is only in its own record'"]


def test_messages_whose_records_are_gone_have_a_finding_of_their_own() -> None:
    gone = "lost, because the record is gone: orders/0/17 was removed before the tracker could copy it"
    dead = {CountKey("orders", gone): 1, CountKey("orders", "too large: orders/0/9"): 2}

    assert with_large_messages({"orders": {"gone": 1}, "emails": {"gone": 0}}) == ["orders"]
    large, lost = judge_large_messages(dead)

    assert (large.found, lost.found) == ("2 messages were too large: orders/0/9", f"1 message was {gone}")
    assert list(lost.commands) == ["marq dead orders --reason 'lost, because the record is gone'"]
    assert "longer than all workers may be down" in lost.advice


def test_without_dead_letters_there_is_no_finding_about_messages_that_are_too_large() -> None:
    assert judge_large_messages({}) == []


def test_handlers_whose_process_keeps_ending_are_not_called_missing() -> None:
    """To start one more worker would not help."""
    process = {"group": "handlers", "pid": None, "starts": 3}
    ended = ended_processes([{"handlers": [process]}, {"handlers": [{**process, "pid": 7, "starts": 1}]}], NAMES)
    group = NAMES.named_group("handlers")
    defined = in_file(emails={"handler": "a:b"})

    [found] = judge_reading(
        CLIENT, defined, [ReadingGroup(group, 0, {P0: GroupPosition(3, 0)})], {"emails": 2}, ended=ended
    )

    assert ended == {group: 3}
    assert found.found == "the handlers of emails do not run: their process has ended 3 times; 2 messages wait"
    assert found.advice.endswith("its log shows why it ends")
