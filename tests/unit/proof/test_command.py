"""The command: ``python -m lab.proof FILE...``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.proof import __main__ as command
from lab.proof import history
from lab.proof.history import Event, History, MalformedHistory, read
from marq.wire.markers import Acquire, Payload, Source, Tick
from tests.unit.proof.story import LOG, clean

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, events: list[Event]) -> Path:
    written = History()
    written.events = events
    written.write(path)
    return path


def broken() -> list[Event]:
    return [event for event in clean() if event["op"] != "skipped"]


def test_a_clean_history_gives_one_json_line_and_exit_0(tmp_path: Path) -> None:
    path = write(tmp_path / "history.jsonl", clean())

    done = subprocess.run(
        [sys.executable, "-m", "lab.proof", str(path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["violations"] == {}


def test_a_finding_is_printed_with_its_events_and_gives_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "history.jsonl", broken())

    assert command.main([str(path)]) == 1

    finding, *events, summary = capsys.readouterr().out.splitlines()
    assert finding.startswith(f"silent: {LOG}/4 of q: ")
    assert ['"op": "send"' in line or '"op": "record"' in line for line in events] == [True] * 3
    assert json.loads(summary)["violations"] == {"silent": 1}


def test_no_more_findings_are_printed_than_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "history.jsonl", [event for event in broken() if event["op"] != "quarantine"])

    assert command.main([str(path), "--findings", "1"]) == 1

    out = capsys.readouterr().out
    assert "silent: " in out
    assert "quarantine: " not in out
    assert json.loads(out.splitlines()[-1])["violations"] == {"quarantine": 1, "silent": 1}


def test_an_invalid_line_gives_exit_2_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"process": "p", "type": "ok", "op": "hang", "record": "t/0/0"}\nnonsense\n')

    assert command.main([str(path)]) == 2

    assert f"{path}, line 2" in capsys.readouterr().err
    with pytest.raises(MalformedHistory):
        list(read([path]))


def test_several_files_are_merged_by_their_processes_clock(tmp_path: Path) -> None:
    """Each process writes a file of its own; the markers log is one more."""
    events = [{**event, "at_ms": number} for number, event in enumerate(clean())]
    logs = write(tmp_path / "logs.jsonl", [event for event in events if event["op"] in ("record", "marker")])
    said = write(tmp_path / "said.jsonl", [event for event in events if event["op"] not in ("record", "marker")])

    assert list(read([logs, said])) == events
    assert command.main([str(logs), str(said)]) == 0


def test_marq_headers_are_not_part_of_the_content_and_a_copys_key_is_its_senders() -> None:
    headers = [("tenant", b"acme"), ("tenant", None)]
    sent = history.content("q", b"order 7", b"v", headers)

    assert history.content("q", b"q", b"v", [*headers, ("marq-key", b"order 7"), ("marq-attempt", b"2")]) == sent
    assert history.content("q", b"q", b"v", headers) == history.content("q", None, b"v", headers) != sent
    assert len({history.content("q", None, value, ()) for value in (None, b"", b"v")}) == 3
    assert history.content("q", None, b"v", list(reversed(headers))) != history.content("q", None, b"v", headers)


def test_an_acquire_names_what_it_keeps_as_the_record_does() -> None:
    payload = Payload(1, 2, b"q", (("n", b"1"), ("marq-attempt", b"2")), b"v")
    marker = history.marker("m/0", 3, 4, Acquire("q", 2**63 + 1, Source("t", 1), [5], 30, 5, [payload]))
    record = history.record("t/1", 5, 1, "q", b"q", b"v", (("n", b"1"), ("marq-attempt", b"2"), ("marq-id", b"t/0/0")))

    assert marker["contents"] == [record["content"]]
    assert (marker["attempts"], record["attempt"], record["id"]) == ([2], 2, "t/0/0")
    assert marker["holder"] == "8000000000000001"


def test_the_last_of_several_ordering_keys_counts() -> None:
    keys = (("marq-ordering-key", b"a"), ("marq-ordering-key", b"b"))
    lines = [history.record("t/1", 5, 1, "q", b"q", b"v", headers)["line"] for headers in (keys, keys[1:], keys[:1])]

    assert lines[0] == lines[1] != lines[2]


def test_an_unreadable_marker_is_identified_by_its_content() -> None:
    assert history.marker("m/0", 0, 1, None, b"???")["content"] == history.digest(b"???")
    assert history.marker("m/0", 0, 1, Tick(1, 2), b"...").keys() >= {"holder", "monotonic_ms"}
