"""Files of live windows, as `python -m pipeline ingest --follow` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marq.wire.live_windows import HOUR_S, STATUS_FILE, VERSION, hour_file, windows_folder


def write_windows(
    data: Path, windows: Mapping[tuple[str, int], Mapping[str, Any]], computed_s: float, **status: Any
) -> None:
    """Write windows by queue and time in seconds since 1970, which are known up to ``computed_s``."""
    (data / "about.json").write_text(json.dumps({"format": 3, "cluster": "c", "prefix": "marq"}))
    for (queue, at_s), row in sorted(windows.items()):
        file = data / windows_folder(queue) / hour_file(at_s // HOUR_S)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps({"at": at_s, "queue": queue, **row}) + "\n")
    begin_s = min((at_s for _, at_s in windows), default=None)
    known = {"version": VERSION, "computed_ms": int(computed_s * 1000), "begin_s": begin_s, "queues_left_out": 0}
    (data / STATUS_FILE).parent.mkdir(exist_ok=True)
    (data / STATUS_FILE).write_text(json.dumps({**known, **status}))
