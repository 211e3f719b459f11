"""The number of messages of a queue: always an answer, also before trackers have counted."""

from __future__ import annotations

from typing import Any

import pytest

from marq_worker.sqs import counts
from marq_worker.sqs.counts import MessageCounts, QueueCounts


class Statistics:
    def __init__(self, *, complete: bool, **queues: dict[str, float]) -> None:
        self.asked = 0
        self.answer: dict[str, Any] = {"backlog": {"complete": complete}, "queues": queues}

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        return self.answer


async def test_released_messages_are_visible() -> None:
    emails = {"waiting": 5, "waiting_for_redelivery": 2, "in_flight": 3, "waiting_for_delivery": 4}

    assert await QueueCounts(Statistics(complete=True, emails=emails)).of("emails") == MessageCounts(
        7, 3, 4, known=True
    )


async def test_what_no_tracker_has_counted_is_missing_and_not_an_error() -> None:
    counted = QueueCounts(Statistics(complete=False, emails={"in_flight": 3}))

    assert await counted.of("emails") == MessageCounts(0, 3, 0, known=False)
    assert await counted.of("unknown") == MessageCounts(0, 0, 0, known=False)


@pytest.mark.parametrize(("complete", "asked"), [(True, 1), (False, 2)])
async def test_incomplete_numbers_are_asked_for_again_sooner(
    monkeypatch: pytest.MonkeyPatch, complete: bool, asked: int
) -> None:
    statistics = Statistics(complete=complete)
    monkeypatch.setattr(counts, "INCOMPLETE_AGE_S", 0)
    counted = QueueCounts(statistics)

    for _ in range(2):
        await counted.of("emails")

    assert statistics.asked == asked
