"""Keeps what a benchmark found: a dated file, and one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def write_result(found: Mapping[str, Any], name: str = "") -> None:
    """Write and print it, with the date and the machine; ``name`` begins the file's."""
    now = datetime.now(UTC)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    result = {"date": now.isoformat(timespec="seconds"), "machine": machine, **found}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}{now:%Y-%m-%dT%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
