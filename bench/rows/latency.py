"""How long a message takes from when it was to be sent until its handler begins, at a steady rate."""

from __future__ import annotations

import time
from functools import partial

from bench.bars import Bar
from bench.children import Child
from bench.load import QUEUE
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker

STEADY, FAST = "1,000/s", "50,000/s"
#: The fast one first: a broker that was started just now is slow until its Java has compiled what it runs often.
RATES = {FAST: 50_000, STEADY: 1_000}
#: Messages of a call: at 1,000/s each has its own; at 50,000/s there is a call of send_many each 5 ms.
BURSTS = {FAST: 250, STEADY: 1}
#: Measured for so long, after the consumer has worked for a while.
SECONDS, UNMEASURED_SECONDS = 8, 2
P50_MS, P99_MS = 5.0, 40.0


def latency(bench: Bench, name: str) -> Figures:
    prefix, rate = bench.prefix(), RATES[name]
    count, unmeasured = rate * (SECONDS + UNMEASURED_SECONDS), rate * UNMEASURED_SECONDS
    sending = (bench.servers, prefix, QUEUE, rate, count, bench.size.value_bytes, BURSTS[name])
    with (
        BenchWorker(bench.servers, prefix, bench.folder) as worker,
        Child("bench.clients.paced", *sending) as producer,
        Child("bench.clients.timed", bench.servers, prefix, QUEUE, count, unmeasured) as consumer,
    ):
        worker.wait_until_owner()
        producer.said()
        consumer.said()
        meter = Meter(
            {
                "producer": [producer.pid],
                "consumer": [consumer.pid],
                "worker": [worker.process.pid],
                "broker": [bench.broker_pid],
            }
        )
        began = time.monotonic()
        producer.tell()
        # The last acks are written when all have come.
        producer.said()
        cores = {f"{part}_cores": taken / (time.monotonic() - began) for part, taken in meter.seconds().items()}
        return {**consumer.said(), **cores}


def bars(medians: Medians) -> list[Bar]:
    steady = medians[STEADY]
    return [
        Bar(f"send to handler at {STEADY}: p50", steady["p50_ms"], P50_MS, "ms"),
        Bar(f"send to handler at {STEADY}: p99", steady["p99_ms"], P99_MS, "ms"),
    ]


LATENCY = Row(
    "latency",
    "a producer sends at a steady rate: how long from when a message was to be sent until its handler begins",
    {name: partial(latency, name=name) for name in RATES},
    bars,
    runs=3,
    warm=1,
)
