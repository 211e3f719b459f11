"""The rows of the benchmark, in the order in which they run."""

from __future__ import annotations

from bench.rows.census import CENSUS
from bench.rows.concurrency import CONCURRENCY_ROW
from bench.rows.drain import DRAIN
from bench.rows.expiry import EXPIRY
from bench.rows.idle import IDLE
from bench.rows.latency import LATENCY
from bench.rows.memory import MEMORY
from bench.rows.neighbours import NEIGHBOURS
from bench.rows.queues import QUEUES_ROW
from bench.rows.rabbitmq import RABBITMQ
from bench.rows.readers import READERS
from bench.rows.redelivery import REDELIVERY
from bench.rows.scale import SCALE
from bench.rows.send import SEND
from bench.rows.tracker import TRACKER
from bench.rows.work import WORK_ROWS
from bench.suite import Row

ROWS: tuple[Row, ...] = (
    DRAIN,
    *WORK_ROWS,
    RABBITMQ,
    SEND,
    TRACKER,
    CENSUS,
    CONCURRENCY_ROW,
    LATENCY,
    REDELIVERY,
    EXPIRY,
    QUEUES_ROW,
    READERS,
    NEIGHBOURS,
    MEMORY,
    SCALE,
    IDLE,
)
