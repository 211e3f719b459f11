"""Windows of time: into which ones a job cuts the range that a user wants, or all that is known."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.errors import PipelineError
from pipeline.spans import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, show_moment, show_ms

#: Default windows have the shortest of LENGTHS_MS that yields at most this many.
DEFAULT_WINDOWS = 120
LENGTHS_MS = (
    *(SECOND_MS * n for n in (1, 2, 5, 10, 30)),
    *(MINUTE_MS * n for n in (1, 2, 5, 10, 30)),
    *(HOUR_MS * n for n in (1, 2, 6, 12)),
    *(DAY_MS * n for n in (1, 7, 30)),
)
MAX_WINDOWS = 10_000


@dataclass(frozen=True)
class Windows:
    """A time range in ms, cut into windows at whole multiples of their length since 1970."""

    begin_ms: int
    end_ms: int
    length_ms: int

    @classmethod
    def cut(cls, begin_ms: int, end_ms: int, length_ms: int | None = None) -> Windows:
        """Return the windows of a range, by default of a length that makes a readable plot."""
        if begin_ms >= end_ms:
            raise PipelineError(
                f"--from {show_moment(begin_ms)} is not before --to {show_moment(end_ms)}: expected a range of time"
            )
        length = length_ms or _fitting(end_ms - begin_ms, DEFAULT_WINDOWS)
        windows = cls(begin_ms, end_ms, length)
        if windows.count > MAX_WINDOWS:
            fitting = _fitting(end_ms - begin_ms, MAX_WINDOWS)
            raise PipelineError(
                f"--window {show_ms(length)} makes {windows.count:,} windows from {show_moment(begin_ms)} to"
                f" {show_moment(end_ms)}, expected at most {MAX_WINDOWS:,}; take {show_ms(fitting)} or a shorter range"
            )
        return windows

    def whole(self, *, begin: bool = True, end: bool = True) -> Windows:
        """Return the same windows, the first (``begin``) and the last one (``end``) of full length."""
        first, last = self.first * self.length_ms, (self.first + self.count) * self.length_ms
        return Windows(first if begin else self.begin_ms, last if end else self.end_ms, self.length_ms)

    @property
    def first(self) -> int:
        """The multiple of the length at which the first window begins."""
        return self.begin_ms // self.length_ms

    @property
    def count(self) -> int:
        return -(-self.end_ms // self.length_ms) - self.first

    def index(self, at_ms: Column) -> Column:
        """Return the window of a moment: 0 also for earlier moments, ``count`` for later ones."""
        number = F.floor(at_ms / F.lit(self.length_ms)) - F.lit(self.first)
        inside = F.greatest(F.lit(0).cast("long"), number.cast("long"))
        return F.when(at_ms >= F.lit(self.end_ms), F.lit(self.count).cast("long")).otherwise(inside)

    def contains(self, at_ms: Column) -> Column:
        return (at_ms >= F.lit(self.begin_ms)) & (at_ms < F.lit(self.end_ms))


def _fitting(span_ms: int, most: int) -> int:
    return next((length for length in LENGTHS_MS if span_ms <= length * most), -(-span_ms // (most * DAY_MS)) * DAY_MS)


def span(lifecycle: DataFrame) -> DataFrame:
    """Return one row with the times of the first and the last known event: ``begin_ms`` and ``last_ms``."""
    of_message = F.array("sent_at", "ended_at")
    of_deliveries = F.flatten(F.transform("deliveries", lambda d: F.array(d.acquired_at, d.settled_at, d.ended_at)))
    # Concatenating a null would make the whole array null.
    times = F.concat(of_message, F.coalesce(of_deliveries, F.slice(of_message, 1, 0)))
    return lifecycle.select(
        F.unix_millis(F.min(F.array_min(times))).alias("begin_ms"),
        F.unix_millis(F.max(F.array_max(times))).alias("last_ms"),
    )


def chosen_windows(lifecycle: DataFrame, begin: int | None, end: int | None, length: int | None) -> Windows:
    """Return the windows of the requested range, by default of all that is known."""
    known = span(lifecycle).first()
    if known is None or known.begin_ms is None:
        raise PipelineError("the table lifecycle has no messages: run ingest and lifecycle after messages were sent")
    first, last = known.begin_ms if begin is None else begin, known.last_ms + 1 if end is None else end
    return Windows.cut(first, last, length).whole(begin=begin is None, end=end is None)
