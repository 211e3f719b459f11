"""What docs/pipeline.md shows can be typed: its commands are parsed, its programs read tables of that form."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from tests.docs.pages import ROOT, blocks

_COMMAND = re.compile(r"^\.venv/bin/python -m pipeline (.*?)(?:\s+#.*)?$", re.MULTILINE)
COMMANDS = [found for block in blocks("sh") for found in _COMMAND.findall(block.code)]
PROGRAMS = [block for block in blocks("python") if block.page == ROOT / "docs" / "pipeline.md"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_a_command_of_the_pages_is_one_that_its_job_takes(command: str) -> None:
    name, *words = shlex.split(command)

    found = cli._parser(name, importlib.import_module(f"pipeline.jobs.{name}")).parse_args(words)

    assert found.data


def test_the_pages_show_each_job() -> None:
    shown = {command.split()[0] for command in COMMANDS}

    assert shown >= {"ingest", "audit", "stats", "plan", "redrive", "load", "maintain"}


def test_the_tables_are_read_without_spark_as_the_page_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / ".marq" / "pipeline"
    _table(data / "markers" / "batch=000000000" / "date=2026-11-21", kind=["ACK", "ACQUIRE", "ACK"])
    _table(data / "lifecycle" / "side=closed" / "batch=000000000" / "date=2026-11-21", id=["a", "b"])
    _table(data / "lifecycle" / "side=open" / "batch=000000001" / "date=2026-11-21", id=["c"])
    _table(data / "lifecycle" / "side=open" / "batch=000000000" / "date=2026-11-21", id=["d"])
    commits = data / "_commits" / "lifecycle"
    commits.mkdir(parents=True)
    places = ["lifecycle/side=closed/batch=000000000", "lifecycle/side=open/batch=000000001"]
    (commits / "000000001.json").write_text(json.dumps({"places": places}))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    for program in PROGRAMS:
        exec(program.code, names)

    assert names["acks"] == 2
    assert sorted(names["lifecycle"].to_table()["id"].to_pylist()) == ["a", "b", "c"]


def _table(folder: Path, **columns: list[str]) -> None:
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "part.parquet")
