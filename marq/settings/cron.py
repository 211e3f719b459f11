"""The next time of a schedule, by its cron expression and time zone.

The package cronsim follows Debian's cron when clocks change. A time of day that is skipped fires right after the gap. A
time of day that occurs twice fires the first time. Expressions for every hour or minute fire in both hours. cronsim is
imported at its first use, so a service that only defines schedules works without it. Then only the workers check
expressions.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from marq.settings.schedule_definitions import CRON_NAMES, Schedule
from marq.wire.errors import ConfigError

log = logging.getLogger("marq")


def next_time(schedule: Schedule, after_s: int) -> int | None:
    """Return the next time after ``after_s``, both in seconds since the epoch; None if it is over 50 years ahead.

    Raises ConfigError if the expression or the time zone can't be understood, or cronsim is missing.
    """
    try:
        from cronsim import CronSim, CronSimError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"schedule {schedule.name!r}: the times of cron expressions need a package that is missing: pip install"
            " 'marq[schedules]'"
        ) from error
    zone = _zone(schedule)
    try:
        # In the hour that occurs twice, the clock may return to an earlier time.
        expression = CRON_NAMES.get(schedule.cron, schedule.cron)
        for moment in CronSim(expression, datetime.fromtimestamp(after_s, zone)):
            if moment.timestamp() > after_s:
                return int(moment.timestamp())
    except CronSimError as error:
        raise ConfigError(
            f"schedule {schedule.name!r}: cron: {schedule.cron!r} can't be understood: {str(error).lower()}"
        ) from error
    except (OverflowError, ValueError):
        # Past the end of the calendar.
        return None
    return None


def check_times(schedule: Schedule, now_s: float) -> None:
    """Check a schedule, but its times only if cronsim is installed. Raises ConfigError."""
    _zone(schedule)
    try:
        import cronsim  # noqa: F401
    except ModuleNotFoundError:
        return
    if next_time(schedule, int(now_s)) is None:
        raise ConfigError(f"schedule {schedule.name!r}: cron: {schedule.cron!r} matches no time in the next 50 years")


class Times:
    """:func:`next_time` without errors: an invalid schedule has no next time, and is logged once."""

    def __init__(self) -> None:
        #: The errors of invalid schedules, by name.
        self.problems: dict[str, str] = {}

    def __call__(self, schedule: Schedule, after_s: int) -> int | None:
        try:
            time_s = next_time(schedule, after_s)
        except ConfigError as error:
            if self.problems.get(schedule.name) != str(error):
                log.error("no messages are sent for a schedule: %s", error)
            self.problems[schedule.name] = str(error)
            return None
        self.problems.pop(schedule.name, None)
        return time_s


def _zone(schedule: Schedule) -> tzinfo:
    if schedule.timezone == "UTC":
        return UTC
    try:
        return _zone_info(schedule.timezone)
    except (ZoneInfoNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"schedule {schedule.name!r}: timezone: {schedule.timezone!r} is unknown; use a name such as"
            " 'Europe/Berlin'. If this machine lacks time zone data, pip install tzdata"
        ) from error


@lru_cache(maxsize=1_000)
def _zone_info(name: str) -> ZoneInfo:
    return ZoneInfo(name)
