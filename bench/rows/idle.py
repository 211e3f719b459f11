"""What a worker takes that has nothing to do."""

from __future__ import annotations

import time

from bench.suite import Bench, Figures, Row
from bench.worker import BenchWorker

SETTLE_SECONDS = 2.0
IDLE_SECONDS = 10.0


def idle(bench: Bench) -> Figures:
    with BenchWorker(bench.servers, bench.prefix(), bench.folder) as worker:
        worker.wait_until_owner()
        time.sleep(SETTLE_SECONDS)
        before = worker.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        return {"idle_core_percent": 100 * (worker.cpu_seconds() - before) / IDLE_SECONDS}


IDLE = Row("idle", "a worker that has nothing to do: how much of a core it takes", {"marq": idle}, runs=1, warm=0)
