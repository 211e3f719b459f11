"""How often an address may do something."""

from __future__ import annotations

from marq_worker.web.connection_limits import MAX_ADDRESSES, RateLimiter
from tests.unit.client.fakes import Clock


def test_a_burst_passes_and_then_a_fixed_rate() -> None:
    clock = Clock()
    rate = RateLimiter(2, 0.5, clock)

    for _ in range(2):
        assert rate.wait_s("a") == 0
        rate.spend("a")

    assert rate.wait_s("a") == 2.0
    assert rate.wait_s("b") == 0
    clock.now_s += 2.0
    assert rate.wait_s("a") == 0


def test_a_release_at_shutdown_does_not_count() -> None:
    rate = RateLimiter(1, 0.1, Clock())
    rate.spend("a")

    rate.give_back("a")

    assert rate.wait_s("a") == 0


def test_addresses_are_forgotten_when_there_are_too_many() -> None:
    rate = RateLimiter(1, 0.1, Clock())

    for number in range(MAX_ADDRESSES + 10):
        rate.spend(str(number))

    assert len(rate._left) == MAX_ADDRESSES
    assert rate.wait_s("0") == 0
    assert rate.wait_s(str(MAX_ADDRESSES + 9)) > 0
