"""The jobs of the audit: how their output is read, and how they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lab.audit import JobsLog, _wait, audit
from lab.program import Program
from marq.settings.client import ClientSettings

STATISTICS = {"sent": 5, "wrong": []}


def ended(job: str, output: str = "", code: int = 0) -> list[dict[str, Any]]:
    return [{"job": job}, {"job": job, "code": code, "output": output}]


def taken(*told: dict[str, Any] | str, progress: Any = None) -> JobsLog:
    jobs_log = JobsLog(progress)
    for line in told:
        jobs_log.take(line if isinstance(line, str) else json.dumps(line))
    return jobs_log


def test_an_audit_is_read_from_the_output_of_its_jobs() -> None:
    jobs_log = taken(*ended("ingest"), *ended("lifecycle"), *ended("audit", json.dumps(STATISTICS), 1))

    audit = jobs_log.audit("", plots=False)

    assert (audit.statistics, audit.failure, audit.ingested, audit.plots) == (STATISTICS, "", True, False)


def test_jobs_and_finished_tasks_are_shown() -> None:
    progress = Mock()

    taken({"job": "ingest"}, {"stage": 3, "done": 1, "tasks": 4}, "    7.0 s  markers: 5 rows", progress=progress)

    assert [call.args[0] for call in progress.method_calls] == [
        "audit: ingest",
        "ingest: stage 3, 1 of 4 tasks",
        "ingest: 7.0 s  markers: 5 rows",
    ]


def test_an_audit_whose_job_failed_after_the_ingestion_can_be_repeated_from_the_data() -> None:
    jobs_log = taken(*ended("ingest"), {"job": "lifecycle"})

    audit = jobs_log.audit("lifecycle was interrupted", plots=True)

    assert (audit.failure, audit.ingested) == ("lifecycle was interrupted", True)


def test_missing_plots_do_not_change_the_audit() -> None:
    jobs_log = taken(*ended("ingest"), *ended("audit", json.dumps(STATISTICS)), *ended("stats", code=2))

    audit = jobs_log.audit("stats: error: the disk is full", plots=True)

    assert (audit.failure, audit.plots, audit.plots_failure) == ("", False, "stats: error: the disk is full")


def program(folder: Path, text: str) -> Program:
    return Program("audit", ["-c", text], {}, folder / "log")


def test_a_job_that_fails_is_named_with_its_last_message(tmp_path: Path) -> None:
    text = "import sys; print('{\"job\": \"ingest\"}'); sys.exit('error: no broker')"
    with program(tmp_path, text) as failing:
        failure = _wait(failing, JobsLog(), 60)

    assert failure == "ingest: error: no broker"


def test_a_job_that_is_killed_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with program(tmp_path, "import os; print('1 dead letter', flush=True); os.kill(os.getpid(), 9)") as failing:
        failure = _wait(failing, JobsLog(), 60)

    assert failure == "ingest: its process ended with exit code -9"


def test_a_job_without_progress_is_ended(tmp_path: Path) -> None:
    with program(tmp_path, "import time; time.sleep(600)") as stuck:
        failure = _wait(stuck, JobsLog(), 0.1)

    assert failure == "ingest made no progress for 0.1 s"
    assert not stuck.running


def test_the_log_of_a_job_that_fails_is_kept_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.audit.AUDIT_JOBS", (("no-such-job",),))

    result = audit(ClientSettings.read("127.0.0.1:1", {"prefix": "p"}, environment={}), tmp_path, [])

    assert result.failure.startswith("no-such-job: error: there is no job 'no-such-job'")
    assert result.failure.endswith(f" (log: {tmp_path}/audit.log)")
    assert "there is no job 'no-such-job'" in (tmp_path / "audit.log").read_text()


def test_ctrl_c_ends_the_jobs_and_not_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []

    def interrupted(program: Program, *_: Any) -> str:
        programs.append(program)
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.audit._wait", interrupted)

    result = audit(ClientSettings.read("127.0.0.1:1", {"prefix": "p"}, environment={}), tmp_path, [])

    assert (result.failure, result.needs_topics) == ("ingest was interrupted", True)
    assert not programs[0].running
