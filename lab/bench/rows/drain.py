"""A full queue is drained by one process: rates of Marq and of other clients, with and without work, and memory."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from lab.bench import peers
from lab.bench.client import QUEUE
from lab.bench.peers import SHARE_PROPERTIES
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians, Skipped
from lab.program import Worker, measured
from lab.resources import Meter

#: Bars of ``run`` and ``run_batch``: the rate, divided by the confluent-kafka consumer group's and the share group's.
LEAST_OF_GROUP, LEAST_OF_SHARE = 0.55, 0.45
RUN, RUN_BATCH, ITERATE = "marq run", "marq run_batch", "marq iterate"
AIOKAFKA, GROUP, SHARE = "aiokafka group", "confluent group", "confluent share group"
QUORUM = "rabbitmq quorum queue"
#: Prefetch and concurrency for the comparison with RabbitMQ.
PREFETCH = 2_000
CONSUMER_MIB, WORKER_MIB = 250.0, 400.0
#: Bytes of markers and changelog, divided by the payload's.
MOST_OF_PAYLOAD = 1.3
#: Milliseconds of work, for one message in how many; none by default.
Work = tuple[float, int]
NO_WORK: Work = (0, 1)
TEN_MS: Work = (10, 1)


def marq(bench: Bench, way: str = "run", work: Work = NO_WORK, concurrency: int = 64) -> Measurements:
    bench.fill()
    return drained(bench, bench.worker(), way, work, concurrency)


def drained(bench: Bench, worker: Worker, way: str, work: Work, concurrency: int) -> Measurements:
    """Measure like :func:`marq`, but a queue that is already full, with a worker that is already running."""
    count = bench.size.messages
    meter = Meter({"tracker": [worker.pid], "broker": [bench.broker_pid]})
    measurements = measured(peers.drain, "marq", *bench.namespace, count, *work, (way, concurrency))
    worker.wait_until_drained(QUEUE, count)
    behind = max(0.0, time.time() - measurements["ended_at"])
    parts, peak = _parts(meter), {"worker_peak_mib": worker.memory_mib("worker")["worker_peak_mib"]}
    return {**_client(measurements), "tracker_behind_seconds": behind, **parts, **peak, **_written(bench)}


def native(bench: Bench, peer: str, work: Work = NO_WORK, options: tuple[Any, ...] = ()) -> Measurements:
    bench.fill()
    meter = Meter({"broker": [bench.broker_pid]})
    topic, count = bench.names.messages, bench.size.messages
    measurements = measured(peers.drain, peer, bench.servers, topic, count, *work, options)
    return {**_client(measurements), **_parts(meter)}


def quorum_queue(bench: Bench, work: Work = NO_WORK) -> Measurements:
    """Measure a quorum queue of RabbitMQ by aio-pika: each message durable, with its own ack.

    Raise Skipped if RABBITMQ_URL is not set.
    """
    size, url = bench.size, os.environ.get("RABBITMQ_URL")
    if not url:
        raise Skipped("RABBITMQ_URL is not set")
    queue = bench.names.prefix
    measured(peers.fill_rabbitmq, url, queue, size.messages, size.value_bytes)
    return _client(measured(peers.drain, "rabbitmq", url, queue, size.messages, *work, (PREFETCH,)))


def _written(bench: Bench) -> Measurements:
    """Measure the bytes that a drain has written to the broker's logs, and end all processes."""
    # When a worker ends, it writes its last records to the log.
    bench.end_processes()
    names, count = bench.names, bench.size.messages
    topics = {"messages": names.messages, "markers": names.markers, "changelog": names.changelog}
    written = {name: bench.log_bytes(topic) / count for name, topic in topics.items()}
    return {
        **{f"{name}_bytes_per_message": size for name, size in written.items()},
        "markers_and_changelog_of_payload": (written["markers"] + written["changelog"]) / bench.size.value_bytes,
    }


def _client(measurements: Measurements) -> Measurements:
    named = {name: measurements[name] for name in ("rate", "startup_seconds", "cpu_seconds")}
    return {**named, "consumer_peak_mib": measurements["peak_bytes"] / 2**20}


def _parts(meter: Meter) -> Measurements:
    return {f"{part}_cpu_seconds": seconds for part, seconds in meter.seconds().items()}


def relative(what: str, medians: Medians, system: str, over: str, limit: float, name: str = "rate") -> Bar:
    """Return a bar of a measurement of a system, divided by that of another one."""
    return Bar(what, medians[system][name] / medians[over][name], limit, "times", at_least=True)


DRAIN = BenchRow(
    "drain",
    "a full queue drained by one process that only looks at each message and acknowledges it",
    {
        RUN: marq,
        GROUP: partial(native, peer="confluent"),
        RUN_BATCH: partial(marq, way="run_batch", concurrency=2),
        SHARE: partial(native, peer="share"),
        ITERATE: partial(marq, way="iterate"),
        AIOKAFKA: partial(native, peer="aiokafka"),
    },
    lambda medians: [
        relative("run: rate relative to the consumer group", medians, RUN, GROUP, LEAST_OF_GROUP),
        relative("run_batch: rate relative to the share group", medians, RUN_BATCH, SHARE, LEAST_OF_SHARE),
    ],
    broker_properties=SHARE_PROPERTIES,
)

MEMORY = BenchRow(
    "memory",
    "a drain, handler per message: the most memory of each process, and the size of the broker's logs after it",
    {RUN: marq},
    lambda medians: [
        Bar(what, medians[RUN][name], limit, unit)
        for what, name, limit, unit in (
            ("peak memory of a consumer", "consumer_peak_mib", CONSUMER_MIB, "MiB"),
            ("peak memory of a worker", "worker_peak_mib", WORKER_MIB, "MiB"),
            ("markers and changelog", "markers_and_changelog_of_payload", MOST_OF_PAYLOAD, "times the payload"),
        )
    ],
    runs=3,
)

RABBITMQ = BenchRow(
    "rabbitmq",
    f"a full queue drained by one process, also with 10 ms of waiting per message; prefetch and concurrency {PREFETCH}",
    {
        RUN: marq,
        QUORUM: quorum_queue,
        f"{RUN}, 10 ms": partial(marq, work=TEN_MS, concurrency=PREFETCH),
        f"{QUORUM}, 10 ms": partial(quorum_queue, work=TEN_MS),
    },
    runs=3,
    # RabbitMQ is so much slower that all messages would take minutes.
    of_messages=0.1,
)


def _work_row(name: str, what: str, work: Work, run: int, group: int, share: tuple[int, int]) -> BenchRow:
    """Compare systems with work on each message, each at the concurrency at which it is fastest (docs/benchmarks.md).

    Args:
        run, group: messages at a time.
        share: consumers, and messages of one poll.
    """
    consumers, polled = share
    return BenchRow(
        name,
        f"{what}; marq run at concurrency {run}, {consumers} consumers of a share group with {polled} "
        f"messages a poll, a consumer group with {group} messages at a time",
        {
            RUN: partial(marq, work=work, concurrency=run),
            SHARE: partial(native, peer="share", work=work, options=share),
            GROUP: partial(native, peer="confluent", work=work, options=(group,)),
        },
        lambda medians: [relative(f"{what}: rate relative to the share group", medians, RUN, SHARE, 1.0)],
        runs=3,
        broker_properties=SHARE_PROPERTIES,
        # A run then takes 8 to 15 seconds.
        of_messages=1.5,
    )


WORK_ROWS = (
    _work_row("work-1ms", "1 ms of waiting for each message", (1, 1), 1_000, 2_000, (1, 40_000)),
    _work_row("work-10ms", "10 ms of waiting for each message", TEN_MS, 2_000, 4_000, (1, 40_000)),
    _work_row("work-100ms", "100 ms of waiting for each message", (100, 1), 10_000, 10_000, (1, 40_000)),
    _work_row("work-slow", "500 ms of waiting for 1% of the messages", (500, 100), 2_000, 40_000, (4, 10_000)),
)
