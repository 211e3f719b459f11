"""The brokers' clock, as the answers to writes show it."""

from __future__ import annotations

from types import SimpleNamespace

from marq.kafka.broker_clock import BrokerClock


def test_the_time_is_unknown_until_a_write_and_then_passes_as_here() -> None:
    now_s = 100.0
    clock = BrokerClock(lambda: now_s)
    assert clock.now_ms() is None

    clock.note(SimpleNamespace(timestamp=5_000_000, timestamp_type=1))
    assert clock.now_ms() == 5_000_000
    now_s = 101.5
    assert clock.now_ms() == 5_001_500
    clock.note(SimpleNamespace(timestamp=4_000_000, timestamp_type=1))
    assert clock.now_ms() == 4_000_000


def test_a_slow_answer_does_not_set_the_clock_back() -> None:
    now_s = 100.0
    clock = BrokerClock(lambda: now_s)
    clock.note(SimpleNamespace(timestamp=5_000_000, timestamp_type=1))

    now_s = 115.0
    clock.note(SimpleNamespace(timestamp=5_001_000, timestamp_type=1))

    assert clock.now_ms() == 5_015_000


def test_a_topic_with_the_times_of_its_senders_tells_nothing() -> None:
    clock = BrokerClock()
    clock.note(SimpleNamespace(timestamp=5_000_000, timestamp_type=0))

    assert clock.now_ms() is None
