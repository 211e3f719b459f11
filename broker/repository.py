"""Gets jars from the Maven repository that the user's tools are set up for.

Which files is settled by kafka.sha256, so nothing is resolved here: every artifact is asked for by its exact version,
without its dependencies. Three ways, the first that works: Maven; a downloader from the Python registry
(maven-artifact); Maven from the system's package manager.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from broker import command, packages, system
from broker.errors import BrokerError

# Pinned, so that a set-up next year runs what was tried.
COPY_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

_DOWNLOAD = """
import sys
from maven_artifact.artifact import Artifact
from maven_artifact.downloader import Downloader
downloader = Downloader(*sys.argv[1:])
for line in sys.stdin:
    coordinates, path = line.rstrip().split(" ", 1)
    downloader.download(Artifact.parse(coordinates), path)
"""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar of a Maven repository."""

    group: str
    name: str
    version: str

    @classmethod
    def from_path(cls, path: str) -> "Artifact":
        """From its path in a repository: group/in/parts/name/version/name-version.jar. Raises ValueError."""
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


Fetch = Callable[[Sequence[Artifact], Path], None]


def ways() -> Iterator[tuple[str, Fetch]]:
    """The ways to fetch, by name, the best first. What one needs is installed when its turn comes."""
    if shutil.which("mvn"):
        yield "Maven", _by_maven
        # A broken download in the user's local repository would be copied for ever.
        yield "Maven with an empty local repository", _by_maven_anew
    yield "maven-artifact", _by_maven_artifact
    if not shutil.which("mvn") and system.can_install():
        yield "Maven from the system's package manager", _by_system_maven


def _by_maven(artifacts: Sequence[Artifact], directory: Path, *options: str) -> None:
    project = directory / "pom.xml"
    project.write_text(_project(artifacts), encoding="utf-8")
    # -C: Maven compares the repository's own checksums too, and stops where they differ.
    arguments: list[str | Path] = ["--batch-mode", "--quiet", "-C", "--file", project, *options, COPY_GOAL]
    layout = ["-Dmdep.useRepositoryLayout=true", f"-DoutputDirectory={directory}"]
    command.run("fetching the jars with Maven", ["mvn", *arguments, *layout], environment=_quiet())


def _by_maven_anew(artifacts: Sequence[Artifact], directory: Path) -> None:
    _by_maven(artifacts, directory, f"-Dmaven.repo.local={directory / 'empty'}")


def _by_maven_artifact(artifacts: Sequence[Artifact], directory: Path) -> None:
    tools = packages.install("maven-artifact")
    for artifact in artifacts:
        (directory / artifact.path).parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{artifact.coordinates} {directory / artifact.path}\n" for artifact in artifacts)
    repository = os.environ.get("MARQ_MAVEN_REPOSITORY")
    command.run(
        "fetching the jars with maven-artifact",
        [sys.executable, "-c", _DOWNLOAD, *([repository] if repository else [])],
        stdin=lines,
        environment={"PYTHONPATH": str(tools)},
    )


def _by_system_maven(artifacts: Sequence[Artifact], directory: Path) -> None:
    system.install(["maven"])
    if not shutil.which("mvn"):
        raise BrokerError("the system's package manager installed Maven, but there is no mvn on PATH: add it there")
    _by_maven(artifacts, directory)


def _quiet() -> dict[str, str]:
    # Maven colours even "nothing to say" when it is not asked not to.
    return {"MAVEN_OPTS": f"{os.environ.get('MAVEN_OPTS', '')} -Dstyle.color=never".strip()}


def _project(artifacts: Sequence[Artifact]) -> str:
    dependencies = "".join(_dependency(artifact) for artifact in artifacts)
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>marq</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>\n"
    )


def _dependency(artifact: Artifact) -> str:
    return (
        f"<dependency><groupId>{escape(artifact.group)}</groupId><artifactId>{escape(artifact.name)}</artifactId>"
        f"<version>{escape(artifact.version)}</version>"
        "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions></dependency>"
    )
