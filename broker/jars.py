"""Kafka's jars: kafka.sha256 says which files, a directory in the cache has them, and every start checks the sums.

The sums of all files take about 0.05 s, so there is no stamp that could be wrong. Other lists of that form are fetched
in the same way (`JarList`).
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from broker import cache, command, repository
from broker.errors import BrokerError
from broker.repository import Artifact

SUMS = Path(__file__).with_name("kafka.sha256")
VERSION = "4.3.1"


@dataclass(frozen=True, slots=True)
class JarList:
    """Jars by their sums. `name` is that of their directory in the cache; `file` is for messages."""

    name: str
    file: str
    sums: Mapping[str, str]

    @property
    def directory(self) -> Path:
        return cache.directory() / self.name


def class_path() -> str:
    """Java's class path of the verified jars, fetched first where one is missing or damaged. Raises BrokerError."""
    directory = ensure()
    return os.pathsep.join(str(directory / path) for path in read_sums())


def read_sums(file: Path = SUMS) -> dict[str, str]:
    """Path in a Maven repository -> SHA-256, in the file's order; the file is one that `sha256sum -c` takes."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines() if not line.startswith("#"))
    return {path: digest for digest, path in lines}


def read_list(file: Path) -> JarList:
    """A list whose first line is a comment that begins with its name. Raises BrokerError."""
    try:
        first, _, _ = file.read_text(encoding="ascii").partition("\n")
        sums = read_sums(file)
    except (OSError, ValueError) as error:
        raise BrokerError(f"{file} is no list of jars: {error}") from error
    mark, name = [*first.split(), "", ""][:2]
    if mark != "#" or not name:
        raise BrokerError(f"{file}: expected a first line of the form '# NAME', the directory's name in the cache")
    return JarList(name.rstrip(":;"), file.name, sums)


def ensure(report: Callable[[str], None] = lambda _: None, sums: Mapping[str, str] | None = None) -> Path:
    """Have every jar of Kafka in the cache with the right sum. Raises BrokerError: no registry, no room, wrong sums."""
    return ensure_list(JarList(f"kafka-{VERSION}", SUMS.name, read_sums() if sums is None else sums), report)


def ensure_list(jars: JarList, report: Callable[[str], None] = lambda _: None) -> Path:
    """Have every jar of a list in the cache with the right sum. Raises BrokerError as `ensure`."""
    target = jars.directory
    try:
        wanted = _missing_or_damaged(target, jars.sums)
        if wanted:
            _fetch(wanted, jars, report)
    except OSError as error:
        raise cache.cannot_write(error, target) from error
    return target


def _fetch(wanted: list[str], jars: JarList, report: Callable[[str], None]) -> None:
    """Each way in turn for what is still wanted; the files appear in the cache whole and verified, or not at all."""
    target = jars.directory
    target.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name, fetch in repository.ways():
        report(f"fetching {len(wanted)} jars of {jars.name} with {name}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            try:
                fetch([Artifact.from_path(path) for path in wanted], Path(scratch))
            except command.Failed as failure:
                problems.append(failure.sentence())
            except BrokerError as error:
                problems.append(str(error))
            wanted = _move_verified(wanted, Path(scratch), target, jars.sums)
        if not wanted:
            return
        problems.append(f"{name} brought no {', '.join(wanted[:3])} with the sum that {jars.file} names")
    advice = "what to do: install Maven (mvn on PATH) and check that it reaches its repository, then run it again"
    raise BrokerError("\n".join([f"The jars of {jars.name} cannot be had.", *problems, advice]))


def _move_verified(wanted: list[str], source: Path, target: Path, sums: Mapping[str, str]) -> list[str]:
    """Move the right ones; returns those still wanted."""
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
