"""The demo's exit codes, and the data that it keeps, without a real run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import lab.demo.__main__ as demo
from lab.audit import Audit
from lab.demo.__main__ import OTHER_DATA, data_directory
from lab.proof.history import Event
from tests.unit.proof.story import clean


@dataclass
class Played:
    """A finished run."""

    events: list[Event] = field(default_factory=clean)
    held_at_kill: int = 1
    rows_at_kill: int = 3
    seconds: float = 1.0

    async def carry_out(self) -> None:
        """It has been."""


@dataclass
class Topics:
    """The topics of a broker that keeps running."""

    markers_partitions: int = 4
    deleted: bool = False


def embedded_broker(directory: Path) -> Mock:
    """Return an embedded broker with a file."""
    directory.mkdir()
    (directory / "file").touch()
    return Mock(bootstrap_servers="127.0.0.1:5", pid=1, data_directory=directory)


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Topics:
    topics = Topics()

    async def ensure_topics(*_: Any) -> Topics:
        return topics

    async def delete_topics(*_: Any) -> None:
        topics.deleted = True

    monkeypatch.setattr(sys, "argv", ["demo", "--held", "1"])
    monkeypatch.setattr(demo, "ensure_topics", ensure_topics)
    monkeypatch.setattr(demo, "delete_topics", delete_topics)
    monkeypatch.setattr(demo, "DemoRun", lambda *_: Played())
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv("MARQ_PIPELINE_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("SPARK", raising=False)
    return topics


@pytest.mark.parametrize(
    ("ingested", "deleted", "command"), [(False, False, "python -m pipeline ingest"), (True, True, "pipeline audit")]
)
def test_without_an_audit_the_exit_code_is_2_and_topics_that_were_not_ingested_stay(
    topics: Topics,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ingested: bool,
    deleted: bool,
    command: str,
) -> None:
    failed = Audit(failure="a job was interrupted", ingested=ingested)
    monkeypatch.setattr(demo, "audit", lambda *_, **__: failed)

    code = demo.main()

    output = capsys.readouterr().out
    assert code == 2
    assert json.loads(output.splitlines()[-1])["audit"] == "failed"
    assert command in output
    assert topics.deleted is deleted


@pytest.mark.parametrize(("writable", "says"), [(True, "start the broker: "), (False, "could not be kept")])
def test_an_embedded_brokers_data_is_kept_for_an_audit_that_failed_before_it_was_ingested(
    topics: Topics,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    writable: bool,
    says: str,
) -> None:
    broker = embedded_broker(tmp_path / "broker")
    kept = tmp_path / "kept" if writable else broker.data_directory / "file" / "kept"
    monkeypatch.setattr(demo, "audit", lambda *_, **__: Audit(failure="a job was interrupted"))
    monkeypatch.setattr(demo, "EmbeddedBroker", lambda: broker)
    monkeypatch.setattr(demo, "KEPT_BROKER", kept)
    monkeypatch.delenv("MARQ_BOOTSTRAP_SERVERS")

    code = demo.main()

    assert (code, [name for name, *_ in broker.mock_calls]) == (2, ["start", "stop", "kill", "close"])
    assert says in capsys.readouterr().out
    assert (kept / "file").exists() is writable


def test_a_skipped_audit_is_not_a_failure(
    topics: Topics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARK", "skip")

    code = demo.main()

    assert code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["audit"] == "skipped"
    assert topics.deleted


@pytest.mark.parametrize(
    ("about", "ours"),
    [('{"prefix": "demo-1"}', True), ('{"prefix": "marq"}', False), ("{", False), ("[]", False), (None, True)],
)
def test_only_the_data_of_a_former_demo_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, about: str | None, ours: bool
) -> None:
    monkeypatch.setenv("MARQ_PIPELINE_DATA", str(tmp_path))
    (tmp_path / "handled").mkdir()
    if about is not None:
        (tmp_path / "about.json").write_text(about)

    assert data_directory() == (tmp_path if ours else OTHER_DATA)


def test_other_files_are_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MARQ_PIPELINE_DATA", str(tmp_path))
    (tmp_path / "letters").mkdir()

    assert data_directory() == OTHER_DATA
