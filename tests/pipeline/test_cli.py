"""The command line: what is printed, and with which code it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from marq.core.errors import ConfigError
from pipeline import cli, jobs
from pipeline.errors import PipelineError

ROOT = Path(__file__).resolve().parents[2]
JOB = "try_out"
SOURCE = f'"""``{JOB}``: what it is for.\n\nMore."""\nraise SystemExit("imported")\n'


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The session that other tests share is not stopped; signals and logging are left as they were."""
    import logging
    import signal

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(cli, "_stop_spark", lambda: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Namespace], int]], None]:
    """A job that does what a test wants."""

    def make(run: Callable[[Namespace], int]) -> None:
        (tmp_path / f"{JOB}.py").write_text(SOURCE)
        module = ModuleType(JOB, f"``{JOB}``: what it is for.")
        module.arguments = lambda parser: _add_number(parser)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{jobs.__name__}.{JOB}", module)
        monkeypatch.setattr(jobs, "__path__", [*jobs.__path__, str(tmp_path)])

    return make


def _add_number(parser: ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=0)


def raising(error: BaseException) -> Callable[[Namespace], int]:
    def run(arguments: Namespace) -> int:
        raise error

    return run


def test_without_a_job_it_lists_them_and_imports_none(capsys: pytest.CaptureFixture[str], job: Callable) -> None:
    job(lambda arguments: 0)
    del sys.modules[f"{jobs.__name__}.{JOB}"]

    assert cli.main([]) == 0

    assert f"  {JOB:10} what it is for\n" in capsys.readouterr().out


def test_the_list_of_jobs_comes_without_spark() -> None:
    program = "import sys; from pipeline.cli import main; main(['--help']); print('pyspark' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180)

    assert done.stdout.splitlines()[-1] == "False"


def test_an_unknown_job_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str], job: Callable) -> None:
    job(lambda arguments: 0)

    assert cli.main(["injest"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: there is no job 'injest': expected one of ")
    assert JOB in error


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_is_the_jobs_own(job: Callable, code: int) -> None:
    job(lambda arguments: arguments.number)

    assert cli.main([JOB, "--number", str(code)]) == code


def test_the_data_directory_is_the_argument_else_the_variable_else_in_the_checkout(
    job: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    job(lambda arguments: seen.append(arguments.data) or 0)

    monkeypatch.delenv("MARQ_PIPELINE_DATA", raising=False)
    cli.main([JOB])
    monkeypatch.setenv("MARQ_PIPELINE_DATA", "/one")
    cli.main([JOB])
    cli.main([JOB, "--data", "hdfs://two"])

    assert seen == [".marq/pipeline", "/one", "hdfs://two"]


@pytest.mark.parametrize("error", [PipelineError("no such thing: do that"), ConfigError("no such thing: do that")])
def test_an_error_of_ours_is_its_sentence_alone(
    capsys: pytest.CaptureFixture[str], job: Callable, error: Exception
) -> None:
    job(raising(error))

    assert cli.main([JOB]) == 2

    assert capsys.readouterr().err == "error: no such thing: do that\n"


def test_any_other_error_is_its_first_line_and_how_to_see_the_whole(
    capsys: pytest.CaptureFixture[str], job: Callable
) -> None:
    job(raising(ValueError("first line\nsecond line")))

    assert cli.main([JOB]) == 2

    assert capsys.readouterr().err == f"error: first line (the whole: python -m pipeline {JOB} … --traceback)\n"


def test_the_whole_is_printed_where_it_is_asked_for(capsys: pytest.CaptureFixture[str], job: Callable) -> None:
    job(raising(ValueError("first line")))

    assert cli.main([JOB, "--traceback"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert error.endswith("error: first line\n")


def test_a_package_that_is_missing_is_named_with_what_to_do(capsys: pytest.CaptureFixture[str], job: Callable) -> None:
    job(raising(ModuleNotFoundError("No module named 'pandas'", name="pandas.core")))

    assert cli.main([JOB]) == 2

    assert capsys.readouterr().err == "error: the Python package pandas is not installed: run `make setup`\n"


def test_ctrl_c_ends_it_quietly(capsys: pytest.CaptureFixture[str], job: Callable) -> None:
    job(raising(KeyboardInterrupt()))

    assert cli.main([JOB]) == 130

    assert capsys.readouterr().err == ""


def test_a_reader_that_went_away_ends_it_quietly() -> None:
    program = "import sys; sys.path.insert(0, '.'); from pipeline.cli import main; sys.exit(main(['--help']))"
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=180
    )
    os.close(write_end)

    assert (done.returncode, done.stderr) == (141, "")


def test_settings_of_spark_go_behind_those_of_the_environment(job: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[1] pyspark-shell")
    job(lambda arguments: 0)

    assert cli.main([JOB, "--master", "local[2]", "--driver-memory", "1g", "--conf", "spark.ui.port=1 2"]) == 0

    assert os.environ["PYSPARK_SUBMIT_ARGS"] == (
        "--master 'local[1]' --driver-memory 1g --master 'local[2]' --conf 'spark.ui.port=1 2' pyspark-shell"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--driver-memory", "much"], "--driver-memory much: expected a size such as 2g or 1500m"),
        (["--conf", "ui.port=1"], "--conf ui.port=1: expected spark.NAME=VALUE"),
    ],
)
def test_a_setting_of_spark_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], job: Callable, words: list[str], sentence: str
) -> None:
    job(lambda arguments: 0)

    assert cli.main([JOB, *words]) == 2

    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_where_spark_submit_started_spark_its_settings_are_for_spark_submit(
    capsys: pytest.CaptureFixture[str], job: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    job(lambda arguments: 0)

    assert cli.main([JOB, "--master", "local[2]"]) == 2

    assert "give --master to it, before the file" in capsys.readouterr().err


def test_every_job_says_in_one_line_what_it_is_for() -> None:
    for line in cli._help(cli._jobs()).splitlines()[4:]:
        name, _, text = line.strip().partition(" ")
        assert text.strip(), name
        assert len(line) < 120
