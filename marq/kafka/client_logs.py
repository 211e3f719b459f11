"""Demotes log lines of aiokafka that report an expected retry.

aiokafka logs each failed attempt of a request as a warning or an error. Two kinds of failures are expected:

* A request can't be sent because a broker is down. :mod:`marq.kafka.paced_clients` reports the outage once.
* ``NOT_ENOUGH_REPLICAS`` in a transaction. The leader of a partition asks the transaction coordinator whether the
  transaction includes the partition. While the coordinator is busy with another request of the same transaction, such
  as the one that adds the consumer group, the leader answers with this error. A retry succeeds within milliseconds.
  Real under-replication repeats for as long as replicas are missing, so a partition that keeps failing is logged.

A line about a topic that does not exist comes four times a second, so most of its repetitions are demoted, too.

Demoted lines have the level DEBUG.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    NodeNotReadyError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
)

LOGGERS = (
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)
#: Errors of a request without a connection.
_DISCONNECTED = (KafkaConnectionError, NodeNotReadyError, GroupCoordinatorNotAvailableError, OSError)
#: Log lines that follow from a missing connection and name no error.
_CONSEQUENCES = (
    "Unable to update metadata from",
    "Marking the coordinator dead",
    "Heartbeat failed for group",
    "Heartbeat session expired",
)
_UNKNOWN_TOPIC = "Topic %s not found in cluster metadata"
_TRANSIENT = (NotEnoughReplicasError, NotEnoughReplicasAfterAppendError)
#: A refusal within GAP_S of the last one belongs to the same failure. A failure that lasts longer than TRANSIENT_S is
#: logged, once every REPEAT_S.
GAP_S, TRANSIENT_S, REPEAT_S = 1.0, 5.0, 30.0
#: Partitions that are remembered.
MAX_PARTITIONS = 1000


class Retries(logging.Filter):
    """Demotes the lines about expected retries.

    Args:
        in_outage: whether a broker is unreachable now.
        clock: monotonic seconds.
    """

    def __init__(self, in_outage: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.in_outage = in_outage
        self._clock = clock
        #: When a line was last logged.
        self._logged: dict[str, float] = {}
        #: By partition: when refusals began, when the last one came, and when one was last logged.
        self._refusals: dict[Hashable, tuple[float, float, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record's level; return whether it is logged."""
        if record.levelno < logging.WARNING or record.exc_info or not self._expected(record):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)

    def _expected(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if record.msg == _UNKNOWN_TOPIC:
            return self._repeated(str(arguments))
        if len(arguments) == 2 and arguments[1] in _TRANSIENT and isinstance(arguments[0], Hashable):
            return self._transient(arguments[0])
        return self._disconnected(record.msg, arguments) and self.in_outage()

    def _repeated(self, line: str) -> bool:
        """Return whether a line was logged less than ``REPEAT_S`` ago."""
        now = self._clock()
        if now - self._logged.get(line, now - REPEAT_S) < REPEAT_S:
            return True
        while len(self._logged) >= MAX_PARTITIONS:
            self._logged.pop(next(iter(self._logged)))
        self._logged[line] = now
        return False

    def _disconnected(self, message: object, arguments: tuple[object, ...]) -> bool:
        return any(isinstance(argument, _DISCONNECTED) for argument in arguments) or (
            isinstance(message, str) and message.startswith(_CONSEQUENCES)
        )

    def _transient(self, partition: Hashable) -> bool:
        now = self._clock()
        began, last, logged = self._refusals.pop(partition, (now, now, now - REPEAT_S))
        if now - last > GAP_S:
            began = now
        expected = now - began < TRANSIENT_S or now - logged < REPEAT_S
        while len(self._refusals) >= MAX_PARTITIONS:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[partition] = (began, now, logged if expected else now)
        return expected


_installed: list[Retries] = []


def install(in_outage: Callable[[], bool]) -> None:
    """Filter aiokafka's loggers, once in a process."""
    if _installed:
        return
    _installed.append(Retries(in_outage))
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_installed[0])
