"""Priorities: which of several queues is next."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from math import inf

import pytest

from marq.consumer.priorities import FACTOR, MAX_HELD_BACK_S, Priorities
from marq.consumer.turns import Turns
from marq.settings.limits import Limits
from marq.settings.queue import QueueSettings


class Group:
    """Queues of one consumer, by name; each message is a source ``name`` and an offset."""

    def __init__(self, **priorities: int) -> None:
        self.turns = {name: Turns[str](QueueSettings(priority=priority)) for name, priority in priorities.items()}
        for name, turns in self.turns.items():
            turns.line(name, 0.0)
        self.sent = Counter[str]()
        self.priorities = Priorities[str]()
        self.priorities.serve(self.turns, priorities)

    def send(self, name: str, count: int) -> None:
        first = self.sent[name]
        self.sent[name] += count
        self.turns[name].lines[name].add(range(first, first + count), [None] * count)

    def take(self, now_s: float = 0.0, *, wanted: float = inf) -> str:
        """Return the names of the queues that got turns, in order."""
        self.priorities.wanted = wanted
        return "".join(name for name, _ in self.priorities.take(now_s))

    def end(self, name: str, count: int = 1) -> None:
        lines = self.turns[name].lines[name]
        lines.remove(sorted(lines.begun)[:count])


def test_a_queue_gets_ten_times_as_many_turns_as_one_of_the_next_lower_priority() -> None:
    group = Group(a=9, b=5, c=1)
    for name in "abc":
        group.send(name, 2_000)

    order = "".join(group.take(wanted=1) for _ in range(1_110))

    assert FACTOR == 10
    assert order.startswith("a")
    counts = Counter(order)
    assert counts["a"] == pytest.approx(1_000, abs=2)
    assert counts["b"] == pytest.approx(100, abs=2)
    assert counts["c"] == pytest.approx(10, abs=2)


def test_queues_of_the_same_priority_get_as_many_turns() -> None:
    group = Group(a=5, b=5)
    group.send("a", 50)
    group.send("b", 50)

    assert "".join(group.take(wanted=1) for _ in range(10)) == "ab" * 5
    assert Counter(group.take(wanted=20)) == {"a": 10, "b": 10}


def test_a_message_of_a_higher_priority_is_next_however_long_lower_ones_have_waited() -> None:
    group = Group(a=2, b=1)
    group.send("b", 1_000)
    assert group.take(wanted=500) == "b" * 500

    group.send("a", 3)

    assert group.take(wanted=4) == "aaab"


def test_a_queue_without_messages_saves_up_no_turns() -> None:
    group = Group(a=2, b=1)
    group.send("a", 1_000)
    assert group.take(wanted=500) == "a" * 500

    group.send("b", 100)

    taken = group.take(wanted=110)
    assert taken.count("b") == pytest.approx(10, abs=1)
    assert max(len(list(run)) for name, run in groupby(taken) if name == "b") == 1


def test_a_queue_whose_handlers_are_busy_holds_back_lower_ones_that_have_their_own() -> None:
    group = Group(a=2, b=1)
    group.send("a", 1_000)
    group.send("b", 1_000)
    group.turns["a"].wanted = group.turns["b"].wanted = 2
    order = group.take(0.5)

    for _ in range(100):
        group.end("a")
        if group.turns["b"].running:
            group.end("b")
        order += group.take(0.5)

    assert order.count("b") == pytest.approx(10, abs=1)


def test_a_queue_that_was_held_back_for_a_second_has_the_next_turn() -> None:
    group = Group(a=2, b=1)
    group.send("a", 10)
    group.send("b", 10)
    group.turns["a"].wanted = 1
    assert group.take(5.0) == "ab"
    # The handler of `a` hangs.
    assert group.take(5.0) == ""

    assert group.priorities.next_s == 5.0 + MAX_HELD_BACK_S
    assert group.take(group.priorities.next_s - 0.001) == ""
    assert group.take(group.priorities.next_s) == "b"
    assert group.priorities.next_s == 5.0 + 2 * MAX_HELD_BACK_S


def test_nothing_is_due_when_nothing_is_held_back() -> None:
    group = Group(a=2, b=1)
    group.send("a", 1)
    group.send("b", 1)

    assert group.take() == "ab"
    assert group.priorities.next_s == inf


@pytest.mark.parametrize("reason", ["limit", "breaker", "paused"])
def test_a_queue_that_may_not_begin_messages_holds_back_no_other(reason: str) -> None:
    group = Group(a=2, b=1)
    if reason == "limit":
        group.turns["a"].apply(QueueSettings(priority=2, limits=Limits(1)), 1.0)
    group.send("a", 10)
    group.send("b", 3)
    group.turns["a"].admitted = 1 if reason == "breaker" else inf

    group.turns["a"].paused = reason == "paused"

    taken = group.take()

    assert taken == ("bbb" if reason == "paused" else "abbb")


def test_changed_priorities_apply_to_the_next_turn() -> None:
    group = Group(a=2, b=1)
    group.send("a", 100)
    group.send("b", 100)
    assert group.take(wanted=9) == "abaaaaaaa"

    group.priorities.serve(group.turns, {"a": 1, "b": 2})

    assert group.take(wanted=10).count("b") == 9


def test_what_handlers_share_is_given_out_once() -> None:
    group = Group(a=2, b=1)
    group.send("a", 10)
    group.send("b", 10)

    assert len(group.take(wanted=3)) == 3
    group.priorities.wanted = 0
    assert group.priorities.take(0.0) == []


def test_urgent_messages_are_next_although_lower_queues_get_their_turns_each_second() -> None:
    group = Group(a=9, b=5, c=1)
    group.send("b", 10_000)
    group.send("c", 10_000)
    order = ""

    for second in range(600):
        group.send("a", 1)
        order += group.take(second, wanted=3)

    # At most the last one waits, for the turn that is due to a lower queue.
    assert order.count("a") >= 599
    assert "c" in order


def test_a_queue_that_is_promoted_owes_nothing() -> None:
    group = Group(a=3, b=2, c=1)
    for name in "abc":
        group.send(name, 10_000)
    for _ in range(500):
        group.take(wanted=1)

    group.priorities.serve(group.turns, {"a": 1, "b": 2, "c": 3})

    assert "".join(group.take(wanted=1) for _ in range(100)).count("c") > 80
