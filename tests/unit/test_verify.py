"""``make verify``: its parts, and the summary at its end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import verify
from tests.verify import Part

REPORT = """<testsuites><testsuite>
<testcase classname="tests.sqs.test_clients" name="a" time="2.5"/>
<testcase classname="tests.sqs.test_moto" name="b" time="1.0"><failure>AssertionError</failure></testcase>
<testcase classname="tests.sqs.test_moto" name="c" time="0.5"><error>in its fixture</error></testcase>
<testcase classname="tests.worker.test_roles.TestRoles" name="d" time="4.0"><skipped/></testcase>
<testcase time="0.0"/>
</testsuite></testsuites>"""


def test_parts_are_folders_with_marked_tests_properties_and_the_oldest_aiokafka() -> None:
    assert {"sqs", "worker", "faults", "pipeline", "properties", "oldest"} < set(verify.parts())
    assert "unit" not in verify.parts()


def test_without_a_choice_all_parts_run() -> None:
    assert verify.chosen([]) == verify.parts()
    assert verify.chosen(["sqs,worker"]) == ["sqs", "worker"]


def test_an_unknown_part_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match=r"ONLY=sqs,wroker: unknown part 'wroker'; the parts are .*sqs.*worker"):
        verify.chosen(["sqs,wroker"])


def test_a_report_is_summed_up_by_folder_even_if_the_run_was_interrupted(tmp_path: Path) -> None:
    report = tmp_path / "verify.xml"
    report.write_text(REPORT)

    assert verify.read(report) == {
        "sqs": Part(Counter(passed=1, failed=2), 4.0),
        "worker": Part(Counter(skipped=1), 4.0),
        "pytest": Part(Counter(passed=1)),
    }


def test_a_part_that_failed_or_ran_no_test_is_marked() -> None:
    results = {
        "sqs": Part(Counter(passed=3, failed=1), 12.4),
        "worker": Part(Counter(skipped=1)),
        "docs": Part(Counter(passed=2), 3.0),
    }

    _, *rows = verify.table(results)

    assert [row.split() for row in rows] == [
        ["sqs", "3", "1", "0", "12", "FAILED"],
        ["worker", "0", "0", "1", "0", "FAILED"],
        ["docs", "2", "0", "0", "3"],
    ]
