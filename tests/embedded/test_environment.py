"""The virtual environment and the Makefile's first steps, on machines that lack something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marq_worker.broker import environment
from marq_worker.broker.downloads import ToolFailed
from marq_worker.broker.errors import BrokerError
from tests.embedded.machines import shell_script

ROOT = Path(__file__).parents[2]


@pytest.mark.verify
def test_an_environment_is_made_once_for_a_lock_and_again_for_another_which_takes_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, venv = tmp_path / "lock.txt", tmp_path / "venv"
    lock.write_text("# nothing\n")
    environment.ensure(lock, venv)
    kept = venv / "kept"
    kept.touch()

    environment.ensure(lock, venv)
    assert kept.exists()

    lock.write_text(f"marq-absent==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_RETRIES", "1")  # pip does not name the network if it may not try again
    with pytest.raises(ToolFailed) as failed:
        environment.ensure(lock, venv)

    assert "the registry cannot be reached: check the network" in str(failed.value)
    assert not kept.exists()
    assert list(venv.glob("locked-*")) == []


def test_a_python_without_venv_says_which_package_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = shell_script(tmp_path / "python3", "echo 'The virtual environment was not created: ensurepip'; exit 1")
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "lock.txt").touch()

    with pytest.raises(BrokerError, match="apt-get install python3-venv"):
        environment.ensure(tmp_path / "lock.txt", tmp_path / "venv")


def test_make_with_a_python_too_old_names_it_and_what_to_do(tmp_path: Path) -> None:
    old = shell_script(tmp_path / "python3.9", 'test "$1" = --version && echo Python 3.9.2 && exit; test "$2" = ""')

    result = _make("setup", f"PYTHON={old}")

    assert result.returncode != 0
    assert "error: Python 3.9.2 is too old: Marq needs 3.11 or newer; install it" in result.stderr


def test_make_with_a_python_that_is_not_there_says_so(tmp_path: Path) -> None:
    result = _make("setup", f"PYTHON={tmp_path / 'python3'}")

    assert result.returncode != 0
    assert f"error: there is no {tmp_path / 'python3'}: install Python 3.11 or newer" in result.stderr


def test_make_help_names_every_target() -> None:
    listed = {line.split()[1] for line in _make("help").stdout.splitlines()}

    assert listed >= {"setup", "demo", "test", "broker", "bench", "simulate", "mutants", "lint", "clean", "lock"}


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without the variables of the make that runs these tests, which would hand its own flags down.
    clean = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
