from __future__ import annotations

import io
import json

from rich.console import Console

from demo.account import Account, Duplicate, Ending, Reason
from demo.audit import SHARED, Audit
from demo.plan import Plan
from demo.report import MAX_LISTED, complaints, show
from demo.run import Result
from demo.tally import Tally
from demo.trails import Trails


def result(account: Account, *, broken: list[str] | None = None) -> Result:
    return Result(account, Trails(), Tally(Plan()), 120, 3, 0, broken or [], 61.24)


def shown(found: Result, audit: Audit | None = None) -> str:
    text = io.StringIO()
    show(found, audit or Audit(skipped=True), Console(file=text, width=120))
    return text.getvalue()


def audited(**changed: int) -> Audit:
    return Audit({**dict.fromkeys(SHARED, 0), "wrong": [], **changed})


def test_an_audit_that_comes_to_the_same_is_said_to_agree() -> None:
    text = shown(result(Account(sent=3, acked={0, 1}, dead={2})), audited(sent=3, acked=2, dead=1))

    assert json.loads(text.splitlines()[-1])["audit"] == "agrees"
    assert "the data pipeline's account is the same: 3 sent, 2 acked, 1 dead" in text


def test_an_audit_that_comes_to_something_else_makes_the_demo_fail_and_says_what() -> None:
    text = io.StringIO()

    right = show(result(Account(sent=3, acked={0, 1, 2})), audited(sent=3, acked=2), Console(file=text, width=120))

    assert not right
    assert "acked: 3 by the demo's account, 2 by the audit's" in text.getvalue()
    assert json.loads(text.getvalue().splitlines()[-1])["audit"] == "differs"


def test_an_audit_that_could_not_be_made_makes_the_demo_fail() -> None:
    text = shown(result(Account()), Audit(failure="ingest: error: there is no Java on this machine"))

    assert "the audit could not be made: ingest: error: there is no Java on this machine" in text


def test_the_last_line_is_one_json_object() -> None:
    text = shown(result(Account(sent=3, acked={0, 1}, dead={2})))

    found = json.loads(text.splitlines()[-1])

    needed = (
        "sent",
        "acked",
        "dead",
        "lost",
        "duplicates",
        "redelivered",
        "lateness_p99_ms",
        "seconds",
        "held_at_kill",
    )
    assert {name: found[name] for name in needed} == {
        "sent": 3, "acked": 2, "dead": 1, "lost": 0, "duplicates": 0, "redelivered": 0, "lateness_p99_ms": None,
        "seconds": 61.2, "held_at_kill": 120,
    }  # fmt: skip


def test_what_was_lost_is_named_up_to_a_limit() -> None:
    lines = complaints(result(Account(sent=50, lost=list(range(MAX_LISTED + 5)))))

    assert lines[0] == "LOST: 15"
    assert "message 3" in lines[4]
    assert lines[-1].strip() == "and 5 more"


def test_an_unexplained_duplicate_is_told_with_both_ends() -> None:
    first, second = Ending(1_000, 1, (0, 5), "consumer-1"), Ending(2_000, 2, (3, 9), None)
    duplicate = Duplicate(7, first, second, Reason.UNEXPLAINED)

    text = shown(result(Account(sent=8, duplicates=[duplicate])))

    assert "UNEXPLAINED DUPLICATES: 1" in text
    assert "handled by consumer-1 at attempt 1 (record 0/5" in text
    assert "dead letter at attempt 2 (record 3/9" in text


def test_a_promise_that_was_not_kept_is_said() -> None:
    lines = complaints(result(Account(), broken=["the worker that was killed had no row open"]))

    assert lines == ["NOT AS PROMISED: the worker that was killed had no row open"]
