"""Turns: which waiting messages of a queue with limits or fairness may be delivered, and when."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from marq.consumer.turns import BusyKey, Lines, Turns
from marq.settings.limits import Limits, Rate
from marq.settings.queue import ORDERED_BY_KEY, QueueSettings
from marq.wire.errors import ConfigError

A, B = b"a", b"b"


def turns_of(share: float = 1.0, *, fair: bool = False, ordered: bool = False, **limits: Any) -> Turns[str]:
    limited = Limits.read(limits) if limits else None
    settings = QueueSettings(limits=limited, fair=fair, ordering=ORDERED_BY_KEY if ordered else "none")
    return Turns(settings, share)


def line_of(turns: Turns[str], *keys: bytes | None, source: str = "s", first: int = 0) -> Lines[str]:
    lines = turns.lines.get(source) or turns.line(source, 0.0)
    lines.add(range(first, first + len(keys)), keys)
    return lines


def given(turns: Turns[str], now_s: float = 0.0) -> list[int]:
    return [offset for _, offset in turns.take(now_s)]


def test_keys_take_turns_and_a_message_without_a_key_is_a_key_of_its_own() -> None:
    turns = turns_of(concurrency=3)
    lines = line_of(turns, A, A, A, B, None, None)

    assert given(turns) == [0, 3, 4]
    assert given(turns) == []
    lines.remove([4])
    assert given(turns) == [5]
    lines.remove([0, 3])
    assert given(turns) == [1, 2]


def test_keys_that_wait_are_told_with_their_first_message_and_whether_they_are_at_a_limit() -> None:
    turns = turns_of(per_key={"concurrency": 2}, concurrency=3)
    line_of(turns, A, A, A, A, B, B, None)

    assert given(turns) == [0, 4, 6]
    assert sorted(turns.busy_keys(0.0)) == [
        BusyKey("s", A, first=1, waiting=3, running=1, at_limit=False),
        BusyKey("s", B, first=5, waiting=1, running=1, at_limit=False),
    ]
    turns.lines["s"].remove([6])
    assert given(turns) == [1]
    assert min(turns.busy_keys(0.0)) == BusyKey("s", A, first=2, waiting=2, running=2, at_limit=True)


def test_a_key_that_waits_for_its_rate_is_at_its_limit() -> None:
    turns = turns_of(per_key={"rate": "1/s"})
    line_of(turns, A, A)

    assert given(turns, 10.0) == [0]
    assert [key.at_limit for key in turns.busy_keys(10.0)] == [True]
    assert [key.at_limit for key in turns.busy_keys(11.0)] == [False]


def test_a_key_at_its_limit_stops_only_itself() -> None:
    turns = turns_of(per_key={"concurrency": 2})
    lines = line_of(turns, A, A, A, B, B)

    assert sorted(given(turns)) == [0, 1, 3, 4]
    lines.remove([3])
    assert given(turns) == []
    lines.remove([0])
    assert given(turns) == [2]


def test_a_message_that_waits_for_its_delay_leaves_its_turn_to_others_and_comes_back_before_them() -> None:
    turns = turns_of(per_key={"concurrency": 1})
    lines = line_of(turns, A, A, A)

    assert given(turns) == [0]
    lines.park(0)
    assert given(turns) == [1]
    lines.rejoin(0)
    assert given(turns) == []
    lines.remove([1])
    assert given(turns) == [0]
    lines.remove([0])
    assert given(turns) == [2]


def test_a_message_that_fails_again_and_again_takes_every_other_turn_of_its_key() -> None:
    turns = turns_of(per_key={"rate": "1/s"})
    lines = line_of(turns, A, A, A)
    begun = []

    for now_s in range(1, 6):
        begun += given(turns, now_s)
        if begun[-1] == 0:
            lines.park(0)
            lines.rejoin(0)

    assert begun == [0, 0, 1, 0, 2]


def test_with_ordering_a_key_that_waits_for_a_retry_stops_itself_and_no_other_key() -> None:
    turns = turns_of(ordered=True, concurrency=1)
    lines = line_of(turns, A, A, B)

    assert given(turns) == [0]
    lines.park(0)
    assert given(turns) == [2]
    lines.remove([2])
    assert given(turns) == []
    lines.rejoin(0)
    assert given(turns) == [0]
    lines.remove([0])
    assert given(turns) == [1]


def test_with_ordering_a_parked_message_that_ends_lets_its_key_go_on() -> None:
    turns = turns_of(ordered=True, concurrency=1)
    lines = line_of(turns, A, A)
    assert given(turns) == [0]

    lines.park(0)
    lines.remove([0])

    assert given(turns) == [1]


@pytest.mark.parametrize("later", [{}, {"rate": "10/s", "per_key": {"rate": "10/s"}}])
def test_a_lifted_or_raised_rate_applies_at_once(later: dict[str, Any]) -> None:
    turns = turns_of(rate="1/h", per_key={"rate": "1/h"})
    line_of(turns, A, A)
    assert given(turns, 3_600.0) == [0]
    assert given(turns, 3_601.0) == []

    turns.apply(QueueSettings(limits=Limits.read(later)), 1.0)

    assert given(turns, 3_601.2) == [1]


def test_rates_go_on_in_partitions_that_a_receiver_keeps() -> None:
    turns = turns_of(rate="1/h", per_key={"rate": "1/h"})
    turns.line("s", 0.0, "p0").add([0, 1], [A, A])
    assert given(turns, 3_600.0) == [0]

    turns.give_up()
    turns.keep({"p0"})
    turns.line("again", 5_000.0, "p0").add([1, 2], [A, A])
    assert given(turns, 7_199.0) == []
    assert given(turns, 7_200.0) == [1]

    turns.give_up()
    turns.keep(set())
    turns.line("later", 8_000.0, "p0").add([2], [A])
    assert given(turns, 11_599.0) == []
    assert given(turns, 11_600.0) == [2]


def test_messages_of_a_former_assignment_count_until_their_source_is_known_again() -> None:
    turns = turns_of(concurrency=3)
    turns.line("s", 0.0, "p0").add([0, 1], [A, B])
    assert given(turns) == [0, 1]

    turns.give_up()
    turns.keep({"p0", "p1"})
    line_of(turns, A, A, A, source="t", first=100)
    assert given(turns) == [100]
    turns.end_former("p0", [0])
    assert given(turns) == [101]
    turns.keep({"p1"})
    assert given(turns) == [102]


def test_of_messages_that_another_consumer_has_leased_the_first_may_run() -> None:
    turns = turns_of(per_key={"concurrency": 1})
    lines = line_of(turns, A, A, A)

    # The first one waits for its next attempt.
    assert lines.may_run(1)
    lines.occupy(1)
    assert not lines.may_run(2)
    assert given(turns) == []
    lines.remove([1])
    assert given(turns) == [0]


def test_with_ordering_only_the_first_message_of_a_key_may_run() -> None:
    lines = line_of(turns_of(ordered=True, concurrency=5), A, A, B)

    # Even if the first one waits for its next attempt, and the second one is leased.
    assert [lines.may_run(offset) for offset in (0, 1, 2)] == [True, False, True]


def test_with_ordering_no_message_may_run_behind_one_that_waits_for_its_delay() -> None:
    """A later message was delivered first, because it counted as the first of its key."""
    turns = turns_of(ordered=True, concurrency=5)
    lines = line_of(turns, A, A)
    lines.park(0)

    assert not lines.is_early(1)
    assert not lines.may_run(1)
    assert given(turns) == []
    lines.rejoin(0)
    assert given(turns) == [0]


def test_a_burst_is_shared_out_like_the_rate() -> None:
    turns = turns_of(0.1, rate="200/s")
    line_of(turns, *[None] * 100)

    assert len(given(turns, 60.0)) == 2


def test_many_keys_with_rates_cost_little() -> None:
    turns = turns_of(per_key={"rate": "1/h"})
    line_of(turns, *[b"%d" % number for number in range(40_000)])

    assert len(given(turns, 3_600.0)) == 40_000
    assert len(turns.lines["s"].paces_s) == 40_000


def test_with_ordering_a_key_has_one_turn_at_a_time() -> None:
    turns = turns_of(ordered=True, concurrency=10)
    lines = line_of(turns, A, A, B)

    assert given(turns) == [0, 2]
    lines.remove([0])
    assert given(turns) == [1]


def test_messages_that_other_consumers_have_keep_their_turns_and_none_is_given_before_they_are_known() -> None:
    turns = turns_of(per_key={"concurrency": 2})
    lines = turns.line("s", 0.0)
    lines.wait_for([3], until_s=30.0)
    line_of(turns, A, A, A)

    assert given(turns) == []
    assert turns.next_s == 90.0
    lines.add([3], [A])
    lines.occupy(3)
    assert given(turns) == [0]
    lines.remove([3])
    assert given(turns) == [1]


@pytest.mark.parametrize("end", ["read past it", "its lease has ended long ago"])
def test_a_message_whose_record_is_gone_is_not_awaited_forever(end: str) -> None:
    turns = turns_of(per_key={"concurrency": 1})
    lines = turns.line("s", 0.0)
    lines.wait_for([1], until_s=30.0)
    line_of(turns, A)
    assert given(turns, 89.0) == []

    if end == "read past it":
        lines.known_to(2)
    assert given(turns, 89.0 if end == "read past it" else 90.0) == [0]


def test_a_source_that_waits_for_others_does_not_stop_another_source() -> None:
    turns = turns_of(concurrency=2)
    turns.line("s", 0.0).wait_for([9], until_s=30.0)
    line_of(turns, A, source="s")
    line_of(turns, A, A, source="t", first=100)

    # The awaited one counts.
    assert given(turns) == [100]
    turns.lines["s"].known_to(10)
    assert given(turns) == [101]
    turns.lines["t"].remove([100])
    assert given(turns) == [0]


def test_a_receiver_has_the_share_of_a_limit_that_its_partitions_are_of_all() -> None:
    turns = turns_of(0.25, concurrency=10)
    line_of(turns, *[None] * 20)

    assert len(given(turns)) == 2
    turns.apply(QueueSettings(limits=Limits.read({"concurrency": 10})), 1.0)
    assert len(given(turns)) == 8
    turns.apply(QueueSettings(limits=Limits()), 1.0)
    assert len(given(turns)) == 10


def test_a_share_is_at_least_one_message() -> None:
    turns = turns_of(0.1, concurrency=2)
    line_of(turns, A, B)

    assert given(turns) == [0]


def test_messages_begin_evenly_spaced() -> None:
    turns = turns_of(rate="10/s")
    line_of(turns, *[None] * 100)

    begun = [(now_s, len(given(turns, now_s))) for now_s in [tick / 100 for tick in range(201)]]

    assert 19 <= sum(count for _, count in begun) <= 20
    assert max(count for _, count in begun) == 1
    # Not at once: the former reader may have begun one just before.
    assert next(now_s for now_s, count in begun if count) == pytest.approx(0.1, abs=1e-5)
    assert turns.next_s > 2.0


def test_each_key_has_its_own_rate() -> None:
    turns = turns_of(per_key={"rate": "1/s"})
    lines = line_of(turns, A, A, A, B, None)

    # A message without a key has no other ones to wait for.
    assert given(turns, 0.0) == [4]
    assert turns.next_s == pytest.approx(1.0, abs=1e-5)
    assert sorted(given(turns, 1.0)) == [0, 3]
    assert given(turns, 1.5) == []
    assert given(turns, 2.0) == [1]
    lines.remove([2])
    assert given(turns, 9.0) == []


def test_a_retry_counts_for_a_rate() -> None:
    turns = turns_of(per_key={"rate": "1/s"})
    lines = line_of(turns, A, A)
    assert given(turns, 1.0) == [0]

    lines.park(0)
    lines.rejoin(0)

    assert given(turns, 1.5) == []
    assert given(turns, 2.0) == [0]
    assert given(turns, 3.0) == [1]


def test_after_a_pause_a_tenth_of_a_second_may_begin_at_once() -> None:
    turns = turns_of(rate="200/s")
    line_of(turns, *[None] * 100)

    assert len(given(turns, 60.0)) == 20
    assert len(given(turns, 60.005)) == 1


def test_no_more_messages_are_given_than_are_wanted_if_a_later_one_may_come_first() -> None:
    turns = turns_of(fair=True)
    line_of(turns, *[A] * 1_000)
    turns.wanted = 2
    assert given(turns) == [0, 1]

    line_of(turns, B, first=1_000)
    turns.wanted = 4

    # One more of the key whose turn it was already, and then the other key's.
    assert given(turns) == [2, 1_000]
    assert turns.reads_ahead
    assert turns.next_s == inf


def test_every_key_gets_its_turn_beside_a_busy_one() -> None:
    turns = turns_of(fair=True)
    lines = line_of(turns, *[A] * 10_000)
    turns.wanted = 10
    running = given(turns)
    waits = []

    for tenant in range(50):
        lines.add([10_000 + tenant], [b"tenant-%d" % tenant])
        passed = 0
        while 10_000 + tenant not in running:
            lines.remove([running.pop(0)])
            running += given(turns)
            passed += 1
        waits.append(passed)

    assert max(waits) <= 2


def test_sources_that_are_given_up_hold_no_turns() -> None:
    turns = turns_of(concurrency=1)
    line_of(turns, A, B)
    assert given(turns) == [0]

    turns.give_up()
    line_of(turns, A, source="s")

    assert given(turns) == [0]


@pytest.mark.parametrize("text", ["10", "0/s", "10/d", "-1/s", "1.5/s", "ten/s", " 1/s", "10000000/s", 10, None])
def test_a_rate_has_a_number_and_a_unit(text: object) -> None:
    with pytest.raises(ConfigError, match='such as "200/s", "10/min" or "5/h"'):
        Rate.parse(text)
