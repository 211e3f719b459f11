"""When a schedule comes next."""

from __future__ import annotations

import builtins
from datetime import UTC, datetime
from typing import Any

import pytest

import marq
from marq.settings.cron import check_times, next_time
from marq.settings.schedule_definitions import Schedule, check_schedule


def schedule(cron: str, timezone: str = "UTC") -> Schedule:
    return Schedule("s", "reports", cron, timezone=timezone)


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def following(found: Schedule, after: str, count: int) -> list[str]:
    times, time_s = [], seconds(after)
    for _ in range(count):
        following_s = next_time(found, time_s)
        assert following_s is not None
        assert following_s > time_s
        time_s = following_s
        times.append(datetime.fromtimestamp(time_s, UTC).strftime("%m-%d %H:%M:%S"))
    return times


def test_the_next_time_is_after_the_one_that_is_given() -> None:
    assert following(schedule("*/20 * * * *"), "2026-01-01T00:00:00+00:00", 3) == [
        "01-01 00:20:00", "01-01 00:40:00", "01-01 01:00:00",
    ]  # fmt: skip
    assert following(schedule("0 9 * * MON-FRI", "Europe/Berlin"), "2026-01-02T08:00:00+00:00", 2) == [
        "01-05 08:00:00", "01-06 08:00:00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("@hourly", "01-01 13:00:00"),
        ("@daily", "01-02 00:00:00"),
        ("@midnight", "01-02 00:00:00"),
        ("@weekly", "01-04 00:00:00"),
        ("@monthly", "02-01 00:00:00"),
        ("@yearly", "01-01 00:00:00"),
        ("@annually", "01-01 00:00:00"),
    ],
)
def test_common_times_have_names(name: str, expected: str) -> None:
    check_schedule({"queue": "reports", "cron": name}, "the schedule", whole=True)
    assert following(schedule(name), "2026-01-01T12:30:00+00:00", 1) == [expected]


def test_a_misspelt_name_is_answered_with_all_names() -> None:
    with pytest.raises(marq.ConfigError, match=r"or one of @hourly, @daily, .*, not '@dayly'"):
        check_schedule({"queue": "reports", "cron": "@dayly"}, "the schedule")


def test_six_fields_begin_with_seconds() -> None:
    assert following(schedule("*/30 * * * * *"), "2026-01-01T00:00:00+00:00", 2) == ["01-01 00:00:30", "01-01 00:01:00"]


def test_a_time_of_day_that_is_left_out_in_spring_comes_after_the_gap_and_once() -> None:
    found = schedule("30 2 * * *", "Europe/Berlin")

    assert following(found, "2026-03-28T02:00:00+00:00", 2) == ["03-29 01:00:00", "03-30 00:30:00"]


@pytest.mark.parametrize("after", ["10-24T12:00:00", "10-25T00:30:00", "10-25T01:15:00"])
def test_a_time_of_day_that_there_is_twice_in_autumn_comes_once(after: str) -> None:
    found = schedule("30 2 * * *", "Europe/Berlin")
    expected = ["10-25 00:30:00", "10-26 01:30:00", "10-27 01:30:00"]

    assert following(found, f"2026-{after}+00:00", 2) == (expected[:2] if "10-24" in after else expected[1:])


def test_what_comes_each_half_hour_comes_so_in_both_hours() -> None:
    found = schedule("*/30 * * * *", "Europe/Berlin")

    assert following(found, "2026-10-25T00:00:00+00:00", 4) == [
        "10-25 00:30:00", "10-25 01:00:00", "10-25 01:30:00", "10-25 02:00:00",
    ]  # fmt: skip


def test_all_times_of_a_year_are_different_and_in_order_wherever_one_begins() -> None:
    for cron in ("15,45 1-3 * * *", "*/7 2 * * *", "0 0,2,3 * 3,10 *"):
        found = schedule(cron, "America/New_York")
        time_s, end_s, times = seconds("2026-01-01T00:00:00+00:00"), seconds("2027-01-01T00:00:00+00:00"), []
        while (following_s := next_time(found, time_s)) is not None and following_s < end_s:
            # Beginning anywhere in between finds the same.
            assert next_time(found, following_s - 1) == following_s
            times.append(following_s)
            time_s = following_s

        assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("cron", "timezone", "said"),
    [
        ("61 * * * *", "UTC", "schedule 's': cron: '61 .*' can't be understood: bad minute"),
        ("* * * FOO *", "UTC", "bad month"),
        ("0 0 30 2 *", "UTC", "bad day-of-month"),
        ("0 0 * * *", "Europe/Nowhere", "schedule 's': timezone: 'Europe/Nowhere' is unknown"),
    ],
)
def test_what_can_not_be_followed_is_an_error_that_names_the_schedule(cron: str, timezone: str, said: str) -> None:
    with pytest.raises(marq.ConfigError, match=said):
        check_times(schedule(cron, timezone), 0)


def test_a_service_without_the_library_defines_schedules_and_leaves_expressions_to_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cronsim":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)

    check_times(schedule("61 * * * *"), 0)
    with pytest.raises(marq.ConfigError, match=r"pip install 'marq\[schedules\]'"):
        next_time(schedule("1 * * * *"), 0)


def test_of_two_restricted_day_fields_one_must_match_and_both_if_one_begins_with_a_star() -> None:
    # The last day of June 2026 is a Tuesday, that of July a Friday; "L" and MON-THU are both restrictions.
    assert following(schedule("0 8 L * MON-THU"), "2026-07-29T09:00:00+00:00", 3) == [
        "07-30 08:00:00", "07-31 08:00:00", "08-03 08:00:00",
    ]  # fmt: skip
    # Fridays in February 2026: 6, 13, 20, 27.
    assert following(schedule("0 0 */2 * FRI"), "2026-02-01T00:00:00+00:00", 2) == ["02-13 00:00:00", "02-27 00:00:00"]
