"""The demo's report: its tables, its verdict, and its last line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.audit import Audit
from lab.demo.report import MAX_LISTED, SHARED, Account, complaints, how_to_retry, show
from tests.demo.test_account import judged
from tests.unit.proof.story import clean, find


def shown(account: Account, audit: Audit | None = None) -> tuple[int, str]:
    text = io.StringIO()
    code = show(account, audit, Path("data"), Console(file=text, width=120), "run it again")
    return code, text.getvalue()


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def audited(account: Account, **changed: Any) -> Audit:
    statistics = account.statistics()
    return Audit({**{name: statistics[name] for name in SHARED}, "wrong": [], **changed})


def test_a_run_in_which_all_is_well_says_so_and_ends_with_one_json_object() -> None:
    code, text = shown(judged(clean()))

    found = last_line(text)
    assert code == 0
    assert (found["sent"], found["acked"], found["dead"], found["lost"], found["audit"]) == (5, 3, 1, 0, "skipped")
    assert "1: killed" in text


def test_an_audit_that_comes_to_the_same_is_said_to_agree() -> None:
    account = judged(clean())

    code, text = shown(account, audited(account))

    assert code == 0
    assert last_line(text)["audit"] == "agrees"
    assert "the data pipeline's account is the same: 5 sent, 3 acked, 1 dead" in text


def test_an_audit_that_comes_to_something_else_makes_the_demo_fail_and_says_what() -> None:
    account = judged(clean())

    code, text = shown(account, audited(account, acked=2))

    assert code == 1
    assert "acked: 3 by the checker, 2 by the audit" in text
    assert last_line(text)["audit"] == "differs"


def test_a_failed_audit_is_reported_as_a_failure_and_not_as_a_difference() -> None:
    code, text = shown(judged(clean()), Audit(failure="ingest: error: Java is not installed"))

    assert code == 2
    assert "audit: failed: ingest: error: Java is not installed\n  run it again" in text
    assert last_line(text)["audit"] == "failed"
    assert "DIFFERS" not in text


def test_a_lost_message_takes_precedence_over_a_failed_audit() -> None:
    events = clean()
    events.remove(find(events, "marker", kind="ACK", offsets=[0]))

    code, text = shown(judged(events), Audit(failure="ingest made no progress for 240 s"))

    assert code == 1
    assert last_line(text)["audit"] == "failed"


def test_an_audit_is_repeated_from_the_ingested_data_or_the_topics_if_they_exist() -> None:
    again = ".venv/bin/python -m pipeline audit --drained --data 'my data'"
    data = Path("my data")

    assert how_to_retry(Audit(ingested=True), data, "", "demo-1").endswith(f"to try again: {again}")
    from_topics = how_to_retry(Audit(), data, "kafka:9092", "demo-1")
    assert "the topics demo-1.* and my data are kept" in from_topics
    assert "MARQ_BOOTSTRAP_SERVERS=kafka:9092 MARQ_PREFIX=demo-1" in from_topics
    assert from_topics.endswith(f"pipeline ingest --data 'my data' && {again}")
    stopped = how_to_retry(Audit(), data, "127.0.0.1:5", "demo-1", Path("its data"))
    assert "its data and my data are kept" in stopped
    assert "MARQ_BOOTSTRAP_SERVERS=127.0.0.1:5 .venv/bin/python -m marq_worker.broker --data 'its data'\n" in stopped
    assert stopped.endswith(from_topics.partition("try again: ")[2].replace("kafka:9092", "127.0.0.1:5"))


def test_the_report_says_where_the_plots_are_or_why_there_are_none() -> None:
    account = judged(clean())
    statistics = dict(audited(account).statistics)

    drawn, with_plots = shown(account, Audit(statistics, ingested=True, plots=True))
    failed, without = shown(account, Audit(statistics, ingested=True, plots_failure="stats: error: the disk is full"))

    assert (drawn, failed) == (0, 0)
    assert "plots of rates, times and lateness: data/report.html" in with_plots
    assert "no plots: stats: error: the disk is full; to try again: .venv/bin/python -m pipeline stats" in without


def test_a_lost_message_is_named_with_its_events() -> None:
    events = clean()
    events.remove(find(events, "marker", kind="ACK", offsets=[0]))

    code, text = shown(judged(events))

    assert code == 1
    assert "LOST: 1" in text
    assert "marq.messages/0/0 of q: neither acknowledged nor dead" in text


def test_findings_are_listed_up_to_a_limit() -> None:
    events = clean()
    for number in range(MAX_LISTED + 5):
        told = {"message": f"m{number}", "queue": "q", "content": "-"}
        events.append({"process": "producer", "type": "invoke", "op": "send", **told})
        events.append({"process": "producer", "type": "ok", "op": "send", **told, "record": f"gone/0/{number}"})

    lines = complaints(judged(events))

    assert lines[0] == "LOST: 15"
    assert sum(line.startswith("lost: ") for line in lines) == MAX_LISTED


def test_a_promise_that_was_not_kept_makes_the_demo_fail() -> None:
    code, text = shown(judged(clean(), least_held=100))

    assert code == 1
    assert "NOT AS PROMISED: the consumer that was killed held 1 leases, not at least 100" in text
