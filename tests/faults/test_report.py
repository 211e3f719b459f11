"""The choice of scenarios, and reports of their results."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lab.audit import finished
from lab.faults.__main__ import DOCUMENT, MARK, chosen, numbers, summary, updated
from lab.faults.scenario import ScenarioResult
from lab.faults.scenarios import SCENARIOS
from lab.faults.soak import SLACK, unbounded
from lab.report import between
from lab.stage import recovery_seconds
from marq.wire.markers import LAST
from tests.faults.test_scenarios import QUICK


def test_scenarios_are_chosen_by_the_beginning_of_their_names() -> None:
    assert [scenario.name for scenario in chosen("worker-killed-d,all-")] == [
        "all-consumers-killed",
        "worker-killed-data-lost",
    ]
    assert chosen("") == SCENARIOS
    with pytest.raises(ValueError, match="ONLY=nobody: no scenario begins with it; there are consumer-killed"):
        chosen("nobody")


def result(*, lost: int = 0, wrong: list[str] | None = None) -> ScenarioResult:
    statistics = {
        "accepted": 100,
        "redelivered": 7,
        "dead": 2,
        "lost": lost,
        "duplicates": 3,
        "causes": {"1": 2, "6": 1},
    }
    return ScenarioResult(QUICK[0], 12.0, statistics, 1.25, wrong or [])


def test_the_last_line_adds_up_and_names_what_failed() -> None:
    totals = summary([result(), result(lost=2), result(wrong=["early: …"])], 36.4)

    assert totals == {
        "scenarios": 3, "passed": 1, "failed": [QUICK[0].name] * 2, "accepted": 300, "redelivered": 21, "dead": 6,
        "lost": 2, "duplicates": 9, "seconds": 36,
    }  # fmt: skip


def test_a_scenario_has_its_numbers_in_the_table() -> None:
    passed, failed = numbers(result()), numbers(result(lost=1))

    assert passed == ["100", "0", "3 (2 by 1, 1 by 6)", "1.2 s"]
    assert failed == ["100", "1", "3 (2 by 1, 1 by 6)", "**failed**"]


def test_numbers_name_second_dead_letters_and_messages_that_are_handled_and_dead() -> None:
    ended = result()
    ended.statistics.update(dead_twice=4, done_and_dead={"1": 2, "6": 3})

    ends = "4 with two dead letters; 5 handled and dead-lettered (2 by 1, 3 by 6)"
    assert numbers(ended)[2] == f"3 (2 by 1, 1 by 6); {ends}"
    assert ends.replace(";", ",") in ended.line()


def test_the_page_describes_each_scenario_and_no_others() -> None:
    rows = between(DOCUMENT.read_text(encoding="utf-8"), MARK).splitlines()[4:]

    named = [re.findall(r"\(`([\w-]+)`\)$", row.split(" | ")[0]) for row in rows]
    assert sorted(named) == sorted([scenario.name] for scenario in SCENARIOS)
    assert {len(row.split(" | ")) for row in rows} == {6}


def test_numbers_of_scenarios_that_were_played_alone_go_into_their_rows_and_leave_the_others() -> None:
    head = "12 of 12 passed\n\n| what happens |\n|---|"
    rows = [f"| old (`{QUICK[0].name}`) | seen | 7 | 0 | 0 | - |", "| another (`another`) | x | 8 | 0 | 0 | - |"]

    changed = updated("\n".join([head, *rows]), [result()]).splitlines()

    assert changed[0] == "2 of 2 passed"
    assert changed[1:4] == head.splitlines()[1:]
    assert changed[4] == f"| old (`{QUICK[0].name}`) | seen | 100 | 0 | 3 (2 by 1, 1 by 6) | 1.2 s |"
    assert changed[5] == rows[1]
    with pytest.raises(ValueError, match=f"describe {QUICK[0].name} in a row"):
        updated("\n".join([head, rows[1]]), [result()])


def test_recovery_is_the_time_until_all_that_was_sent_before_the_last_fault_is_done() -> None:
    def sent(record: str, at_ms: float) -> dict[str, Any]:
        return {"process": "sender", "type": "ok", "op": "send", "record": record, "at_ms": at_ms}

    def ended(offset: int, at_ms: float) -> dict[str, Any]:
        return {"process": "c", "type": "ok", "op": "ack", "source": "m/0", "offsets": [offset], "at_ms": at_ms}

    kill = {"process": "nemesis", "type": "info", "op": "kill", "target": "c", "at_ms": 2_000.0}
    copy = {"process": "m/0", "type": "ok", "op": "record", "offset": 9, "id": "m/0/1"}
    events = [sent("m/0/0", 0), sent("m/0/1", 1_000), ended(0, 1_500), kill, sent("m/0/2", 3_000)]

    assert recovery_seconds([*events, ended(9, 5_500), ended(2, 9_000), copy]) == 3.5
    assert recovery_seconds([sent("m/0/0", 0), ended(0, 10)]) is None


def test_unbounded_growth_is_named() -> None:
    def sample(open_: int) -> dict[str, float]:
        return {**dict.fromkeys(SLACK, 100.0), "open": open_}

    steady = [sample(300 + second % 7) for second in range(90)]
    growing = [sample(40 * second) for second in range(90)]

    assert unbounded(steady) == []
    assert unbounded(growing) == ["open grew from 1160 to 3560"]


@pytest.mark.parametrize(
    ("kind", "cause", "expected"),
    [
        ("REDELIVERED", "RELEASED", []),
        ("REDELIVERED", "EXPIRED", [("m", 0, 7)]),
        # The dead letter is the end of the delivery before it.
        ("DEAD_LETTERED", "EXPIRED", []),
        ("DEAD_LETTERED", "REJECTED", []),
    ],
)
def test_a_delivery_counts_unless_it_was_released_or_ended_by_a_dead_letter(
    kind: str, cause: str, expected: list[tuple[str, int, int]]
) -> None:
    delivered = {"op": "deliver", "record": "m/0/7"}
    fact = {"op": "marker", "kind": kind, "source": "m/0", "offsets": [7], "causes": [cause]}

    assert finished([delivered, fact]) == expected


def test_a_delivery_in_order_counts_unless_its_holder_released_it_for_another_one() -> None:
    def release(offset: int, holder: str, delay_ms: int) -> dict[str, Any]:
        names = {"queue": "q", "source": "m/0", "offsets": [offset], "holder": holder}
        return {"op": "marker", "kind": "RELEASE", "delays_ms": [delay_ms], **names}

    delivered = [{"op": "deliver", "record": f"m/0/{offset}", "holder": "a"} for offset in (7, 8, 9)]
    acquired = {"op": "marker", "kind": "ACQUIRE", "queue": "q", "in_order": True}
    # No handler of holder b has seen message 8.
    releases = [release(7, "a", 500), release(8, "b", 0), release(9, "a", LAST)]

    assert finished([*delivered, acquired, *releases]) == [("m", 0, 8), ("m", 0, 9)]
