"""``findings/run``, with findings of this test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    script = shutil.copy(ROOT / "findings" / "run", tmp_path)
    (tmp_path / "broker-says-so.sh").write_text("echo 'Kafka 4.3.1: as stated'\n")
    (tmp_path / "client-waits.sh").write_text("echo 'expected 3 retries, saw 1'\nexit 1\n")

    def call(*names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *names], capture_output=True, text=True, timeout=180, check=False)

    return call


def test_all_findings_are_run_and_one_that_no_longer_holds_shows_its_output(run: Run) -> None:
    done = run()

    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert rows == [
        ["finding", "result"],
        ["broker-says-so", "holds"],
        ["client-waits", "FAILED"],
        ["expected", "3"],
    ]
    assert done.returncode == 1


def test_named_findings_are_run_alone(run: Run) -> None:
    done = run("broker-says-so")

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["finding", "broker-says-so"]
    assert done.returncode == 0


def test_an_unknown_name_is_refused(run: Run) -> None:
    done = run("broker-says-no")

    assert (done.returncode, done.stdout) == (2, "")
    assert "no finding broker-says-no" in done.stderr


def test_each_finding_of_the_project_can_be_run_and_says_what_it_shows() -> None:
    scripts = sorted((ROOT / "findings").glob("*.sh"))

    for script in scripts:
        lines = script.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "#!/usr/bin/env bash", script.name
        assert lines[1].startswith("# "), script.name
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0, script.name
