"""Jobs that are killed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.pipeline.conftest import ROOT, SETTINGS


@contextlib.contextmanager
def started(job: str, words: str, settings: Mapping[str, str], directory: Path) -> Iterator[None]:
    """A job in a process of its own, which is killed at the end, with its Java."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MARQ_", "PYSPARK_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", job, *shlex.split(words)],
        env={**kept, **SETTINGS, "PYTHONPATH": str(ROOT), **settings}, cwd=directory, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
