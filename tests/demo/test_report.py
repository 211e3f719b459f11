"""The demo's report: its tables, its verdict, and its last line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from demo.report import MAX_LISTED, complaints, show
from demo.result import SHARED, Result
from proof.history import Event
from rig.audit import Audit
from tests.demo.test_result import CONSUMER, judged
from tests.unit.proof.story import clean, find


def shown(result: Result, audit: Audit | None = None, events: list[Event] | None = None) -> tuple[bool, str]:
    text = io.StringIO()
    right = show(result, events or clean(), audit, Path("data"), Console(file=text, width=120))
    return right, text.getvalue()


def audited(result: Result, **changed: Any) -> Audit:
    statistics = result.statistics()
    return Audit({**{name: statistics[name] for name in SHARED}, "wrong": [], **changed})


def test_a_run_in_which_all_is_well_says_so_and_ends_with_one_json_object() -> None:
    right, text = shown(judged(clean()))

    found = json.loads(text.splitlines()[-1])
    assert right
    assert (found["sent"], found["acked"], found["dead"], found["lost"], found["audit"]) == (5, 3, 1, 0, "skipped")
    assert "1: killed" in text


def test_an_audit_that_comes_to_the_same_is_said_to_agree() -> None:
    result = judged(clean())

    right, text = shown(result, audited(result))

    assert right
    assert json.loads(text.splitlines()[-1])["audit"] == "agrees"
    assert "the data pipeline's account is the same: 5 sent, 3 acked, 1 dead" in text


def test_an_audit_that_comes_to_something_else_makes_the_demo_fail_and_says_what() -> None:
    result = judged(clean())

    right, text = shown(result, audited(result, acked=2))

    assert not right
    assert "acked: 3 by the checker, 2 by the audit" in text
    assert json.loads(text.splitlines()[-1])["audit"] == "differs"


def test_an_audit_that_could_not_be_made_makes_the_demo_fail() -> None:
    right, text = shown(judged(clean()), Audit(failure="ingest: error: Java is not installed"))

    assert not right
    assert "the audit could not be made: ingest: error: Java is not installed" in text


def test_a_lost_message_is_named_with_its_events() -> None:
    events = clean()
    events.remove(find(events, "marker", kind="ACK", offsets=[0]))

    right, text = shown(judged(events), events=events)

    assert not right
    assert "LOST: 1" in text
    assert "marq.messages/0/0 of q is neither acknowledged nor dead" in text


def test_findings_are_listed_up_to_a_limit() -> None:
    events = clean()
    for number in range(MAX_LISTED + 5):
        told = {"message": f"m{number}", "queue": "q", "content": "-"}
        events.append({"process": "producer", "type": "invoke", "op": "send", **told})
        events.append({"process": "producer", "type": "ok", "op": "send", **told, "record": f"gone/0/{number}"})

    lines = complaints(judged(events), events)

    assert lines[0] == "LOST: 15"
    assert sum(line.startswith("lost: ") for line in lines) == MAX_LISTED


def test_a_promise_that_was_not_kept_makes_the_demo_fail() -> None:
    right, text = shown(judged(clean(), CONSUMER, least_held=100))

    assert not right
    assert "NOT AS PROMISED: the consumer that was killed held 1 leases, not at least 100" in text
