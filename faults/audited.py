"""The data pipeline's account of a fault run, which must be the checker's: both know only what the topics hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.audit import audited, write_handled
from proof.history import Event

#: Figures that both have: the checker's name, the audit's.
_SHARED = (
    ("acked", "acked"),
    ("lost", "lost"),
    ("cancelled", "cancelled"),
    ("redelivered", "redelivered"),
    ("redriven", "redriven"),
    ("expired_unread", "expired_unread"),
    ("waiting", "delayed"),
    ("abandoned", "abandoned"),
    ("duplicates", "duplicates"),
)


def differences(servers: str, prefix: str, folder: Path, events: Sequence[Event], own: Mapping[str, Any]) -> list[str]:
    """Ingest and audit an installation; say where that differs from the checker's figures, ``own``."""
    data = folder / "data"
    write_handled(data, _finished(events))
    audit = audited(servers, prefix, data, lambda _: None)
    if audit.failure:
        return [f"the audit could not be made: {audit.failure}"]
    found = audit.figures
    lines = [
        f"{theirs}: {own[ours]} by the checker, {found[theirs]} by the audit"
        for ours, theirs in _SHARED
        if own[ours] != found[theirs]
    ]
    return lines + [f"{each['id']}: {each['state']}: {'; '.join(each['why'])}" for each in found["wrong"]]


def _finished(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """Deliveries that were not given back, which is to ask for another one, and that no dead letter has ended."""
    seen = Counter(event["record"] for event in events if event["op"] == "deliver")
    for event in events:
        if event["op"] == "marker" and event.get("kind") in ("REDELIVERED", "DEAD_LETTERED"):
            for index, offset in enumerate(event["offsets"]):
                record = f"{event['source']}/{offset}"
                if (event["kind"] == "DEAD_LETTERED" or event["causes"][index] == "RELEASED") and seen[record]:
                    seen[record] -= 1
    found = []
    for record, count in seen.items():
        topic, partition, offset = record.rsplit("/", 2)
        found += [(topic, int(partition), int(offset))] * count
    return found
