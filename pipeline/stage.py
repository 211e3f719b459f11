"""Where a load keeps what it sends: rows, rows set aside, and how far it is, in ``DATA/loads/NAME``.

A stage is written to a hidden name and renamed when it is whole: there is all of it, or none. Of two that stage the
same load at the same time one wins, and both send what the winner has. From then on the input is not looked at any
more, so that each row has one number for ever.

``position`` says how many rows are known to be durable. It only saves work: who loses it writes rows again, and
trackers count each once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from marq.core.names import drawn_topic
from pipeline.errors import PipelineError
from pipeline.lake import Lake

_LOADS, _TOLD, _POSITION = "loads", "load.json", "position"


@dataclass(frozen=True)
class Told:
    """What is said of a stage beside its rows; ``drawn`` was drawn for it, and nobody else has it."""

    name: str
    queue: str
    installation: str
    arguments: dict[str, Any]
    input: str | None
    drawn: str
    staged_at_ms: int
    source_partitions: int
    rows: int
    bytes: int
    largest_bytes: int
    bad: dict[str, int]

    @property
    def topic(self) -> str:
        """What stands for a topic in the identities of its rows."""
        return drawn_topic(int.from_bytes(self._digest()[:16]))

    @property
    def holder(self) -> int:
        """Who writes its markers; nobody holds its messages."""
        return int.from_bytes(self._digest()[16:24]) >> 1 | 1

    def _digest(self) -> bytes:
        return hashlib.sha256(f"{self.installation} {self.name} {self.drawn}".encode()).digest()


class Stages:
    """The stages of one data directory."""

    def __init__(self, spark: SparkSession, data: str) -> None:
        self._lake = Lake(spark, data)

    def path(self, name: str, part: str = "") -> str:
        """Return where a stage is, or a part of it."""
        return f"{self._lake.path}/{_place(name, part)}"

    def hidden(self, name: str) -> str:
        """Return a name for a stage that is being made: readers pass over it."""
        return f".{name}-{uuid.uuid4().hex}"

    def find(self, name: str) -> Told | None:
        """Return what is said of a stage; None where there is none."""
        text = self._lake.read_text(_place(name, _TOLD))
        try:
            return None if text is None else Told(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PipelineError(
                f"{self.path(name, _TOLD)} can't be read ({error}): another version wrote it; take another --name"
            ) from error

    def publish(self, hidden: str, told: Told) -> Told:
        """Give a stage its name; return what is said of the one that has it now."""
        self._lake.write_text(_place(hidden, _TOLD), json.dumps(asdict(told), indent=1))
        if self._lake.claim(_place(hidden), _place(told.name)):
            return told
        self.remove(hidden)
        found = self.find(told.name)
        if found is None:
            raise PipelineError(f"{self.path(told.name)} is there and is no load: take another --name")
        return found

    def position(self, name: str) -> int:
        """Return how many rows are known to be durable."""
        text = (self._lake.read_text(_place(name, _POSITION)) or "").strip()
        return int(text) if text.isdecimal() else 0

    def advance(self, name: str, rows: int) -> None:
        """Note that the first rows are durable."""
        # Two that send the same load may be in each other's way here.
        with contextlib.suppress(Py4JError):
            self._lake.write_text(_place(name, _POSITION), f"{rows}\n")

    def remove(self, name: str, part: str = "") -> None:
        """Take a stage away, or a part of it."""
        with contextlib.suppress(Py4JError):
            self._lake.delete(_place(name, part))


def _place(name: str, part: str = "") -> str:
    return f"{_LOADS}/{name}/{part}".rstrip("/")
