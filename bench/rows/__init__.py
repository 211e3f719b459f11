"""The rows of the benchmark, in the order in which they run; the last ones run only by name."""

from __future__ import annotations

from bench.rows.deduplication import DEDUPLICATION
from bench.rows.delays import DELAYS
from bench.rows.drain import DRAIN, MEMORY, RABBITMQ, WORK_ROWS
from bench.rows.latency import EXPIRY, LATENCY, NEIGHBOURS, REDELIVERY
from bench.rows.ordering import ORDERED_ROW, POISONED_ROW, REBALANCE_ROW
from bench.rows.queues import QUEUES_ROW, READERS_ROW
from bench.rows.recovery import RECOVERY
from bench.rows.sqs import SQS
from bench.rows.throughput import SCALE, SEND
from bench.rows.tracker import BACKLOG, IDLE, TRACKER
from bench.suite import Row

ROWS: tuple[Row, ...] = (
    DRAIN,
    *WORK_ROWS,
    RABBITMQ,
    SEND,
    TRACKER,
    BACKLOG,
    LATENCY,
    REDELIVERY,
    EXPIRY,
    QUEUES_ROW,
    READERS_ROW,
    NEIGHBOURS,
    ORDERED_ROW,
    POISONED_ROW,
    REBALANCE_ROW,
    SQS,
    MEMORY,
    SCALE,
    IDLE,
    RECOVERY,
    DELAYS,
    DEDUPLICATION,
)
