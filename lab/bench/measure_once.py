"""Measures a system of a row once, on a running broker: ``python -P measure_once.py ARGUMENTS RESULT``.

:mod:`lab.bench.compare` runs this file with the lab, marq and worker of another tree, to which PYTHONPATH points, so
that older commits need no such program. ARGUMENTS is a JSON object, RESULT the file for the measurements. Without
arguments ({}), the result is the names of the rows and of their systems.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.bench.__main__ import ROWS
from lab.bench.suite import Bench, Size, Skipped


def measure(row: str, system: str, size: dict[str, Any], servers: str, pid: int, data: str, folder: str) -> Any:
    """Return the measurements, or ``skipped`` with the reason; ``pid`` and ``data`` are the broker's."""
    broker: Any = SimpleNamespace(pid=pid, data_directory=Path(data))
    bench = Bench(servers, Path(folder), Size(**size), print, broker)
    [systems] = [one.systems for one in ROWS if one.name == row]
    try:
        return systems[system](bench)
    except Skipped as why:
        return {"skipped": str(why)}
    finally:
        bench.clear()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    result = measure(**arguments) if arguments else {row.name: list(row.systems) for row in ROWS}
    Path(sys.argv[2]).write_text(json.dumps(result))
