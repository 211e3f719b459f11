"""Kafka's jars: kafka.sha256 says which files, a directory in the cache has them, and every start checks the sums.

The sums of all files take about 0.05 s, so there is no stamp that could be wrong.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path

from broker import cache, command, repository
from broker.errors import BrokerError
from broker.repository import Artifact

SUMS = Path(__file__).with_name("kafka.sha256")
VERSION = "4.3.1"


def class_path() -> str:
    """Java's class path of the verified jars, fetched first where one is missing or damaged. Raises BrokerError."""
    directory = ensure()
    return os.pathsep.join(str(directory / path) for path in read_sums())


def directory() -> Path:
    return cache.directory() / f"kafka-{VERSION}"


def read_sums(file: Path = SUMS) -> dict[str, str]:
    """Path in a Maven repository -> SHA-256, in the file's order; the file is one that `sha256sum -c` takes."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {path: digest for digest, path in lines}


def ensure(report: Callable[[str], None] = lambda _: None, sums: Mapping[str, str] | None = None) -> Path:
    """Have every jar in the cache with the right sum. Raises BrokerError: no registry, no room, wrong sums."""
    sums = read_sums() if sums is None else sums
    target = directory()
    try:
        wanted = _missing_or_damaged(target, sums)
        if wanted:
            _fetch(wanted, target, sums, report)
    except OSError as error:
        raise cache.cannot_write(error, target) from error
    return target


def _fetch(wanted: list[str], target: Path, sums: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Each way in turn for what is still wanted; the files appear in the cache whole and verified, or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name, fetch in repository.ways():
        report(f"fetching {len(wanted)} jars of Kafka {VERSION} with {name}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            try:
                fetch([Artifact.from_path(path) for path in wanted], Path(scratch))
            except command.Failed as failure:
                problems.append(failure.sentence())
            except BrokerError as error:
                problems.append(str(error))
            wanted = _move_verified(wanted, Path(scratch), target, sums)
        if not wanted:
            return
        problems.append(f"{name} brought no {', '.join(wanted[:3])} with the sum that {SUMS.name} names")
    advice = "what to do: install Maven (mvn on PATH) and check that it reaches its repository, then run it again"
    raise BrokerError("\n".join(["Kafka's jars cannot be had.", *problems, advice]))


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
