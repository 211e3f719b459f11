"""The rows of the benchmark, in the order in which they run; the last ones run only by name."""

from __future__ import annotations

from lab.bench.rows.deduplication import DEDUPLICATION
from lab.bench.rows.delays import DELAYS
from lab.bench.rows.drain import DRAIN, MEMORY, RABBITMQ, WORK_ROWS
from lab.bench.rows.latency import EXPIRY, LATENCY, NEIGHBOURS, REDELIVERY
from lab.bench.rows.ordering import ORDERED_ROW, POISONED_ROW, REBALANCE_ROW
from lab.bench.rows.queues import QUEUES_ROW, READERS_ROW
from lab.bench.rows.recovery import RECOVERY
from lab.bench.rows.sqs import SQS
from lab.bench.rows.throughput import SCALE, SEND
from lab.bench.rows.tracker import BACKLOG, IDLE, TRACKER
from lab.bench.suite import BenchRow

ROWS: tuple[BenchRow, ...] = (
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
