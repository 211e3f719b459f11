"""Where the demo writes its run: the pipeline's data directory, unless that holds other data."""

from __future__ import annotations

import json
import os
from pathlib import Path

#: First part of each run's prefix.
PREFIX = "demo-"
#: Directory of the pipeline's data: the pipeline's own, unless it holds other data.
DATA_VARIABLE, DEFAULT_DATA, OTHER_DATA = "MARQ_PIPELINE_DATA", Path(".marq/pipeline"), Path(".marq/demo")


def data_directory() -> Path:
    """Return the directory for this run's data; it replaces a former run's, but no other data."""
    given = os.environ.get(DATA_VARIABLE, "").strip()
    data = Path(given) if given else DEFAULT_DATA
    about = data / "about.json"
    ours = about.exists() and json.loads(about.read_text())["prefix"].startswith(PREFIX)
    return data if "://" not in given and (ours or not data.exists()) else OTHER_DATA
