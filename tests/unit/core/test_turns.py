"""Turns: which waiting messages of a queue with limits or fairness may be delivered, and when."""

from __future__ import annotations

from collections.abc import Callable
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
    """Return messages that all wait for :meth:`Turns.take`."""
    lines = turns.lines.get(source) or turns.line(source, 0.0)
    lines.add(range(first, first + len(keys)), keys, known=True)
    return lines


def given(turns: Turns[str], now_s: float = 0.0) -> list[int]:
    return [offset for _, offset in turns.take(now_s)]


def with_begun(turns: Turns[str], lines: Lines[str]) -> None:
    """Let each take also return the messages that had their turns at once since the one before it."""
    begun, add, remove, take = list[int](), lines.add, lines.remove, turns.take

    def note(offsets: list[int]) -> list[int]:
        begun.extend(offsets)
        return offsets

    def take_with_begun(now_s: float) -> list[tuple[str, int]]:
        taken = [(lines.source, offset) for offset in begun]
        begun.clear()
        return taken + take(now_s)

    lines.add = lambda *messages, **known: note(add(*messages, **known))  # type: ignore[method-assign]
    lines.remove = lambda offsets: note(remove(offsets))  # type: ignore[method-assign]
    turns.take = take_with_begun  # type: ignore[method-assign]


# --- stories of one source --------------------------------------------------------------------------------------------

Step = Callable[[Turns[str], Lines[str]], object]


def gives(*offsets: int, at: float = 0.0) -> Step:
    """Check which messages get turns now."""

    def check(turns: Turns[str], lines: Lines[str]) -> None:
        assert sorted(given(turns, at)) == list(offsets)

    return check


def waits_until(next_s: float) -> Step:
    def check(turns: Turns[str], lines: Lines[str]) -> None:
        assert turns.next_s == pytest.approx(next_s, abs=1e-5)

    return check


def ends(*offsets: int) -> Step:
    return lambda turns, lines: lines.remove(offsets)


def fails(offset: int) -> Step:
    return lambda turns, lines: (lines.park(offset), lines.rejoin(offset))


def parks(offset: int) -> Step:
    return lambda turns, lines: lines.park(offset)


def rejoins(offset: int) -> Step:
    return lambda turns, lines: lines.rejoin(offset)


ONE_AT_A_TIME, ONE_A_SECOND = {"per_key": {"concurrency": 1}}, {"per_key": {"rate": "1/s"}}
#: The limits, the key of each message ("-" for none), and what happens.
STORIES: dict[str, tuple[dict[str, Any], str, list[Step]]] = {
    "keys take turns, and a message without a key is a key of its own": (
        {"concurrency": 3}, "aaab--",
        [gives(0, 3, 4), gives(), ends(4), gives(5), ends(0, 3), gives(1, 2)],
    ),
    "a key at its limit stops only itself": (
        {"per_key": {"concurrency": 2}}, "aaabb", [gives(0, 1, 3, 4), ends(3), gives(), ends(0), gives(2)],
    ),
    "a message that waits for its delay leaves its turn to others and comes back before them": (
        ONE_AT_A_TIME, "aaa",
        [gives(0), parks(0), gives(1), rejoins(0), gives(), ends(1), gives(0), ends(0), gives(2)],
    ),
    "with ordering, a key that waits for a retry stops itself and no other key": (
        {"ordered": True, "concurrency": 1}, "aab",
        [gives(0), parks(0), gives(2), ends(2), gives(), rejoins(0), gives(0), ends(0), gives(1)],
    ),
    "with ordering, a parked message that ends lets its key go on": (
        {"ordered": True, "concurrency": 1}, "aa", [gives(0), parks(0), ends(0), gives(1)],
    ),
    "with ordering, a key has one turn at a time": (
        {"ordered": True, "concurrency": 10}, "aab", [gives(0, 2), ends(0), gives(1)],
    ),
    "a share is at least one message": ({"share": 0.1, "concurrency": 2}, "ab", [gives(0)]),
    "each key has its own rate, and a message without a key has no other ones to wait for": (
        ONE_A_SECOND, "aaab-",
        [gives(4), waits_until(1), gives(0, 3, at=1), gives(at=1.5), gives(1, at=2), ends(2), gives(at=9)],
    ),
    "a retry counts for a rate": (
        ONE_A_SECOND, "aa", [gives(0, at=1), fails(0), gives(at=1.5), gives(0, at=2), gives(1, at=3)],
    ),
    "a message that fails again and again does not hold up its key": (
        ONE_AT_A_TIME, "aa", [gives(0), fails(0), gives(0), fails(0), gives(1)],
    ),
    "a message that fails again and again takes every other turn of its key": (
        ONE_A_SECOND, "aaa",
        [gives(0, at=1), fails(0), gives(0, at=2), fails(0), gives(1, at=3), gives(0, at=4), fails(0), gives(2, at=5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("at_once", [False, True], ids=["with the next take", "at once where possible"])
@pytest.mark.parametrize(("limits", "keys", "steps"), STORIES.values(), ids=STORIES)
def test_which_messages_get_turns(limits: dict[str, Any], keys: str, steps: list[Step], at_once: bool) -> None:
    turns = turns_of(**limits)
    lines = turns.line("s", 0.0)
    named = [None if key == "-" else key.encode() for key in keys]
    with_begun(turns, lines)
    lines.add(range(len(keys)), named, known=not at_once)
    for step in steps:
        step(turns, lines)


@pytest.mark.parametrize("limits", [{"per_key": {"concurrency": 3}}, {}], ids=["higher", "no limit"])
def test_a_lower_limit_applies_as_messages_end(limits: dict[str, Any]) -> None:
    turns = Turns[str](QueueSettings(limits=Limits.read(limits)))
    lines = turns.line("s", 0.0)
    assert lines.add(range(3), [b"a"] * 3) == [0, 1, 2]
    lines.add([3, 4], [b"a"] * 2, known=True)

    turns.apply(QueueSettings(limits=Limits.read(ONE_AT_A_TIME)), 1.0)
    following = [lines.remove([offset]) or given(turns) for offset in range(4)]

    assert following == [[], [], [3], [4]]


def paused(turns: Turns[str], lines: Lines[str]) -> None:
    turns.paused = True


def admits_one(turns: Turns[str], lines: Lines[str]) -> None:
    turns.admitted = 1


def awaits(offset: int) -> Step:
    return lambda turns, lines: lines.wait_for([offset], 9.0)


TWO_OF_A_KEY = {"per_key": {"concurrency": 2}}
AT_ONCE: dict[str, tuple[dict[str, Any], list[Step], list[int]]] = {
    "up to the limit of each key": (TWO_OF_A_KEY, [], [10, 11, 13]),
    "no more than may run with those that have their turns": (
        TWO_OF_A_KEY, [lambda turns, lines: lines.add([0], [A])], [10, 13],
    ),
    "none of a key with messages that wait": (
        TWO_OF_A_KEY, [lambda turns, lines: lines.add([0], [A], known=True)], [13],
    ),
    "none while messages of other consumers are awaited": (TWO_OF_A_KEY, [awaits(5)], []),
    "none of a key with a message that waits for its next turn": (
        TWO_OF_A_KEY,
        [lambda turns, lines: lines.add([0, 1], [B, B]), parks(0), lambda turns, lines: lines.add([2], [B]), rejoins(0),
         ends(2)],
        [10, 11],
    ),
    "a message that need not wait for its next turn is no obstacle": (
        TWO_OF_A_KEY, [lambda turns, lines: lines.add([0], [B]), fails(0)], [10, 11, 13],
    ),
    "none behind one that waits for its delay, with ordering": (
        {"ordered": True}, [lambda turns, lines: lines.add([0], [A]), parks(0)], [13],
    ),
    "none in a paused queue": (TWO_OF_A_KEY, [paused], []),
    "none while a circuit breaker counts": (TWO_OF_A_KEY, [admits_one], []),
    "none in a queue with a limit of its own": ({**TWO_OF_A_KEY, "concurrency": 9}, [], []),
    "none in a queue with a rate": ({**TWO_OF_A_KEY, "rate": "9/s"}, [], []),
    "none in a fair queue": ({**TWO_OF_A_KEY, "fair": True}, [], []),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "before", "begun"), AT_ONCE.values(), ids=AT_ONCE)
def test_which_messages_have_their_turns_as_soon_as_they_are_read(
    limits: dict[str, Any], before: list[Step], begun: list[int]
) -> None:
    turns = turns_of(**limits)
    lines = turns.line("s", 0.0)
    for step in before:
        step(turns, lines)

    assert lines.add([10, 11, 12, 13], [A, A, A, B]) == begun
    assert all(map(lines.is_first, begun))


# --- single rules -----------------------------------------------------------------------------------------------------


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
    # While another receiver has the partition, it counts them.
    turns.keep({"p1"})
    assert given(turns) == [102]
    turns.keep({"p0", "p1"})
    turns.lines["t"].remove([100])
    turns.lines["t"].add([103], [A])
    assert given(turns) == []
    turns.end_former("p0", [1])
    assert given(turns) == [103]


def test_of_messages_that_another_consumer_has_leased_the_first_may_run() -> None:
    turns = turns_of(per_key={"concurrency": 1})
    lines = line_of(turns, A, A, A)

    # The first one waits for its next attempt.
    assert lines.may_run(1)
    lines.occupy(1)
    assert not lines.may_run(2)
    assert given(turns) == []
    assert lines.remove([1]) == [0]
    assert given(turns) == []


def test_with_ordering_only_the_first_message_of_a_key_may_run() -> None:
    lines = line_of(turns_of(ordered=True, concurrency=5), A, A, B)

    # Even if the first one waits for its next attempt, and the second one is leased.
    assert [lines.may_run(offset) for offset in (0, 1, 2)] == [True, False, True]


@pytest.mark.parametrize("reported", [False, True])
def test_with_ordering_no_message_may_run_behind_one_that_runs_elsewhere(reported: bool) -> None:
    """A later one counted as the first of its key, too, if a report about keys had looked at the line meanwhile."""
    turns = turns_of(ordered=True, concurrency=5)
    lines = turns.line("s", 0.0)
    lines.wait_for([0, 1], until_s=30.0)
    lines.add([0], [A], known=True)
    lines.occupy(0)
    if reported:
        assert turns.busy_keys(0.0) == []

    lines.add([1], [A], known=True)

    assert (lines.is_early(0), lines.is_early(1), lines.may_run(1)) == (True, False, False)


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


def test_with_ordering_no_message_may_run_behind_one_that_waits_for_its_next_turn() -> None:
    """A later message that a former consumer had leased counted as the first of its key, and had the turn instead."""
    turns = turns_of(ordered=True, concurrency=1)
    lines = line_of(turns, A, A, B)
    assert given(turns) == [0]
    lines.park(0)
    assert given(turns) == [2]
    lines.rejoin(0)

    assert not lines.is_early(1)
    lines.occupy(1)
    lines.remove([2])
    assert given(turns) == [0]


def test_with_ordering_a_delayed_message_keeps_its_place_behind_earlier_ones() -> None:
    """It was delivered first when its delay was over (simulated seed 20063: a clock that was set back made it wait)."""
    turns = turns_of(ordered=True)
    lines = line_of(turns, A, A)
    lines.park(1)
    lines.occupy(0)

    assert (lines.is_parked(1), lines.is_first(0)) == (False, True)
    assert lines.remove([0]) == [1]


def test_a_burst_is_shared_out_like_the_rate() -> None:
    turns = turns_of(0.1, rate="200/s")
    line_of(turns, *[None] * 100)

    assert len(given(turns, 60.0)) == 2


def test_many_keys_with_rates_cost_little() -> None:
    turns = turns_of(per_key={"rate": "1/h"})
    line_of(turns, *[b"%d" % number for number in range(40_000)])

    assert len(given(turns, 3_600.0)) == 40_000
    assert len(turns.lines["s"].paces_s) == 40_000


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
    assert lines.remove([3]) == [1]
    assert given(turns) == []


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


def test_messages_begin_evenly_spaced() -> None:
    turns = turns_of(rate="10/s")
    line_of(turns, *[None] * 100)

    begun = [(now_s, len(given(turns, now_s))) for now_s in [tick / 100 for tick in range(201)]]

    assert 19 <= sum(count for _, count in begun) <= 20
    assert max(count for _, count in begun) == 1
    # Not at once: the former reader may have begun one just before.
    assert next(now_s for now_s, count in begun if count) == pytest.approx(0.1, abs=1e-5)
    assert turns.next_s > 2.0


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
