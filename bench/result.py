"""Keeps what a benchmark found: a dated file, and one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from broker import jars, java

RESULTS = Path(__file__).with_name("results")
#: Packages whose versions a figure may depend on.
LIBRARIES = ("aiokafka", "confluent-kafka", "faust-streaming", "rocksdict", "aio-pika", "pyspark")


def write_result(found: Mapping[str, Any], name: str = "") -> Path:
    """Write and print it, with date, machine and versions; ``name`` begins the file's. Return the file."""
    now = datetime.now(UTC)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    result = {"date": now.isoformat(timespec="seconds"), "machine": machine, "versions": versions(), **found}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{now:%Y-%m-%dT%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return path


def versions() -> dict[str, str]:
    found = {"Kafka": jars.VERSION, "Java": str(java.find().version), "Python": platform.python_version()}
    return found | {name: each for name in LIBRARIES if (each := _installed(name)) is not None}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
