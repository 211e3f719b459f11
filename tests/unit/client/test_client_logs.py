"""Which lines of aiokafka are demoted: those about retries that are expected, and no others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    NodeNotReadyError,
    NotEnoughReplicasError,
    TopicAuthorizationFailedError,
)

from marq.kafka.client_logs import MAX_PARTITIONS, REPEAT_S, TRANSIENT_S, Retries
from tests.unit.client.fakes import Clock

REFUSED = "Got error produce response on topic-partition %s, retrying. Error: %s"


class Logs:
    """A filter, and what it lets through."""

    def __init__(self) -> None:
        self.outage = False
        self.clock = Clock()
        self.filter = Retries(lambda: self.outage, self.clock)

    def shows(self, message: str, *arguments: Any, level: int = logging.ERROR, exc_info: Any = None) -> bool:
        record = logging.LogRecord("aiokafka", level, "client.py", 1, message, arguments, exc_info)
        return self.filter.filter(record) and record.levelno == level

    def refused(self, partition: int = 0) -> bool:
        return self.shows(REFUSED, TopicPartition("t", partition), NotEnoughReplicasError, level=logging.WARNING)


@pytest.fixture
def logs() -> Logs:
    return Logs()


LINES = [
    ("Failed fetch messages from %s: %s", (1, NodeNotReadyError())),
    ("Group Coordinator Request failed: %s", (KafkaConnectionError(),)),
    ("Unable connect to node with id %s: %s", (1, ConnectionRefusedError(111, "refused"))),
    ("Unable to update metadata from %s", ([1],)),
    ("Marking the coordinator dead (node %s)for group %s.", (1, "g")),
]


def test_a_topic_that_does_not_exist_is_not_reported_four_times_a_second(logs: Logs) -> None:
    line = "Topic %s not found in cluster metadata"
    shown = [logs.shows(line, topic) for topic in ("orders", "orders", "emails")]
    logs.clock.now_s += REPEAT_S

    assert [*shown, logs.shows(line, "orders")] == [True, False, True, True]


@pytest.mark.parametrize(("message", "arguments"), LINES)
def test_during_an_outage_a_request_that_cannot_be_sent_is_not_reported_again(logs, message, arguments) -> None:
    assert logs.shows(message, *arguments)

    logs.outage = True

    assert not logs.shows(message, *arguments)


def test_during_an_outage_other_errors_are_shown(logs) -> None:
    logs.outage = True

    assert logs.shows("Failed fetch messages from %s: %s", 1, TopicAuthorizationFailedError("t"))
    assert logs.shows("Topic %s not found in cluster metadata", "t")
    error = KafkaConnectionError()
    assert logs.shows("Unexpected error in sender routine %s", error, exc_info=(type(error), error, None))


def test_the_debug_log_shows_demoted_lines_as_such(logs, caplog) -> None:
    logs.outage = True
    logger = logging.getLogger("aiokafka.of.this.test")
    logger.addFilter(logs.filter)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        logger.error("Unable to update metadata from %s", [1])

    [record] = [each for each in caplog.records if each.name == logger.name]
    assert (record.levelname, record.getMessage()) == ("DEBUG", "Unable to update metadata from [1]")


def test_a_refusal_while_a_transaction_is_busy_is_not_reported(logs) -> None:
    for _ in range(100):
        assert not logs.refused()
        logs.clock.now_s += 1.5


def test_a_partition_that_lacks_replicas_for_some_time_is_reported_now_and_then(logs) -> None:
    shown, began_s = [], logs.clock.now_s
    for _ in range(round(70 / 0.1)):
        if logs.refused():
            shown.append(logs.clock.now_s - began_s)
        logs.refused(partition=1)
        logs.clock.now_s += 0.1

    assert shown == [
        pytest.approx(TRANSIENT_S, abs=0.5),
        pytest.approx(TRANSIENT_S + REPEAT_S, abs=0.5),
        pytest.approx(TRANSIENT_S + 2 * REPEAT_S, abs=0.5),
    ]


def test_the_memory_for_partitions_is_bounded(logs) -> None:
    for partition in range(2 * MAX_PARTITIONS):
        logs.refused(partition)

    assert len(logs.filter._refusals) == MAX_PARTITIONS
