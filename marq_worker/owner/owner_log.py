"""Log lines and alarms of an owner of a markers partition."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from marq.core.storage.invalid_times import InvalidTimes
from marq.owner.transaction_content import OwnerTransaction
from marq.wire.errors import UnknownVersion
from marq.wire.markers import Source
from marq.wire.record_headers import record_id

log = logging.getLogger("marq.tracker")


def newer_version_alarm(source: Source, offset: int, error: UnknownVersion) -> str:
    return (
        f"record {record_id(source, offset)} has {error}. If a newer Marq wrote it, upgrade the workers. If not, put it"
        f" into quarantine: marq quarantine {source.partition} {offset}"
    )


def log_jump(partition: int, jump_ms: int) -> None:
    log.critical(
        "markers partition %s: the broker's clock jumped by %s ms; the worker uses its own clock. Messages that were "
        "acquired right after the jump may be redelivered late by that much",
        partition,
        jump_ms,
    )


def log_refused(write: OwnerTransaction) -> None:
    """Log which message the broker rejected as too large; if there are several, it is not known yet which one."""
    if len(write.due) == 1:
        fire, _ = write.due[0]
        log.error(
            "queue %s, record %s: the broker rejects its redelivery as too large; it becomes a dead letter",
            fire.lease.queue,
            record_id(fire.source, fire.offset),
        )


def log_recreated(recreated: Iterable[tuple[str, Source]]) -> None:
    for queue, source in recreated:
        log.warning(
            "queue %s: topic %s was deleted and created again: the records of partition %s are new messages; unfinished"
            " messages of the former topic are redelivered from their markers",
            queue, *source.log,
        )  # fmt: skip


def log_invalid_times(times: InvalidTimes) -> None:
    """Write one line per queue and flush, because a faulty sender affects thousands of messages."""
    for queue, (count, first) in times.take().items():
        log.warning(
            "queue=%s messages=%s first=%s: marq-deliver-at is not a valid time, so they are delivered now",
            queue,
            count,
            first,
        )
