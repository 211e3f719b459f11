"""Spark for the tests: one session for each process of pytest, and none where the machine has no Java for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline import java
from pipeline.errors import PipelineError
from pipeline.kafka import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 400
#: As on the smallest machine that the pipeline is made for; processes of tests share one.
SETTINGS = {"PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-memory 1g pyspark-shell"}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def needs_spark() -> None:
    """For tests that start Spark in a process of its own; `spark` asks for it, too."""
    if os.environ.get("SPARK") == "skip":
        pytest.skip("SPARK=skip: tests on Spark are left out")
    try:
        java.home()
    except PipelineError as error:
        # One test, of the session, fails and says the same.
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(needs_spark: None) -> Iterator[SparkSession]:
    """The session that a job gets."""
    from pipeline.session import session

    os.environ.update(SETTINGS)
    started = session("tests")
    yield started
    started.stop()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An empty data directory."""
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


@pytest.fixture
def environment(servers: str, prefix: str, data: Path) -> dict[str, str]:
    """What a user would set for the session's Kafka."""
    return {"MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_PREFIX": prefix, "MARQ_PIPELINE_DATA": str(data)}


@pytest.fixture
def connection(environment: Mapping[str, str]) -> Connection:
    return Connection.read(environment)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `python -m pipeline WORDS` as a user does: another directory, nothing but what is given in MARQ_…."""

    def run(words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MARQ_", "PYSPARK_")) or name == "MARQ_CACHE"
        }
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "pipeline", *shlex.split(words)],
            cwd=tmp_path,
            env={**kept, **SETTINGS, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )

    return run
