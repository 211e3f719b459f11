"""Jobs in processes of their own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Time for a loaded machine to start Spark and begin the work; an idle one takes a tenth.
LIMIT_SECONDS = 400
#: As on the smallest machine that the pipeline is made for; processes of tests share one.
SETTINGS = {"PYSPARK_SUBMIT_ARGS": "--master local[2] --driver-memory 1g pyspark-shell"}


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that has only these settings of Marq and Spark."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MARQ_", "PYSPARK_", "SPARK_")) or name == "MARQ_CACHE"
    }
    return {**kept, "PYTHONPATH": str(ROOT), **settings}


def run(words: Sequence[str], directory: Path, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory to its end."""
    return subprocess.run(
        [sys.executable, *words], cwd=directory, env=environment(settings), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


@contextlib.contextmanager
def killed(words: str, settings: Mapping[str, str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job, and kill it with its Java (SIGKILL) at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *shlex.split(words)],
        cwd=directory, env=environment({**SETTINGS, **settings}), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_when(pattern: str, data: Path, words: str, settings: Mapping[str, str], directory: Path) -> None:
    """Start a job, and kill it as soon as the data directory has a file or directory like this."""
    with killed(words, settings, directory) as process:
        limit = time.monotonic() + LIMIT_SECONDS
        while not any(data.glob(pattern)):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.002)
