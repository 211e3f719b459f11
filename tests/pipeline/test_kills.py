"""kill -9 of ``python -m pipeline ingest``, with all of its processes, in the middle of its batches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline.kafka import Connection
from pipeline.lake import Lake
from tests.pipeline.conftest import ROOT, SETTINGS
from tests.pipeline.installation import Installation, ingest
from tests.pipeline.test_ingest import assert_each_record_once, made, table
from tests.unit.core.batches import acquire

__all__ = ["made"]
pytestmark = pytest.mark.timeout(1_200)
LIMIT_SECONDS = 300
COUNTS = {"markers": 300, "messages": 60}


def exists(*patterns: str) -> Callable[[Path], bool]:
    """What the data directory has when the process is to die: all of these."""
    return lambda data: all(any(data.glob(pattern)) for pattern in patterns)


#: While a batch is written; when it is renamed, about its commit; when it is committed, and Spark may not know.
MOMENTS = [
    exists("_staging/markers-000000000/_temporary"),
    exists("markers/batch=000000001"),
    exists("_commits/markers/000000003.json"),
]


def killed(environment: dict[str, str], data: Path, moment: Callable[[Path], bool]) -> None:
    """Run ingest in a process group of its own, and kill the group at a moment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MARQ_", "PYSPARK_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "ingest", "--markers-limit", "60", "--records-limit", "20"],
        env={**kept, **SETTINGS, "PYTHONPATH": str(ROOT), **environment},
        cwd=data.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + LIMIT_SECONDS
        while not moment(data):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.002)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_after_kills_in_mid_batch_a_rerun_gives_what_an_undisturbed_one_gives(
    spark: SparkSession, connection: Connection, environment: dict[str, str], data: Path, tmp_path: Path,
    made: Installation,
) -> None:  # fmt: skip
    made.mark(*[acquire([number]) for number in range(300)])
    made.many(made.names.messages, [b"v"] * 60)

    for moment in MOMENTS:
        killed(environment, data, moment)
    lake, undisturbed = Lake(spark, str(data)), Lake(spark, str(tmp_path / "undisturbed"))
    ingest(spark, connection, lake, limits=(60, 20))
    ingest(spark, connection, undisturbed, limits=(60, 20))

    assert_each_record_once(lake, data, COUNTS)
    for name in COUNTS:
        assert sorted(table(lake, name).collect()) == sorted(table(undisturbed, name).collect())
