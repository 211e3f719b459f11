"""A Spark cluster: a standalone master, two workers without our code, and spark-submit.

Only the zip of docs/pipeline.md brings code there: the workers run in directories of their own, without PYTHONPATH, and
even the file that spark-submit is given lies elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyspark
import pytest

import marq
from marq_worker.broker.ports import free_port
from marq_worker.broker.process import ChildProcess
from pipeline import jars, java
from tests.client.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SPARK = Path(pyspark.__file__).parent
HOST = "127.0.0.1"
START_LIMIT_SECONDS = 300
LIMIT_SECONDS = 600
MESSAGES = 300
SETTINGS = {
    # Tasks wait for both workers; otherwise the first could finish them before the second is ready.
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    # As small as the workers.
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    # Few rows, and three processes that would each compile their code.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}
#: Prefixes of variables that machines of a cluster lack.
_KNOWS_US = ("MARQ_", "PYTHON", "PYSPARK", "SPARK")


class Cluster:
    """A master and two workers of one core each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[ChildProcess] = []
        self.master = f"spark://{HOST}:{free_port(HOST)}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_KNOWS_US)},
            "MARQ_CACHE": str(jars.directory().parent),
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        home = java.home()
        if home is not None:
            self.environment["JAVA_HOME"] = str(home)

    def start(self) -> None:
        port = self.master.rpartition(":")[2]
        self._start("master", "deploy.master.Master", "--host", HOST, "--port", port)
        for name in ("worker-1", "worker-2"):
            work = ("--work-dir", str(self.directory / name / "work"))
            self._start(name, "deploy.worker.Worker", "--cores", "1", "--memory", "1g", *work, self.master)

    def _start(self, name: str, program: str, *words: str) -> None:
        place = self.directory / name
        place.mkdir(parents=True)
        command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.{program}", "--webui-port", "0", *words]
        # The executors that it starts are of its group.
        process = ChildProcess(command, place / "log", directory=place, environment=self.environment)
        self._processes.append(process.start())

    def wait(self) -> None:
        """Until the master knows both workers."""
        log = self.directory / "master" / "log"
        wait_until(lambda: log.read_text().count("Registering worker") == 2, START_LIMIT_SECONDS)

    def kill(self) -> None:
        """Kill -9 all, executors too."""
        for process in self._processes:
            process.kill()


@pytest.fixture
def cluster(needs_spark: None, tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path / "cluster")
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """A directory with what is given to spark-submit, and nothing else."""
    directory = tmp_path / "submit"
    directory.mkdir()
    shutil.copy(ROOT / "pipeline" / "__main__.py", directory)
    zipped = [sys.executable, "-m", "zipfile", "-c", str(directory / "pipeline.zip"), "pipeline", "marq"]
    subprocess.run(zipped, cwd=ROOT, check=True)
    return directory


async def send_and_ack(servers: str, prefix: str) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        await producer.send_many("mails", [b"%d" % number for number in range(MESSAGES)])
    acked = 0
    async with marq.Consumer("mails", servers, prefix=prefix) as consumer:
        while acked < MESSAGES:
            messages = await consumer.receive(100, wait=20)
            assert messages
            await consumer.ack(messages)
            acked += len(messages)


def submit(
    cluster: Cluster, directory: Path, job: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    settings = {**SETTINGS, "spark.eventLog.dir": directory.as_uri()}
    given = [f"--conf={name}={value}" for name, value in settings.items()]
    return subprocess.run(
        [
            *(str(SPARK / "bin" / "spark-submit"), "--master", cluster.master, *given),
            *("--py-files", "pipeline.zip", "__main__.py", *job),
        ],
        cwd=directory,
        env={**cluster.environment, **environment, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def executors(directory: Path) -> set[str]:
    """Return the executors that ran tasks of the last job."""
    [log] = directory.glob("app-*")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    ends = [event for event in events if event["Event"] == "SparkListenerTaskEnd"]
    assert {end["Task End Reason"]["Reason"] for end in ends} == {"Success"}
    return {end["Task Info"]["Executor ID"] for end in ends}


@pytest.mark.verify
@pytest.mark.timeout(1_200)
async def test_both_workers_do_the_work_of_a_job_that_is_submitted(
    cluster: Cluster, submitted: Path, servers: str, prefix: str, environment: dict[str, str]
) -> None:
    await send_and_ack(servers, prefix)
    cluster.wait()

    ingest = submit(cluster, submitted, ["ingest"], environment)

    assert ingest.returncode == 0, ingest.stdout + ingest.stderr
    assert re.search(
        rf"^ingested \d+ markers, 0 corrupt, {MESSAGES} messages, 0 dead_letters in ", ingest.stdout, re.MULTILINE
    )
    assert " INFO " not in ingest.stderr
    assert executors(submitted) == {"0", "1"}

    audit = submit(cluster, submitted, ["audit", "--json", "--drained"], environment)

    assert audit.returncode == 0, audit.stdout + audit.stderr
    found = json.loads(audit.stdout)
    assert [found[name] for name in ("sent", "acked", "open", "lost", "duplicates")] == [MESSAGES, MESSAGES, 0, 0, 0]
    assert found["right"]
    assert executors(submitted) == {"0", "1"}
    for name in ("worker-1", "worker-2"):  # each had an executor of both
        assert len(list((cluster.directory / name / "work").glob("app-*/*/stderr"))) == 2
