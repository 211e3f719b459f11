"""Which messages a tracker may have dropped because of their deduplication ids."""

from __future__ import annotations

import pytest

from pipeline.record_parts import Id


@pytest.mark.parametrize(
    ("windows", "dropped"),
    [
        # A dropped message does not extend the window.
        ((5, 5), [False, True, False, True, False]),
        # The first window may have been the longer one, or the second one.
        ((3, 5), [False, True, True, True, True]),
        ((0, 5), [False, True, True, True, True]),
    ],
)
def test_a_message_may_be_dropped_within_the_window_of_one_that_may_be_accepted(
    windows: tuple[int, int], dropped: list[bool]
) -> None:
    id_ = Id()

    assert [id_.may_drop(now, False, *windows) for now in (0, 4, 8, 12, 16)] == dropped


def test_a_message_with_a_fact_was_accepted_although_an_earlier_one_is_unknown() -> None:
    id_ = Id()

    # The first one was a duplicate of a message before the first ingest.
    assert [id_.may_drop(now, now == 4, 5, 5) for now in (0, 4, 8, 9)] == [False, False, True, False]
