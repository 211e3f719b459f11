"""Backoff: exponential, bounded, and the same for every tracker that folds the same marker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.settings.backoff import Backoff

_backoffs = st.builds(Backoff, st.integers(0, 10_000), st.floats(1, 100), st.integers(0, 10**7), jitter=st.booleans())


@pytest.mark.parametrize(("attempt", "wait_ms"), [(1, 1_000), (2, 2_000), (3, 4_000), (10, 512_000), (11, 600_000)])
def test_without_jitter_the_wait_doubles_up_to_the_limit(attempt: int, wait_ms: int) -> None:
    assert Backoff(jitter=False).delay_ms(attempt, b"any") == wait_ms


@given(_backoffs, st.integers(1, 2**32 - 1), st.binary(max_size=30))
def test_any_wait_is_between_a_half_and_all_of_the_full_one(backoff: Backoff, attempt: int, seed: bytes) -> None:
    full_ms = Backoff(backoff.base_ms, backoff.factor, backoff.max_ms, jitter=False).delay_ms(attempt, seed)

    wait_ms = backoff.delay_ms(attempt, seed)

    assert full_ms // 2 <= wait_ms <= full_ms <= backoff.max_ms
    assert wait_ms == backoff.delay_ms(attempt, seed)


def test_an_attempt_too_large_for_a_float_waits_the_longest() -> None:
    assert Backoff(jitter=False).delay_ms(2**32 - 1, b"") == 600_000


def test_messages_that_failed_together_do_not_come_back_together() -> None:
    waits = {Backoff().delay_ms(1, b"%d" % number) for number in range(1_000)}

    assert len(waits) > 300
    assert min(waits) < 550
    assert max(waits) > 950


def test_another_attempt_waits_by_another_chance() -> None:
    backoff = Backoff(1_000, 1.0, 1_000)

    assert len({backoff.delay_ms(attempt, b"seed") for attempt in range(1, 20)}) > 10


def test_a_list_of_delays_is_gone_through_and_its_last_one_repeats() -> None:
    backoff = Backoff(jitter=False, delays_ms=(1_000, 5_000, 60_000))

    assert [backoff.delay_ms(attempt, b"m") for attempt in (1, 2, 3, 4, 2**32 - 1)] == [
        1_000, 5_000, 60_000, 60_000, 60_000,
    ]  # fmt: skip


def test_jitter_of_a_list_takes_away_a_half_at_most() -> None:
    backoff = Backoff(jitter=True, delays_ms=(1_000,))

    delays = {backoff.delay_ms(1, b"%d" % number) for number in range(200)}

    assert len(delays) > 100
    assert min(delays) >= 500
    assert max(delays) <= 1_000
