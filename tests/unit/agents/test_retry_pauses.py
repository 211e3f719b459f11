"""How long an owner waits before it takes its partition over again."""

from __future__ import annotations

import pytest

from marq_worker.owner.retry_pauses import RetryPauses


@pytest.fixture(autouse=True)
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)


def test_pauses_grow_to_a_limit_however_long_an_outage_lasts() -> None:
    pauses = RetryPauses()

    seconds = [pauses.next_s() for _ in range(2_000)]

    assert seconds[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert seconds[-1] == 5.0


def test_a_takeover_makes_the_next_pause_short_again() -> None:
    pauses = RetryPauses()
    for _ in range(5):
        pauses.next_s()

    pauses.took_over()

    assert pauses.next_s() == 0.2


def test_two_workers_that_fence_each_other_wait_longer_each_time_until_one_has_written_rows() -> None:
    pauses = RetryPauses()
    seconds = []
    for _ in range(4):
        pauses.took_over()
        pauses.fenced()
        seconds.append(pauses.next_s())
    pauses.took_over()
    pauses.wrote()
    pauses.fenced()

    assert [*seconds, pauses.next_s()] == [0.2, 0.4, 0.8, 1.6, 0.2]
