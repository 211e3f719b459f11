"""Changes of visibility timeouts: when the tracker is asked, and what a late one gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from marq.client.message_token import Token
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Source
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.handles import Handle
from marq_worker.sqs.visibility import MARGIN_MS, MAX_CHANGES, VisibilityChanges


def handle(offset: int = 1) -> Handle:
    """A handle whose lease ends at 1,030 s."""
    return Handle(Token("emails", 7, Source("marq.messages", 0), offset), "a", 1, 1_030_000)


class Tracker:
    """The tracker and the markers for it; the brokers' time is 1,000 s."""

    def __init__(self) -> None:
        self.now_s: float | None = 1_000.0
        self.asked = 0
        self.answer: bool | Exception = True
        self.written: list[tuple[int, int]] = []

    def broker_ms(self) -> int | None:
        return None if self.now_s is None else round(self.now_s * 1000)

    async def is_in_flight(self, token: Token) -> bool:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def renew(self, leases: Sequence[tuple[Token, int]]) -> None:
        self.written += [(token.offset, lease_ms) for token, lease_ms in leases]

    async def release(self, tokens: Sequence[Token]) -> None:
        self.written += [(token.offset, 0) for token in tokens]


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def changes(tracker: Tracker) -> VisibilityChanges:
    both: Any = tracker
    return VisibilityChanges(both, both)


async def test_a_change_in_time_asks_nobody_and_so_do_further_ones(
    tracker: Tracker, changes: VisibilityChanges
) -> None:
    for now_s in (1_000, 1_020, 1_040, 1_060):
        tracker.now_s = now_s
        await changes.change(handle(), 30)
    await changes.change(handle(), 0)

    assert (tracker.asked, tracker.written) == (0, [(1, 30_000)] * 4 + [(1, 0)])


async def test_a_late_change_is_refused_without_a_marker(tracker: Tracker, changes: VisibilityChanges) -> None:
    tracker.answer = False
    tracker.now_s = 1_030 - MARGIN_MS / 1000

    for visibility_s in (30, 0):
        with pytest.raises(SqsError) as caught:
            await changes.change(handle(), visibility_s)
        assert caught.value.shape == "MessageNotInflight"

    assert (tracker.asked, tracker.written) == (2, [])


@pytest.mark.parametrize(("now_s", "until_ms"), [(None, 1_030_000), (1_000.0, 0)], ids=["now", "the-end"])
async def test_the_tracker_is_asked_if_the_brokers_time_is_unknown(
    tracker: Tracker, changes: VisibilityChanges, now_s: float | None, until_ms: int
) -> None:
    """Clocks of endpoints differ, so those do not tell whether a lease has ended."""
    tracker.now_s, tracker.answer = now_s, False

    with pytest.raises(SqsError):
        await changes.change(handle()._replace(until_ms=until_ms), 30)

    tracker.answer = True
    await changes.change(handle()._replace(until_ms=until_ms), 30)
    assert tracker.written == [(1, 30_000)]


async def test_a_lease_that_another_endpoint_has_extended_is_changed(
    tracker: Tracker, changes: VisibilityChanges
) -> None:
    tracker.now_s = 1_100

    await changes.change(handle(), 30)

    assert (tracker.asked, tracker.written) == (1, [(1, 30_000)])


async def test_a_lease_that_was_shortened_here_is_asked_for(tracker: Tracker, changes: VisibilityChanges) -> None:
    await changes.change(handle(), 1)
    tracker.answer = False

    with pytest.raises(SqsError):
        await changes.change(handle(), 30)


async def test_a_change_is_made_if_no_tracker_answers(tracker: Tracker, changes: VisibilityChanges) -> None:
    tracker.now_s, tracker.answer = 1_100, BrokerUnavailable("away")

    await changes.change(handle(), 30)

    assert tracker.written == [(1, 30_000)]


async def test_the_oldest_changes_are_forgotten_first(tracker: Tracker, changes: VisibilityChanges) -> None:
    for offset in range(MAX_CHANGES + 1):
        await changes.change(handle(offset), 600)
    tracker.now_s = 1_100

    await changes.change(handle(MAX_CHANGES), 600)
    assert tracker.asked == 0
    await changes.change(handle(0), 600)
    assert tracker.asked == 1
