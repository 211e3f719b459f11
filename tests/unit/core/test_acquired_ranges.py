"""Marks: intervals that behave like a set of offsets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from marq.core.storage.acquired_ranges import MAX_INTERVALS, AcquiredRanges

_intervals = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(_intervals, max_size=40))
def test_marks_are_the_set_of_all_offsets_added(added: list[tuple[int, int]]) -> None:
    marks, model = AcquiredRanges(), set()

    for start, end in added:
        marks.add(start, end)
        model.update(range(start, end))

        assert {offset for offset in range(80) if offset in marks} == model
        assert marks.end == max(model) + 1


@given(st.lists(_intervals, max_size=40))
def test_intervals_are_sorted_and_never_touch(added: list[tuple[int, int]]) -> None:
    marks = AcquiredRanges()

    for start, end in added:
        marks.add(start, end)

    intervals = marks.intervals
    assert all(start < end for start, end in intervals)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(intervals))


@given(st.lists(_intervals, max_size=20), st.lists(_intervals, max_size=5))
def test_marks_made_from_intervals_go_on_as_before(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    marks = AcquiredRanges()
    for start, end in before:
        marks.add(start, end)

    restored = AcquiredRanges(marks.intervals)
    for start, end in after:
        marks.add(start, end)
        restored.add(start, end)

    assert restored.intervals == marks.intervals


@given(st.lists(_intervals, min_size=1, max_size=40), st.integers(0, 80), st.integers(0, 80))
def test_what_is_free_and_which_intervals_a_range_has(added: list[tuple[int, int]], one: int, other: int) -> None:
    marks = AcquiredRanges()
    for start, end in added:
        marks.add(start, end)
    known = set(range(marks.intervals[0][0])) | {offset for offset in range(80) if offset in marks}
    low, high = sorted((one, other))

    assert marks.first_free(one) == next(offset for offset in range(one, 100) if offset not in known)
    assert marks.within(low, high) == [(s, e) for s, e in marks.intervals if s < high and e > low]


def test_past_the_limit_the_lowest_interval_is_forgotten_and_no_gap_is_closed() -> None:
    marks = AcquiredRanges()

    for number in range(MAX_INTERVALS + 1):
        marks.add(number * 10, number * 10 + 1)

    assert len(marks.intervals) == MAX_INTERVALS
    assert 0 not in marks
    assert 10 in marks
    assert 15 not in marks
    assert marks.end == MAX_INTERVALS * 10 + 1
