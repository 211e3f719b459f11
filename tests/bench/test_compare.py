"""Two trees are compared: the arguments that are refused, the rows of both, and the table of medians and ratios."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab.bench import __main__ as bench
from lab.bench import compare as comparison
from lab.bench.compare import WORKING, Tree, extracted, paired, ratio_tables, ratios, short_name, with_sums
from lab.bench.suite import BenchRow, RowOutcome, UsageError

HERE = Path()
TREES = (Tree("abc", HERE, HERE), Tree(WORKING, HERE, HERE))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a repository with one commit, of a file that is not a benchmark."""
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        (tmp_path / "file").touch()
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(comparison, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("commit", ["nowhere", "--all", "HEAD~1", "HEAD:file"])
def test_a_commit_that_does_not_exist_is_refused(repository: Path, commit: str) -> None:
    with pytest.raises(UsageError, match=f"commit {commit} does not exist"):
        short_name(commit)


def test_a_commit_without_the_benchmark_is_refused_and_its_files_are_what_was_committed(repository: Path) -> None:
    (repository / "file").write_text("changed later")

    with pytest.raises(UsageError, match="does not contain lab/bench"):
        extracted(short_name("HEAD"), repository / "tree")

    assert (repository / "tree" / "file").read_text() == ""


def test_a_wrong_variable_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench"])
    monkeypatch.setenv("ONLY", "drain")
    monkeypatch.setenv("COMPARE", "no-such-commit")

    with pytest.raises(SystemExit) as ended:
        bench.main()

    assert (ended.value.code, capsys.readouterr().err) == (2, "bench: commit no-such-commit does not exist\n")


def test_each_system_that_both_trees_have_is_measured_from_both_in_turn() -> None:
    row = BenchRow("row", "what", {"one": lambda bench: {}, "new": lambda bench: {}, "two": lambda bench: {}}, runs=3)

    pair = paired(row, {"row": ["two", "one", "old"]}, TREES)

    assert list(pair.systems) == ["one, abc", "one, working tree", "two, abc", "two, working tree"]
    assert (pair.bars({}), pair.runs) == ([], 99)


@pytest.mark.parametrize("known", [{"other": ["one"]}, {"row": ["old"]}])
def test_a_row_that_the_commit_does_not_have_is_refused(known: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match="commit abc does not have row row"):
        paired(BenchRow("row", "what", {"one": lambda bench: {}}), known, TREES)


def test_the_parts_of_a_system_are_summed_up() -> None:
    drain = {"rate": 9.0, "cpu_seconds": 1.0, "tracker_cpu_seconds": 0.5, "broker_cpu_seconds": 0.25}

    assert with_sums(drain) == {**drain, "all_cpu_seconds": 1.75}
    assert with_sums({"worker_cores": 0.5, "broker_cores": 0.25})["all_cores"] == 0.75
    assert with_sums({"worker_cpu_seconds_per_million": 1.0}) == {"worker_cpu_seconds_per_million": 1.0}


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_of_the_runs() -> None:
    before = [{"rate": 100.0, "p99_ms": 4.0}, {"rate": 200.0, "p99_ms": 5.0}, {"rate": 400.0, "p99_ms": 8.0}]
    after = [{"rate": 150.0, "p99_ms": 4.0}, {"rate": 1000.0, "p99_ms": 4.0}, {"rate": 300.0, "p99_ms": 4.0}]

    # By hand: 150/100, 1000/200 and 300/400; 4/4, 4/5 and 4/8.
    assert ratios(before, after) == [
        ("rate", "200 (100..400)", "300 (150..1,000)", "1.500 (0.750..5.000)"),
        ("p99 ms", "5 (4..8)", "4 (4..4)", "0.800 (0.500..1.000)"),
    ]


def test_a_measurement_of_one_tree_has_no_ratio_and_a_zero_is_not_divided_by() -> None:
    before = [{"gone": 1.0, "duplicates": 0.0, "behind_seconds": 0.0}]
    after = [{"duplicates": 0.0, "behind_seconds": 0.5, "new": 2.0}]

    assert ratios(before, after) == [
        ("gone", "1 (1..1)", "", ""),
        ("duplicates", "0 (0..0)", "0 (0..0)", "1.000 (1.000..1.000)"),
        ("behind seconds", "0 (0..0)", "0.5 (0.5..0.5)", "inf (inf..inf)"),
        ("new", "", "2 (2..2)", ""),
    ]


def test_a_system_that_failed_in_one_tree_has_no_table() -> None:
    runs = {"a, 10 ms, abc": [{"rate": 1.0}] * 2, "a, 10 ms, working tree": [{"rate": 2.0}], "b, abc": [{"rate": 1.0}]}

    [table] = ratio_tables(RowOutcome(BenchRow("row", "what", {}), runs))

    assert str(table.title) == "row: a, 10 ms (1 runs; in brackets: min..max)"
    assert [column.header for column in table.columns] == ["median", "abc", "working tree", "ratio"]
