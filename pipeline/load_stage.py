"""The stages of loads in ``DATA/loads/NAME``: numbered rows, rejected rows, and the position.

A stage is written under a hidden name and renamed when it is complete. If two processes stage the same load, one wins,
and both send the winner's rows. After that the input is not read again, so each row keeps its number.

``position`` counts the rows known to be durable. It only saves work: without it, a load writes rows again, and trackers
count each once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from marq.wire.names import synthetic_topic
from pipeline.errors import PipelineError
from pipeline.lake import Lake

_ABOUT, _POSITION = "load.json", "position"


@dataclass(frozen=True)
class LoadStage:
    """The content of ``load.json``; ``drawn`` is random and unique to the stage."""

    name: str
    queue: str
    namespace: str
    arguments: dict[str, Any]
    input: str | None
    drawn: str
    staged_at_ms: int
    source_partitions: int
    rows: int
    bytes: int
    bad: dict[str, int]

    @property
    def topic(self) -> str:
        """The synthetic topic in the identities of its rows."""
        return synthetic_topic(int.from_bytes(_digest(self)[:16]))

    @property
    def holder(self) -> int:
        """The writer of its markers; no consumer has this number."""
        return int.from_bytes(_digest(self)[16:24]) >> 1 | 1


# Not a method, because ``bytes`` is a field of the class.
def _digest(stage: LoadStage) -> bytes:
    return hashlib.sha256(f"{stage.namespace} {stage.name} {stage.drawn}".encode()).digest()


class Stages:
    """The stages of one data directory."""

    def __init__(self, spark: SparkSession, data: str) -> None:
        self._lake = Lake(spark, data)

    def path(self, name: str, part: str = "") -> str:
        return f"{self._lake.path}/{_place(name, part)}"

    def find(self, name: str) -> LoadStage | None:
        """Return a stage; None if it does not exist."""
        text = self._lake.read_text(_place(name, _ABOUT))
        try:
            return None if text is None else LoadStage(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PipelineError(
                f"{self.path(name, _ABOUT)} can't be read ({error}): another version wrote it; use another --name"
            ) from error

    def publish(self, hidden: str, stage: LoadStage) -> LoadStage:
        """Give a complete stage its name; return the stage that has the name now."""
        self._lake.write_text(_place(hidden, _ABOUT), json.dumps(asdict(stage), indent=1))
        if self._lake.claim(_place(hidden), _place(stage.name)):
            return stage
        winner = self.find(stage.name)
        if winner is None:
            raise PipelineError(f"{self.path(stage.name)} exists and is not a load: use another --name")
        return winner

    def position(self, name: str) -> int:
        """Return how many rows are known to be durable."""
        text = (self._lake.read_text(_place(name, _POSITION)) or "").strip()
        return int(text) if text.isdecimal() else 0

    def advance(self, name: str, rows: int) -> None:
        """Record that the first ``rows`` rows are durable."""
        # Another process may send the same load and write the same file.
        with contextlib.suppress(Py4JError):
            self._lake.write_text(_place(name, _POSITION), f"{rows}\n")

    def remove(self, name: str, part: str = "") -> None:
        with contextlib.suppress(Py4JError):
            self._lake.delete(_place(name, part))


def _place(name: str, part: str = "") -> str:
    return f"loads/{name}/{part}".rstrip("/")
