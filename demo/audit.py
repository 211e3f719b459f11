"""The second account of a run: that of the data pipeline, which knows nothing of the first one.

The run's topics are ingested as a user's would be, what the consumers say that they have handled is put beside them,
and ``python -m pipeline audit`` draws up its account. Both must agree. The data stay, so that it can be asked again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demo.journal import Entry, What

#: Where the data go: the pipeline's own directory, unless somebody's data are there.
VARIABLE, DEFAULT_DATA, OTHER_DATA = "MARQ_PIPELINE_DATA", Path(".marq/pipeline"), Path(".marq/demo")
#: What the prefix of each run begins with.
PREFIX = "demo-"
#: Figures that both accounts have under the same names.
SHARED = ("sent", "acked", "dead", "acked_and_dead", "lost", "duplicates", "redelivered")
LIMIT_SECONDS = 300.0
#: Of SPARK in the environment: go without the pipeline.
SKIP = "skip"

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Audit:
    """What the pipeline found: ``figures`` its account, ``failure`` why there is none."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Path = DEFAULT_DATA
    failure: str = ""
    skipped: bool = False

    def differences(self, own: Mapping[str, Any]) -> list[str]:
        """Say where it differs from the demo's own account, and what it found to be wrong."""
        if self.skipped:
            return []
        if self.failure:
            return [f"the audit could not be made: {self.failure}"]
        lines = [
            f"{name}: {own[name]:,} by the demo's account, {self.figures[name]:,} by the audit's"
            for name in SHARED
            if own[name] != self.figures[name]
        ]
        wrong = [f"{each['id']}: {each['state']} {'; '.join(each['why'])}" for each in self.figures["wrong"]]
        return lines + wrong


def audit(
    servers: str, prefix: str, topic: str, journals: Mapping[str, Sequence[Entry]], say: Callable[[str], None]
) -> Audit:
    """Ingest a run and audit it."""
    if os.environ.get("SPARK") == SKIP:
        return Audit(skipped=True)
    data = directory()
    shutil.rmtree(data, ignore_errors=True)
    handled = [entry for journal in journals.values() for entry in journal if entry.what is What.HANDLED]
    write_handled(data, [(topic, entry.partition, entry.offset) for entry in handled])
    return audited(servers, prefix, data, say)


def audited(servers: str, prefix: str, data: Path, say: Callable[[str], None]) -> Audit:
    """Ingest all of an installation into a directory, and audit that."""
    environment = {**os.environ, "MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_PREFIX": prefix, "PYTHONPATH": str(_ROOT)}
    found: dict[str, Any] = {}
    for job in (["ingest"], ["audit", "--drained", "--json"]):
        say(f"python -m pipeline {' '.join(job)}")
        command = [sys.executable, "-m", "pipeline", *job, "--data", str(data)]
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Audit(data=data, failure=f"{job[0]} took more than {LIMIT_SECONDS:g} s")
        # 1: the audit found something, and says it.
        if ran.returncode not in (0, 1):
            lines = ran.stderr.strip().splitlines()
            return Audit(data=data, failure=f"{job[0]}: {lines[-1] if lines else f'exit code {ran.returncode}'}")
        if job[0] == "audit":
            found = json.loads(ran.stdout)
    return Audit(found, data)


def directory() -> Path:
    """Return where this run's data go; those of a former run are replaced, nobody else's."""
    given = os.environ.get(VARIABLE, "").strip()
    data = Path(given) if given else DEFAULT_DATA
    about = data / "about.json"
    ours = about.exists() and json.loads(about.read_text())["prefix"].startswith(PREFIX)
    return data if "://" not in given and (ours or not data.exists()) else OTHER_DATA


def write_handled(data: Path, places: Iterable[tuple[str, int, int]]) -> None:
    """Put what was finished beside the tables: topic, partition and offset of each delivery."""
    topics, partitions, offsets = zip(*places, strict=True) if (places := list(places)) else ((), (), ())
    table = pa.table(
        {
            "topic": pa.array(topics, pa.string()),
            "partition": pa.array(partitions, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
        }
    )
    folder = data / "handled"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "handled.parquet")
