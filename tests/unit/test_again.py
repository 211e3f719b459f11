"""Who gets a second chance: a few tests that pass by themselves, and nothing that may have shown a loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import FEW, NOTED

ROOT = Path(__file__).resolve().parents[2]
PASSES, FAILS = "def test_it(): pass", "def test_it(): assert not 'this time either'"


def again(directory: Path, failed: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it after these tests have failed; ``failed``: the text of each by its path."""
    for path, text in failed.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    noted = directory / NOTED
    noted.parent.mkdir(parents=True)
    noted.write_text(json.dumps({f"{path}::test_it": True for path in failed}))
    return subprocess.run(
        [sys.executable, "-m", "tests.again"], cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def test_what_passes_by_itself_is_named(tmp_path: Path) -> None:
    done = again(tmp_path, {"tests/unit/test_one.py": PASSES, "tests/worker/test_two.py": PASSES})

    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert done.stdout.endswith(
        "failed beside others and passed by themselves:"
        " tests/unit/test_one.py::test_it, tests/worker/test_two.py::test_it\n"
    )


def test_what_fails_again_has_failed(tmp_path: Path) -> None:
    done = again(tmp_path, {"tests/unit/test_one.py": PASSES, "tests/worker/test_two.py": FAILS})

    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "passed by themselves" not in done.stdout


@pytest.mark.parametrize(
    "failed",
    [
        {},
        {"tests/unit/test_one.py": PASSES, "tests/faults/test_two.py": PASSES},
        {"tests/simulation/test_one.py": PASSES},
        {f"tests/unit/test_{number}.py": PASSES for number in range(FEW + 1)},
    ],
    ids=["nothing noted", "faults", "simulation", "too many"],
)
def test_there_is_no_second_chance(tmp_path: Path, failed: dict[str, str]) -> None:
    done = again(tmp_path, failed)

    assert (done.returncode, done.stdout) == (1, "")


def test_without_notes_there_is_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.again"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )

    assert done.returncode == 1
