"""Where the demo writes its run: the pipeline's data directory, unless that holds other data."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lab.audit import HANDLED

#: First part of each run's prefix.
PREFIX = "demo-"
#: Directory of the pipeline's data: the pipeline's own, unless it holds other data.
DATA_VARIABLE, DEFAULT_DATA, OTHER_DATA = "MARQ_PIPELINE_DATA", Path(".marq/pipeline"), Path(".marq/demo")


def data_directory() -> Path:
    """Return the directory for this run's data; it replaces a former run's, but no other data."""
    given = os.environ.get(DATA_VARIABLE, "").strip()
    data = Path(given) if given else DEFAULT_DATA
    return data if "://" not in given and (not data.exists() or _is_ours(data)) else OTHER_DATA


def _is_ours(data: Path) -> bool:
    try:
        return str(json.loads((data / "about.json").read_text())["prefix"]).startswith(PREFIX)
    except FileNotFoundError:
        # A demo that stopped before the pipeline's first job has written only the deliveries of its handlers.
        return data.is_dir() and {each.name for each in data.iterdir()} <= {HANDLED}
    except (OSError, ValueError, TypeError, KeyError):
        return False
