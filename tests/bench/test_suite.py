"""The suite: turns, medians, what is skipped, what fails, bars."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from bench.__main__ import chosen, exit_code
from bench.bars import Bar
from bench.clients.drain_marq import WAYS
from bench.clients.work import Work
from bench.load import fill
from bench.rabbitmq import rabbitmq
from bench.report import kept
from bench.rows import ROWS
from bench.rows.drain import crossing, native
from bench.settings import Size
from bench.suite import Bench, Figures, Outcome, Row, Skipped, _take_turns, measured
from broker.embedded import EmbeddedBroker

SIZE = Size(1_000, 3, frozenset())


def nowhere(tmp_path: Path, said: list[str] | None = None) -> Bench:
    return Bench("nowhere", tmp_path, SIZE, (said if said is not None else []).append)


def test_systems_take_turns_and_medians_count(tmp_path: Path) -> None:
    order: list[tuple[str, int]] = []
    numbers = {"a": count(10), "b": count(20)}

    def system(name: str, bench: Bench) -> Figures:
        order.append((name, bench.size.messages))
        return {"rate": float(next(numbers[name]))}

    systems = {name: lambda bench, name=name: system(name, bench) for name in "ab"}
    outcome = Outcome(Row("row", "what", systems, warm=10))
    _take_turns(outcome, nowhere(tmp_path))

    assert order == [("a", 10), ("b", 10), *[("a", 1_000), ("b", 1_000)] * 3]
    assert outcome.medians == {"a": {"rate": 12.0}, "b": {"rate": 22.0}}


def test_a_system_that_is_not_there_is_skipped_once_and_the_others_are_measured(tmp_path: Path) -> None:
    said: list[str] = []

    def missing(bench: Bench) -> Figures:
        raise Skipped("no broker on this machine")

    outcome = Outcome(Row("row", "what", {"missing": missing, "there": lambda bench: {"rate": 1.0}}, runs=2))
    _take_turns(outcome, nowhere(tmp_path, said))

    assert outcome.skipped == {"missing": "no broker on this machine"}
    assert [line for line in said if "SKIPPED" in line] == ["row missing: SKIPPED: no broker on this machine"]
    assert {name: len(runs) for name, runs in outcome.runs.items()} == {"there": 2}


def test_a_name_stands_for_a_row_or_a_family_and_an_unknown_one_is_refused() -> None:
    rows = [Row(name, "", {}) for name in ("drain", "work-1ms", "work-10ms", "worker")]

    assert [row.name for row in chosen(rows, Size(1, 1, frozenset({"work"})))] == ["work-1ms", "work-10ms"]
    assert chosen(rows, Size(1, 1, frozenset())) == rows
    with pytest.raises(SystemExit, match="no row drian"):
        chosen(rows, Size(1, 1, frozenset({"drian"})))


def test_the_exit_code_tells_a_failure_from_an_unmet_bar() -> None:
    row = Row("row", "", {})
    met, unmet = Bar("what", 2.0, 1.0, "times", at_least=True), Bar("what", 2.0, 1.0, "s")

    assert exit_code([Outcome(row, bars=[met])]) == 0
    assert exit_code([Outcome(row, bars=[met, unmet])]) == 2
    assert exit_code([Outcome(row, bars=[unmet]), Outcome(row, error="broken")]) == 1


def test_a_result_keeps_every_run_and_says_which_bars_are_met() -> None:
    row = Row("row", "what it is", {})
    bars = [Bar("rate", 0.7, 0.55, "times", at_least=True, goal=0.8)]

    found = kept([Outcome(row, {"a": [{"rate": 1.0}, {"rate": 3.0}]}, bars=bars), Outcome(row, error="broken")])

    assert found["rows"]["row"]["error"] == "broken"
    assert found["failed"] == ["row"]
    assert found["bars"] == [
        {"row": "row", "what": "rate", "found": 0.7, "limit": 0.55, "unit": "times", "at_least": True, "goal": 0.8,
         "met": True}
    ]  # fmt: skip


def test_each_row_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.what and row.systems for row in ROWS)


def test_two_systems_cross_where_the_faster_one_has_made_up_for_its_later_start() -> None:
    slow, fast = {"rate": 100.0, "startup_seconds": 1.0}, {"rate": 200.0, "startup_seconds": 2.0}

    assert crossing("slow", slow, "fast", fast) == "slow is done before fast with less than 200 messages"
    assert crossing("fast", fast, "slow", slow) == "slow is done before fast with less than 200 messages"
    first = crossing("slow", slow, "fast", {**fast, "startup_seconds": 0.5})
    assert first == "fast is done before slow however many messages there are"


def test_a_share_of_the_messages_takes_time() -> None:
    work = Work.read("500/100")

    assert (work.ms, work.each, Work.read(str(work))) == (500.0, 100, work)
    assert Work.read("0") == Work()


def test_without_a_rabbitmq_that_row_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("RABBITMQ_URL", raising=False)

    with pytest.raises(Skipped, match="no rabbitmq-server is installed, and RABBITMQ_URL names no broker"), rabbitmq():
        pass


@pytest.fixture
def bench(broker: EmbeddedBroker, tmp_path: Path) -> Bench:
    return Bench(broker.bootstrap_servers, tmp_path, Size(2_000, 1, frozenset()), print, broker)


@pytest.mark.parametrize("client", ["drain_confluent", "drain_aiokafka", "drain_share"])
def test_a_peer_drains_a_topic_and_what_it_was_given_is_deleted(bench: Bench, client: str) -> None:
    # It checks by itself that each message came, and none twice.
    assert native(bench, client)["rate"] > 0

    prefix = bench._prefixes[0]
    bench.clear()
    admin = AdminClient({"bootstrap.servers": bench.servers})
    assert not [topic for topic in admin.list_topics(timeout=60).topics if topic.startswith(prefix)]


@pytest.mark.parametrize(("client", "at_a_time"), [("drain_confluent", "100"), ("drain_share", "2")])
def test_a_peer_works_on_messages_that_take_time(bench: Bench, client: str, at_a_time: str) -> None:
    assert native(bench, client, ("1", at_a_time))["rate"] > 0


async def test_marq_drains_by_every_way(servers: str, prefix: str) -> None:
    for way in WAYS:
        await fill(servers, f"{prefix}-{way}", 1_000, 200)

        assert measured("bench.clients.drain_marq", servers, f"{prefix}-{way}", "1000", way)["rate"] > 0
