"""The command line: output and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from marq.wire.errors import ConfigError
from pipeline import cli
from pipeline.errors import PipelineError
from tests.pipeline.conftest import Command
from tests.pipeline.processes import ROOT, run

JOB = "try_out"
STOPPED = "Spark's Java process was ended or ran out of memory: run the job again"
#: Errors of jobs whose Java process was ending (Spark 4.2.0).
ENDING_JAVA = (
    "org.apache.spark.SparkException: Job 3 cancelled because SparkContext was shut down",
    "java.lang.IllegalStateException: LiveListenerBus is stopped.",
    'java.lang.NullPointerException: … the return value of "org.apache.spark.SparkContext.dagScheduler()" is null',
)
Job = Callable[[Callable[[Namespace], int]], None]

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Adds a job that runs a function of the test."""

    def make(run: Callable[[Namespace], int]) -> None:
        module = ModuleType(JOB)
        module.arguments = lambda parser: parser.add_argument(  # type: ignore[attr-defined]
            "--number", type=int, default=0
        )
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"pipeline.jobs.{JOB}", module)
        monkeypatch.setitem(cli.JOBS, JOB, "do what a test wants")

    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    return make


def raising(error: BaseException) -> Callable[[Namespace], int]:
    def run(arguments: Namespace) -> int:
        raise error

    return run


def test_a_process_prints_its_result_or_one_line_and_ends_with_the_code(tmp_path: Path) -> None:
    program = ["-W", "error", "-m", "pipeline", "plan"]

    planned = run([*program, "--rate", "emails=2000", "--size", "1KiB", "--run", "50ms", "--json"], tmp_path, {})
    refused = run([*program, "--rate", "0"], tmp_path, {})

    assert (planned.returncode, planned.stdout[:1], planned.stderr) == (0, "{", "")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == ("error: --rate 0: expected messages a second, more than 0, as in 5000 or emails=2000\n")


def test_the_help_lists_each_job_without_importing_spark() -> None:
    program = "import sys; from pipeline.cli import main; main(['--help']); print('pyspark' in sys.modules)"

    done = run(["-c", program], ROOT, {})

    *lines, imported = done.stdout.splitlines()
    assert imported == "False"
    modules = {path.stem for path in (ROOT / "pipeline" / "jobs").glob("*.py")} - {"__init__"}
    assert {line.split()[0] for line in lines[4:]} == cli.JOBS.keys() == modules


def test_an_unknown_job_is_named_with_the_existing_ones(command: Command, job: Job) -> None:
    refusal = command("injest").refusal

    assert refusal.startswith("there is no job 'injest': expected one of ingest, lifecycle, ")


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_is_the_jobs_own(command: Command, job: Job, code: int) -> None:
    job(lambda arguments: arguments.number)

    assert command(f"{JOB} --number {code}").code == code


def test_the_data_directory_is_the_argument_else_the_variable_else_the_default(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    job(lambda arguments: seen.append(arguments.data) or 0)

    monkeypatch.delenv("MARQ_PIPELINE_DATA", raising=False)
    cli.main([JOB])
    monkeypatch.setenv("MARQ_PIPELINE_DATA", "/one")
    cli.main([JOB])
    cli.main([JOB, "--data", "hdfs://two"])

    assert seen == [".marq/pipeline", "/one", "hdfs://two"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PipelineError("no such thing: do that"), "no such thing: do that"),
        (ConfigError("no such thing: do that"), "no such thing: do that"),
        (
            ModuleNotFoundError("No module named 'pandas'", name="pandas.core"),
            "the Python package pandas is not installed: run `make setup`",
        ),
        (
            ValueError("first line\nsecond line"),
            f"first line (details: python -m pipeline {JOB} … --traceback)",
        ),
        *[
            (error, f"{STOPPED} (details: python -m pipeline {JOB} … --traceback)")
            for error in (ConnectionRefusedError(111, "refused"), *map(RuntimeError, ENDING_JAVA))
        ],
    ],
    ids=["ours", "marq's", "package", "other", "no-java", "stopped", "no-bus", "no-scheduler"],
)
def test_an_error_is_one_line(command: Command, job: Job, error: Exception, sentence: str) -> None:
    job(raising(error))

    assert command(JOB).refusal == sentence


def test_the_traceback_is_printed_on_request(command: Command, job: Job) -> None:
    job(raising(ValueError("first line")))

    done = command(f"{JOB} --traceback")

    assert done.code == 2
    assert done.errors.startswith("Traceback (most recent call last):")
    assert done.errors.endswith("error: first line\n")


def test_ctrl_c_ends_it_quietly(command: Command, job: Job) -> None:
    job(raising(KeyboardInterrupt()))

    assert command(JOB) == (130, "", "")


def test_a_closed_standard_output_ends_it_quietly() -> None:
    program = "import sys; sys.path.insert(0, '.'); from pipeline.cli import main; sys.exit(main(['--help']))"
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=180
    )
    os.close(write_end)

    assert (done.returncode, done.stderr) == (141, "")


def test_settings_of_spark_follow_those_of_the_environment(
    command: Command, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(lambda arguments: 0)
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[1] pyspark-shell")

    assert command(f"{JOB} --master local[2] --driver-memory 1g --conf 'spark.ui.port=1 2'").code == 0

    assert os.environ["PYSPARK_SUBMIT_ARGS"] == (
        "--master 'local[1]' --driver-memory 1g --master 'local[2]' --conf 'spark.ui.port=1 2' pyspark-shell"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--driver-memory much", "--driver-memory much: expected a size such as 2g or 1500m"),
        ("--conf ui.port=1", "--conf ui.port=1: expected spark.NAME=VALUE"),
    ],
)
def test_an_invalid_setting_of_spark_is_refused(command: Command, job: Job, words: str, sentence: str) -> None:
    job(lambda arguments: 0)

    assert command(f"{JOB} {words}").refusal == sentence


def test_options_of_a_spark_that_spark_submit_started_are_refused(
    command: Command, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    job(lambda arguments: 0)

    assert "give --master to it, before the file" in command(f"{JOB} --master local[2]").refusal
