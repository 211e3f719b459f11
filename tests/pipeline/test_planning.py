from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.errors import PipelineError
from pipeline.jobs.plan import rates, text_lines
from pipeline.lake import Lake
from pipeline.planning import CONSTANTS, MIB, QUANTITIES, Plan, target_rates
from pipeline.profiles import Profile, Target, profiles
from pipeline.spans import DAY_MS, size_bytes
from tests.pipeline.conftest import Command
from tests.pipeline.test_statistics import Row, at, delivery, frame, message

#: The first query compiles everything, which takes as long as all others together.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
EMAILS = Profile("emails").changed(size_bytes=200, run_ms=50)
REPORTS = Profile("reports").changed(size_bytes=1000, run_ms=2000, deliveries=2)


def bench(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "lab/bench/results" / name).read_text())
    return found["figures"]


def test_a_plan_follows_the_model() -> None:
    found = Plan([EMAILS, REPORTS], Target({"emails": 1000, "reports": 10}, retention_ms=DAY_MS, replication=2))

    assert (found.values["rate"], found.values["deliveries"], found.values["due"]) == (1010, 1020, 10)
    assert found.values["markers"] == 2 * 1020 + 10
    assert found.values["concurrency"] == (1000 * 0.05 + 20 * 2) * 2
    assert found.values["open"] == 1000 * 0.05 + 20 * 2
    assert found.values["rows"] == 20  # only reports last long enough to leave one
    first = 1000 * (200 + 6 + 15) + 10 * (1000 + 7 + 15)
    copies = 10 * (1000 + 7 + 15 + 150)
    assert found.values["messages_disk"] == (first + copies) * 86_400 * 2


def test_more_load_never_needs_less() -> None:
    found = [Plan([EMAILS], Target({"emails": rate}, delayed=rate * 100)) for rate in (10, 1_000, 100_000, 1_000_000)]

    for key in QUANTITIES.keys() - {"worker_memory", "restart", "takeover"}:
        values = [row.values[key] for row in found]
        assert values == sorted(values)
    assert found[0].values["workers"] == 2
    assert found[3].values["partitions"] >= found[3].values["workers"] > 2


def test_a_total_rate_is_divided_as_measured() -> None:
    measured = [replace(EMAILS, rate_mean=30.0), replace(REPORTS, rate_mean=10.0)]

    assert target_rates(1000, {}, measured) == {"emails": 750, "reports": 250}
    assert target_rates(1000, {}, [EMAILS, REPORTS]) == {"emails": 500, "reports": 500}


def test_other_queues_keep_the_rates_of_their_busiest_minutes() -> None:
    measured = [replace(EMAILS, rate_peak=30.0), replace(REPORTS, rate_peak=10.0)]

    assert target_rates(None, {"emails": 2000.0}, measured) == {"emails": 2000, "reports": 10}
    with pytest.raises(PipelineError, match="--rate email: not in the table lifecycle, which has emails"):
        target_rates(None, {"email": 2000.0}, measured)


def test_a_plan_for_the_measured_million_of_delayed_messages_is_what_was_measured() -> None:
    for name, rows in (("delays-2026-11-21T214929.json", 1e6), ("delays-2026-11-21T223020.json", 1e7)):
        measured = bench(name)

        found = Plan([EMAILS], Target({"emails": 1}, delayed=rows))

        assert found.values["worker_memory"] / MIB == pytest.approx(measured["pending_peak_mib"][0], rel=0.02)
        assert found.values["restart"] == pytest.approx(measured["restart_seconds"][0], rel=0.02)
        # Payloads that are alike are packed on disk, and a plan does not count on it.
        least_mib = measured["pending_disk_mib"][0]
        assert least_mib < found.values["worker_disk"] / MIB < 25 * least_mib


def test_a_plan_for_the_measured_open_leases_is_within_a_factor_of_two_and_a_half() -> None:
    """A measurement that the constants do not come from: a million open leases."""
    measured = bench("recovery-2026-11-21T185432.json")
    held = replace(EMAILS, run_ms=1e6, hold_ms=1e6, rows_share=1.0)

    found = Plan([held], Target({"emails": 1000}))

    assert found.values["open"] == 1e6
    assert 1 / 2.5 < found.values["worker_memory"] / MIB / measured["opened_peak_mib"][0] < 2.5
    assert 1 / 2.5 < found.values["restart"] / measured["restart_firing_seconds"][0] < 2.5
    assert 1 / 2.5 < found.values["takeover"] / measured["takeover_seconds"][0] < 2.5


def test_a_plan_for_the_measured_throughput_is_within_a_factor_of_two() -> None:
    measured = bench("2026-11-21T123923.json")["marq"]

    found = Plan([replace(EMAILS, run_ms=0)], Target({"emails": measured["rate"]}, headroom=1))

    cores = measured["tracker_cpu_seconds"] / (400_000 / measured["rate"])
    assert 1 / 2 < found.values["tracker_cores"] / cores < 2
    assert found.values["consumers"] == 2  # a process did this rate alone, and not a message a second more
    assert Plan([EMAILS], Target({"emails": measured["rate"] / 2}, headroom=1)).values["consumers"] == 1


def test_each_constant_names_an_existing_source_and_a_command() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.value > 0, name
        for path in (word for word in constant.source.replace(":", " ").replace(",", " ").split() if "/" in word):
            assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), path
        if "lab/bench/results" in constant.source:
            assert constant.command.startswith("make "), name


def test_loads_beyond_the_measurements_are_warned_about() -> None:
    slow = replace(EMAILS, run_p99_ms=60_000)

    found = Plan([slow], Target({"emails": 1}, delayed=50_000_000))

    assert len(found.warnings) == 3
    assert "lease is 30s" in found.warnings[0]
    assert "50,000,000 open messages of a worker" in found.warnings[2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"replication": 0}, "--replication 0: expected 1 or more"),
        ({"headroom": 0.5}, "--headroom 0.5: expected a factor of 1 or more"),
        ({"delayed": -1}, "--delayed -1: expected 0 or more"),
    ],
)
def test_an_invalid_target_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        Target({"emails": 1.0}, **wrong)


@pytest.mark.parametrize("texts", [["0"], ["-1"], ["emails=0"], ["nan"], ["many"], [""], ["inf"], ["emails="]])
def test_an_invalid_rate_is_refused(texts: list[str]) -> None:
    with pytest.raises(PipelineError, match="expected messages a second, more than 0"):
        rates(texts)


def test_a_total_rate_with_that_of_a_queue_is_refused() -> None:
    with pytest.raises(PipelineError, match="one rate of all queues together, or one for each named queue"):
        rates(["5000", "emails=2000"])
    assert rates(["emails=2000", "a=b=1"]) == (None, {"emails": 2000, "a=b": 1})


def test_a_plan_reads_as_text_with_each_quantity() -> None:
    result = Plan([EMAILS], Target({"emails": 5000}), guess=True)

    text = "\n".join(text_lines(result))

    assert text.startswith("A GUESS")
    assert "PLAN: 4 partitions" in text
    assert all(f"\n{what}: " in text for what, _ in QUANTITIES.values())
    assert "Headroom: 2 x" in text


def ran(queue: str, sent: float, runs: list[float], *waiting: Row, **columns: Any) -> Row:
    """A message whose deliveries ran this many seconds, one after the other; the last one was acked."""
    each = [
        delivery(sent, run_ms=int(run * 1000), ended_at=at(sent + run), lease_ms=30_000, renewals=1) for run in runs
    ]
    return message(queue, sent, **{"state": "acked", "dead_letters": 0, **columns, "deliveries": [*waiting, *each]})


def test_profiles_are_measured_from_messages(spark: SparkSession) -> None:
    rows = frame(
        spark,
        ran("emails", 0, [0.5]),
        ran("emails", 10, [0.5, 3.0], dead_letters=1),
        ran("emails", 100, [], size=400),
        ran("reports", 40, [1.0], delivery(None, topic="~", due_at=at(100), outcome="delivered", ended_at=at(100))),
    )

    found = {row.queue: Profile.measured(row) for row in profiles(rows).collect()}

    emails, reports = found["emails"], found["reports"]
    assert (emails.rate_mean, emails.rate_peak) == (pytest.approx(3 / 100), pytest.approx(2 / 60))
    assert (emails.size_bytes, emails.deliveries, emails.dead_share) == (200, 1.5, pytest.approx(1 / 3))
    assert (emails.run_ms, emails.hold_ms) == (pytest.approx(4000 / 3), pytest.approx(4000 / 3))
    assert emails.run_p99_ms == 3000
    assert (emails.rows_share, emails.renewals, emails.lease_ms) == (pytest.approx(1 / 3), 1, 30_000)
    assert (emails.delayed_share, reports.delayed_share, reports.delay_ms) == (0, 1, 60_000)


def test_the_job_plans_from_the_table(spark: SparkSession, data: Path, command: Command) -> None:
    words = "plan --rate 5000 --json"
    assert "has no table 'lifecycle' yet" in command(words).refusal
    Lake(spark, str(data)).write("lifecycle", frame(spark, ran("emails", 0, [0.5]), ran("reports", 1, [0.5])))

    done = command(words)

    assert done.code == 0
    assert (done.json["guess"], done.json["target"]["rates"]) == (False, {"emails": 2500, "reports": 2500})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--size 200 --run 50ms", "--size and --run describe the messages: set the load with --rate"),
        ("--rate 1 --size many --run 1s", "--size 'many': expected bytes"),
        ("--rate 1 --size 200 --run 1s --attempts 0", "--attempts 0: expected 1 or more"),
        ("--rate 1 --size 200 --run 1s --lease 0s", "--lease '0s': expected at least 1ms"),
    ],
)
def test_invalid_options_are_one_sentence(command: Command, words: str, said: str) -> None:
    assert command(f"plan {words}").refusal.startswith(said)


@pytest.mark.parametrize(("text", "expected"), [("200", 200), ("1.5kB", 1500), ("4MiB", 4 << 20), ("2GiB", 2 << 30)])
def test_sizes_have_units(text: str, expected: int) -> None:
    assert size_bytes("--target", text) == expected
