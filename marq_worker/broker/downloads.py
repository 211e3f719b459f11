"""Downloads for the broker: tools, and Kafka's jars from the Maven repository that the user's tools are set up for.

A list of SHA-256 sums names the jars, so nothing is resolved: every artifact is requested by its exact version, without
dependencies. They are kept in the cache, and every start checks the sums (0.05 s). Three ways to fetch jars are
tried: Maven; a downloader from the Python registry (maven-artifact); Maven from the system's package manager.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from xml.sax.saxutils import escape

from marq_worker.broker.errors import BrokerError

VERSION = "4.4.0"
SUMS = Path(__file__).with_name("kafka.sha256")
LOCKS = Path(__file__).with_name("locks")
LIMIT_SECONDS = 900.0
TAIL_LINES = 8

Report = Callable[[str], None]

# --- tools ------------------------------------------------------------------------------------------------------------

# Output of the tools, and its meaning for the user; the first match counts. Without a registry, pip also prints "No
# matching distribution", so that comes last.
_UNREACHABLE = "the registry cannot be reached: check the network, the proxy and the mirror settings, then run it again"
_CAUSES = (
    *dict.fromkeys(
        (
            "Temporary failure in name resolution",
            "Name or service not known",
            "Unknown host",
            "UnknownHostException",
            "Failed to resolve",
            "Could not transfer artifact",
            "Failed to establish a new connection",
            "Connection refused",
            "Connection timed out",
            "Network is unreachable",
            "ProxyError",
            "Could not resolve",
        ),
        _UNREACHABLE,
    ).items(),
    ("No space left on device", "the disk is full: free space, or set MARQ_CACHE to a directory on another disk"),
    (
        "THESE PACKAGES DO NOT MATCH THE HASHES",
        "the registry serves files that differ from the locked ones: do not use them",
    ),
    ("No matching distribution", "the registry has no such package for this machine and Python, or could not be read"),
)


class ToolFailed(BrokerError):
    """A tool failed; the text has its cause, what to do, and the end of the ``output``."""

    def __init__(self, what: str, output: str) -> None:
        cause = next((meaning for printed, meaning in _CAUSES if printed in output), "see its output")
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        super().__init__(f"{what} failed: {cause}\n{tail}")
        self.output = output


def run_tool(
    what: str, command: Sequence[str | Path], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> None:
    """Run a command; ``environment`` is added to this process's. Raises ToolFailed."""
    try:
        result = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except OSError as error:
        raise ToolFailed(what, str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise BrokerError(f"{what} took over {LIMIT_SECONDS:g} s: check the network and run it again") from error
    if result.returncode != 0:
        raise ToolFailed(what, result.stdout)


# How each package manager installs; the first one on PATH is the system's.
_MANAGERS = {
    "apt-get": ["apt-get", "install", "--yes", "--no-install-recommends"],
    "dnf": ["dnf", "install", "--assumeyes"],
    "apk": ["apk", "add"],
}


def system_manager() -> str | None:
    """Return apt-get, dnf or apk if this process may use it: only root may, because set-up asks for no password."""
    return next((name for name in _MANAGERS if shutil.which(name)), None) if os.geteuid() == 0 else None


def install_system_package(name: str) -> None:
    """Install a package with the system's package manager. Raises ToolFailed."""
    manager = system_manager()
    assert manager is not None, "check system_manager() first"
    what, quiet = f"installing {name} with {manager}", {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run_tool(what, [*_MANAGERS[manager], name], environment=quiet)
    except ToolFailed:
        if manager != "apt-get":
            raise
        # A fresh container lacks package lists, and old lists may name packages that were removed.
        run_tool("apt-get update", ["apt-get", "update"], environment=quiet)
        run_tool(what, [*_MANAGERS[manager], name], environment=quiet)


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return $MARQ_CACHE, $XDG_CACHE_HOME/marq or ~/.cache/marq, which all checkouts of a user share."""
    own, shared = environment.get("MARQ_CACHE"), environment.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().resolve()
    # The XDG specification says to ignore a relative path.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "marq"
    return Path.home() / ".cache" / "marq"


def cannot_write(error: OSError, path: Path) -> BrokerError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BrokerError(f"no space left for {path}: free space, or set MARQ_CACHE to a disk with 300 MB free")
    return BrokerError(f"cannot write {path} ({error.strerror}): set MARQ_CACHE to a directory that you can write to")


def package_directory(name: str) -> Path:
    """Return the directory of the Python packages in `locks/NAME.txt`; compiled ones differ by Python version."""
    lock = sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()[:12]
    return cache_directory() / f"{name}-{lock}-{sys.implementation.cache_tag}"


def install_packages(name: str) -> Path:
    """Install the Python packages in `locks/NAME.txt`, checked against its hashes. Raises BrokerError."""
    target = package_directory(name)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            new = Path(scratch) / "packages"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            lock = LOCKS / f"{name}.txt"
            run_tool(f"installing {name} with pip", [*pip, "--require-hashes", "--target", new, "-r", lock])
            new.rename(target)
    except OSError as error:
        if target.is_dir():
            return target  # another set-up was quicker
        raise cannot_write(error, target) from error
    return target


# --- jars -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar of a Maven repository."""

    group: str
    name: str
    version: str

    @classmethod
    def from_path(cls, path: str) -> "Artifact":
        """Read a path in a repository: group/in/parts/name/version/name-version.jar. Raises ValueError."""
        *group, name, version, file = path.split("/")
        artifact = cls(".".join(group), name, version)
        if artifact.path != path:
            raise ValueError(f"{path!r} is not where a Maven repository keeps {file!r}")
        return artifact

    @property
    def path(self) -> str:
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.name}-{self.version}.jar"

    @property
    def coordinates(self) -> str:
        return f"{self.group}:{self.name}:{self.version}"


@dataclass(frozen=True, slots=True)
class JarList:
    """Jars by path in a Maven repository, with their sums; ``name`` is their directory in the cache."""

    name: str
    sums: Mapping[str, str]

    @classmethod
    def read(cls, file: Path = SUMS) -> "JarList":
        """Read a file for `sha256sum -c` whose first line is a comment with the name. Raises BrokerError."""
        try:
            first, *lines = file.read_text(encoding="ascii").splitlines() or [""]
            mark, name = [*first.split(), "", ""][:2]
            if mark != "#" or not name.rstrip(":;"):
                raise ValueError("expected a first line of the form '# NAME', the directory's name in the cache")
            pairs = (line.split() for line in lines if not line.startswith("#"))
            return cls(name.rstrip(":;"), {path: digest for digest, path in pairs})
        except (OSError, ValueError) as error:
            raise BrokerError(f"{file} is not a list of jars: {error}") from error

    @property
    def directory(self) -> Path:
        return cache_directory() / self.name


def class_path() -> str:
    """Return Java's class path of Kafka's jars; missing or damaged ones are fetched. Raises BrokerError."""
    kafka = JarList.read()
    directory = ensure_jars(kafka)
    return os.pathsep.join(str(directory / path) for path in kafka.sums)


def ensure_jars(jars: JarList, report: Report = lambda _: None) -> Path:
    """Fetch the jars that the cache lacks; return their directory. Raises BrokerError."""
    target = jars.directory
    try:
        wanted = _missing_or_damaged(target, jars.sums)
        if wanted:
            _fetch(wanted, jars, report)
    except OSError as error:
        raise cannot_write(error, target) from error
    return target


def _fetch(wanted: list[str], jars: JarList, report: Report) -> None:
    """Try each way in turn; files appear in the cache whole and verified, or not at all."""
    target = jars.directory
    target.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name, fetch in _ways():
        report(f"fetching {len(wanted)} jars of {jars.name} with {name}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            try:
                fetch([Artifact.from_path(path) for path in wanted], Path(scratch))
            except BrokerError as error:
                problems.append(str(error))
            wanted = _move_verified(wanted, Path(scratch), target, jars.sums)
        if not wanted:
            return
        problems.append(f"{name} brought no {', '.join(wanted[:3])} with the sum in the list of {jars.name}")
    advice = "what to do: install Maven (mvn on PATH) and check that it reaches its repository, then run it again"
    raise BrokerError("\n".join([f"cannot fetch the jars of {jars.name}", *problems, advice]))


def _move_verified(wanted: list[str], source: Path, target: Path, sums: Mapping[str, str]) -> list[str]:
    """Move the correct files; return the others."""
    left = _missing_or_damaged(source, {path: sums[path] for path in wanted})
    for path in set(wanted) - set(left):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).replace(target / path)
    return left


def _missing_or_damaged(directory: Path, sums: Mapping[str, str]) -> list[str]:
    return [path for path, digest in sums.items() if _sum(directory / path) != digest]


def _sum(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


# --- ways to fetch jars -----------------------------------------------------------------------------------------------

# Pinned, so that set-up stays reproducible.
_COPY_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

_DOWNLOAD = """
import sys
from maven_artifact.artifact import Artifact
from maven_artifact.downloader import Downloader
downloader = Downloader(*sys.argv[1:])
for line in sys.stdin:
    coordinates, path = line.rstrip().split(" ", 1)
    downloader.download(Artifact.parse(coordinates), path)
"""

_DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>"
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions></dependency>"
)
_PROJECT = (
    "<project><modelVersion>4.0.0</modelVersion><groupId>marq</groupId><artifactId>jars</artifactId>"
    "<version>1</version><packaging>pom</packaging><dependencies>{}</dependencies></project>\n"
)

Fetch = Callable[[Sequence[Artifact], Path], None]


def _ways() -> Iterator[tuple[str, Fetch]]:
    """Yield the ways to download, best first; the tools of each are installed when its turn comes."""
    if shutil.which("mvn"):
        yield "Maven", _by_maven
        # Maven would copy a broken download in the user's local repository again and again.
        yield "Maven with an empty local repository", _by_fresh_maven
    yield "maven-artifact", _by_maven_artifact
    if not shutil.which("mvn") and system_manager():
        yield "Maven from the system's package manager", _by_system_maven


def _by_maven(artifacts: Sequence[Artifact], directory: Path, *options: str) -> None:
    dependencies = [
        _DEPENDENCY.format(*map(escape, (artifact.group, artifact.name, artifact.version))) for artifact in artifacts
    ]
    project = directory / "pom.xml"
    project.write_text(_PROJECT.format("".join(dependencies)), encoding="utf-8")
    # -C: Maven also compares the repository's own checksums, and stops where they differ.
    arguments: list[str | Path] = ["--batch-mode", "--quiet", "-C", "--file", project, *options, _COPY_GOAL]
    layout = ["-Dmdep.useRepositoryLayout=true", f"-DoutputDirectory={directory}"]
    # Maven colours even empty output.
    plain = {"MAVEN_OPTS": f"{os.environ.get('MAVEN_OPTS', '')} -Dstyle.color=never".strip()}
    run_tool("fetching the jars with Maven", ["mvn", *arguments, *layout], environment=plain)


def _by_fresh_maven(artifacts: Sequence[Artifact], directory: Path) -> None:
    _by_maven(artifacts, directory, f"-Dmaven.repo.local={directory / 'empty'}")


def _by_maven_artifact(artifacts: Sequence[Artifact], directory: Path) -> None:
    packages = install_packages("maven-artifact")
    for artifact in artifacts:
        (directory / artifact.path).parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{artifact.coordinates} {directory / artifact.path}\n" for artifact in artifacts)
    repository = os.environ.get("MARQ_MAVEN_REPOSITORY")
    command = [sys.executable, "-c", _DOWNLOAD, *([repository] if repository else [])]
    run_tool("fetching the jars with maven-artifact", command, stdin=lines, environment={"PYTHONPATH": str(packages)})


def _by_system_maven(artifacts: Sequence[Artifact], directory: Path) -> None:
    install_system_package("maven")
    if not shutil.which("mvn"):
        raise BrokerError("the system's package manager installed Maven, but mvn is not on PATH: add it")
    _by_maven(artifacts, directory)
