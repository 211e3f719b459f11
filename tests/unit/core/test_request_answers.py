"""Answers to requests, as markers that the format can express."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from marq.core.lease_book import PendingReplies
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.rows import LeaseRow
from marq.wire.marker_codec import encode
from marq.wire.markers import MAX_BATCH_MARKERS, Answer, Cancel, Source

SOURCE = Source("marq.messages", 0)


class NoMessages:
    marks: Mapping[tuple[str, Source], AcquiredRanges] = {}

    def open_in(self, queue: str, source: Source) -> Mapping[int, LeaseRow]:
        return {}

    def is_firing(self, queue: str, source: Source, offset: int) -> bool:
        return False


@pytest.mark.parametrize(
    "offsets", [range(MAX_BATCH_MARKERS + 1), [0, 2**32]], ids=["more than a batch has", "far apart"]
)
def test_answers_to_requests_of_one_client_are_split(offsets: list[int]) -> None:
    """They may have been read together after the workers were away."""
    replies = PendingReplies()
    for offset in offsets:
        replies.ask(Cancel("q", 1, SOURCE, [offset]), [offset], None)

    answers = [reply for reply in replies.take(NoMessages()) if isinstance(reply, Answer)]

    assert all(map(encode, answers))
    assert [offset for answer in answers for offset in answer.offsets] == list(offsets)
