"""The data pipeline's audit of a run, which reads only the topics, compared with the checker's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from marq.settings.client import ClientSettings
from marq.wire.markers import LAST
from proof.history import Event
from rig.program import ROOT

LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Audit:
    """The pipeline's ``statistics``, or the reason why there are none."""

    statistics: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    def differences(self, own: Mapping[str, Any], shared: Mapping[str, str]) -> list[str]:
        """Return the audit's findings, and its differences from the checker's statistics.

        Args:
            own: the checker's statistics.
            shared: names of statistics that both have: the checker's, the audit's.
        """
        if self.failure:
            return [f"the audit could not be made: {self.failure}"]
        lines = [
            f"{theirs}: {own[ours]:,} by the checker, {self.statistics[theirs]:,} by the audit"
            for ours, theirs in shared.items()
            if own[ours] != self.statistics[theirs]
        ]
        return lines + [f"{each['id']}: {each['state']}: {'; '.join(each['why'])}" for each in self.statistics["wrong"]]


def audit(settings: ClientSettings, data: Path, events: Sequence[Event], say: Callable[[str], object] = str) -> Audit:
    """Ingest the topics of a namespace and its finished deliveries into a directory, and audit them."""
    _write_handled(data, finished(events))
    environment = {
        **os.environ,
        "MARQ_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "MARQ_PREFIX": settings.names.prefix,
        "PYTHONPATH": str(ROOT),
    }
    output = ""
    for job in (["ingest"], ["audit", "--drained", "--json"]):
        say(f"python -m pipeline {' '.join(job)}")
        command = [sys.executable, "-m", "pipeline", *job, "--data", str(data)]
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Audit(failure=f"{job[0]} took more than {LIMIT_SECONDS:g} s")
        # Exit code 1: the audit has findings, and prints them.
        if ran.returncode not in (0, 1):
            lines = ran.stderr.strip().splitlines()
            return Audit(failure=f"{job[0]}: {lines[-1] if lines else f'exit code {ran.returncode}'}")
        output = ran.stdout
    return Audit(json.loads(output))


def finished(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """Return deliveries that were neither released, which asks for another one, nor ended by a dead letter."""
    deliveries = [event for event in events if event["op"] == "deliver"]
    markers = [event for event in events if event["op"] == "marker"]
    seen = Counter(event["record"] for event in deliveries)
    held = Counter((event["record"], event.get("holder")) for event in deliveries)
    ordered = {event["queue"] for event in markers if event.get("in_order")}
    for event in markers:
        kind = event["kind"]
        if kind == "RELEASE" and event["queue"] in ordered:
            # The message is delivered again in its place, without a fact; after LAST it becomes a dead letter.
            for offset, delay_ms in zip(event["offsets"], event["delays_ms"], strict=True):
                record, holder = f"{event['source']}/{offset}", event["holder"]
                if delay_ms != LAST and held[record, holder]:
                    held[record, holder] -= 1
                    seen[record] -= 1
        elif kind in ("REDELIVERED", "DEAD_LETTERED"):
            for index, offset in enumerate(event["offsets"]):
                record = f"{event['source']}/{offset}"
                if (kind == "DEAD_LETTERED" or event["causes"][index] == "RELEASED") and seen[record]:
                    seen[record] -= 1
    finished = []
    for record, count in seen.items():
        topic, partition, offset = record.rsplit("/", 2)
        finished += [(topic, int(partition), int(offset))] * count
    return finished


def _write_handled(data: Path, records: Iterable[tuple[str, int, int]]) -> None:
    """Write topic, partition and offset of each finished delivery next to the pipeline's tables."""
    schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    rows = [dict(zip(schema.names, record, strict=True)) for record in records]
    folder = data / "handled"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "handled.parquet")
