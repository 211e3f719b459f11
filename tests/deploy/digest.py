"""`python -m tests.deploy.digest`: the first line of chart.yaml, which says of which chart it was rendered."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "deploy" / "chart"


def first_line() -> str:
    """A comment with the sum of all of the chart's files."""
    found = sha256()
    for path in sorted(file for file in CHART.rglob("*") if file.is_file()):
        found.update(f"{path.relative_to(CHART).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return f"# rendered by `make chart` of deploy/chart {found.hexdigest()}\n"


if __name__ == "__main__":
    sys.stdout.write(first_line())
