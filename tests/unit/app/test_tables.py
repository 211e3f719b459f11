"""Tables of commands: they fit the terminal, and ids are never cut."""

from __future__ import annotations

import io
from operator import itemgetter
from unittest.mock import AsyncMock

import pytest
from rich.console import Console
from yarl import URL

from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError
from marq_worker.commands.open_messages import covers, told_by_workers
from marq_worker.commands.terminal import Column, fitted, interval, seconds
from marq_worker.readable import span
from marq_worker.web.peers import Members

COLUMNS = (
    Column("id", itemgetter(0)),
    Column("reason", itemgetter(1), least=10),
    Column("attempt", itemgetter(2), rank=2, right=True),
    Column("value", itemgetter(3), rank=1, least=8),
)
ROW = ("marq.messages/11/1234567", "x" * 60, "3", "y" * 60)


def rendered(rows: list[tuple[str, ...]], width: int) -> tuple[list[str], list[str]]:
    found, needed, missing = fitted(COLUMNS, rows, width)
    out = io.StringIO()
    Console(file=out, width=max(width, needed)).print(found)
    return [line.rstrip() for line in out.getvalue().splitlines()], missing


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_a_table_is_no_wider_than_the_terminal_and_each_row_is_one_line(width: int) -> None:
    lines, _ = rendered([ROW, ROW], width)

    assert max(map(len, lines)) <= width
    # A head, a line, and the rows.
    assert len([line for line in lines if line]) == 4
    assert all(ROW[0] in line for line in lines[-2:])


def test_what_is_less_important_is_left_out_first_and_named() -> None:
    assert rendered([ROW], 80)[1] == []
    assert rendered([ROW], 48)[1] == ["attempt"]
    assert rendered([ROW], 40)[1] == ["attempt", "value"]


def test_ids_are_never_shortened() -> None:
    lines, missing = rendered([ROW], 20)

    assert ROW[0] in lines[-1]
    assert missing == ["attempt", "value"]


def test_wide_characters_count_twice_and_what_moves_the_cursor_is_shown_as_no_character() -> None:
    lines, _ = rendered([("marq.messages/0/1", "字" * 40, "1", "a\x1b[2Jb\nc")], 60)

    assert len([line for line in lines if line]) == 3
    assert "�" in lines[-1]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("duration_s", "said"),
    [(0, "0 s"), (59.4, "59 s"), (90, "1 m 30 s"), (3_600, "1 h"), (93_600, "1 d 2 h"), (-61, "-1 m 1 s")],
)
def test_a_duration_has_at_most_two_units(duration_s: float, said: str) -> None:
    assert span(duration_s) == said


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        *(("90", 90), (" 90s ", 90), ("1.5m", 90), ("2h", 7_200), ("7d", 604_800)),
        *(("1h30m", 5_400), ("1d12h", 129_600), ("2m0.5s", 120.5)),
    ],
)
def test_a_duration_is_typed_with_a_unit(typed: str, found: float) -> None:
    assert seconds("--delay", typed) == found


@pytest.mark.parametrize("typed", ["", "soon", "-3s", "3w", "1h 2m", "30m1h", "1h30", "h", "1h1h"])
def test_a_duration_that_is_none_is_named(typed: str) -> None:
    with pytest.raises(ConfigError, match=f"--delay {typed}: expected a duration"):
        seconds("--delay", typed)


def test_watch_takes_a_duration_within_limits() -> None:
    assert (interval(None), interval("2"), interval("1m30s")) == (None, 2, 90)
    with pytest.raises(ConfigError, match=r"--watch 2h: expected a duration from 0\.1 s to 3600 s"):
        interval("2h")


def part(partition: int, applied: int, **other: object) -> dict[str, object]:
    return {"partition": partition, "applied_offset": applied, "state": "owner", "alarm": "", **other}


def test_statistics_are_whole_when_the_owners_have_read_each_partition_to_its_end() -> None:
    first, second = {"partitions": [part(0, 9)]}, {"partitions": [part(1, 4)]}

    assert covers([first, second], {0: 10, 1: 5})
    assert covers([first, second], None)
    # Behind, without an owner, or stopped by an alarm.
    assert not covers([first, second], {0: 11, 1: 5})
    assert not covers([first], {0: 10, 1: 5})
    assert not covers([first, {"partitions": [part(1, 4, alarm="stalled")]}], {0: 10, 1: 5})
    assert not covers([first, {"partitions": [part(1, 4, state="waiting")]}], {0: 10, 1: 5})
    assert not covers([], None)
    # An empty topic has nothing to read.
    assert covers([first], {0: 10, 1: 0})


@pytest.mark.parametrize(("ends", "complete"), [(None, False), ({0: 10}, True), ({0: 10, 1: 5}, False)])
async def test_statistics_without_the_answer_of_a_tracker_are_complete_only_if_its_partitions_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, ends: dict[int, int] | None, complete: bool
) -> None:
    backlog = {"complete": True, "uncounted": 0, "unknown": 0}
    answer = {"partitions": [part(0, 9)], "queues": {"emails": {"waiting": 3}}, "backlog": backlog}
    members = Members([URL("http://a"), URL("http://b")], settled=True)
    asked = AsyncMock(return_value=(members, [answer, None]))
    monkeypatch.setattr("marq_worker.commands.open_messages.ask_workers", asked)

    told = await told_by_workers(ClientSettings(), ends)

    assert (told.complete, told.backlog, told.workers) == (complete, False, 2)

    asked.return_value = (members, [answer, {"partitions": [part(1, 4)], "queues": {}, "backlog": backlog}])
    told = await told_by_workers(ClientSettings(), ends)

    assert (told.complete, told.backlog) == (True, True)
