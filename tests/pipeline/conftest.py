"""Spark for the tests: one session for all of them, and none where the machine has no Java for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from marq_worker.broker import EmbeddedBroker
from pipeline import cli, java
from pipeline.errors import PipelineError
from pipeline.kafka import Connection
from tests.pipeline.processes import SETTINGS
from tests.worker.conftest import workers
from tests.worker.harness import Namespace as Written
from tests.worker.harness import Worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.pipeline.directory import Directory


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
    from pyspark.logger import PySparkLogger

    # PySpark 4.2 gives each handler of its loggers a JSON formatter. They do not propagate, so pytest 9.2 adds its own
    # handler to them: after one failed query, caplog.text would be JSON in all later tests of this process.
    PySparkLogger.addHandler = logging.Logger.addHandler


@pytest.fixture(scope="session")
def spark(needs_spark: None) -> Iterator[SparkSession]:
    """The session that a job gets, with the settings for few rows.

    Processes of their own (test_kills.py, test_cluster.py) run with Spark's defaults.
    """
    from pipeline.session import FEW_ROWS, session

    settings = " ".join(f"--conf {name}={value}" for name, value in FEW_ROWS.items())
    os.environ.update({name: f"{settings} {value}" for name, value in SETTINGS.items()})
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


@pytest.fixture(scope="session")
def stories(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """One message of each fate, as ingested; one of them is lost, and the fact of one is overdue."""
    from tests.pipeline.stories import directory_for, told

    directory = directory_for(spark, tmp_path_factory.mktemp("stories"))
    directory.bring(told()[0].tables())
    return directory


@pytest.fixture(scope="session")
def audited(stories: Directory) -> Directory:
    """The stories after an audit, which finds the lost message, and after `stats`."""
    assert cli.run(["audit", "--data", str(stories.path)]) == 1
    assert cli.run(["stats", "--window", "1m", "--data", str(stories.path)]) == 0
    return stories


class Done(NamedTuple):
    """What a job printed, and its exit code."""

    code: int
    out: str
    errors: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def refusal(self) -> str:
        """The one line of a job that could not be carried through."""
        [line] = self.errors.splitlines()
        assert (self.code, self.out, line[:7]) == (2, "", "error: ")
        return line[7:]


Command = Callable[[str], Done]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line leaves the shared session, signals and logging as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(cli, "_stop_spark", lambda: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def command(
    in_process: None, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `python -m pipeline WORDS` in this process, on the shared session."""
    monkeypatch.setenv("MARQ_PIPELINE_DATA", str(data))

    def run(words: str) -> Done:
        capsys.readouterr()
        return Done(cli.main(shlex.split(words)), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker for all tests that need one; each has a queue of its own."""
    with contextlib.contextmanager(workers)(broker, tmp_path_factory.mktemp("worker")) as make:
        started = make().start()
        asyncio.run(started.ready())
        yield started


@pytest.fixture
def installed(worker: Worker, data: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """What a user sets for the worker's Kafka, set here and returned for processes."""
    settings = {name: worker.environment[name] for name in ("MARQ_BOOTSTRAP_SERVERS", "MARQ_PREFIX")}
    settings["MARQ_PIPELINE_DATA"] = str(data)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
async def written(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Written]:
    """What stands in the worker's topics."""
    async with Written(broker.bootstrap_servers, worker.names) as found:
        yield found
