"""Messages that are made when it is their turn, and the calls that wait for them."""

from __future__ import annotations

import asyncio
from itertools import count, islice

import pytest

from marq.consumer.prefetch import PrefetchBuffer, Ready


class Made:
    """Stands in for messages: numbers, of which is known how many were made."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers = count()

    def some(self, number: int):
        for each in islice(self._numbers, number):
            self.count += 1
            yield each


def test_they_come_in_order_and_are_made_a_few_at_a_time() -> None:
    ready, made = Ready(), Made()
    ready.add(made.some(300), 300)
    ready.add(made.some(2), 2)

    assert (len(ready), made.count) == (302, 0)
    found = []
    while ready.make():
        found.append(ready.made.popleft())
        assert made.count - len(found) < 64
        assert len(ready) == 302 - len(found)

    assert found == list(range(302))
    assert not ready


def test_a_list_is_taken_across_what_was_added_at_different_times() -> None:
    ready, made = Ready(), Made()
    for number in (3, 1, 4):
        ready.add(made.some(number), number)
    ready.make()

    assert ready.take(2) == [0, 1]
    assert ready.take(5) == [2, 3, 4, 5, 6]
    assert len(ready) == 1
    assert ready.take(5) == [7]
    assert ready.take(5) == []


def test_all_can_be_looked_at_and_taken_from_both_ends_and_more_added_after_them() -> None:
    ready, made = Ready(), Made()
    ready.add(made.some(100), 100)
    ready.take(1)

    everything = ready.all()
    assert (everything[0], everything[-1], len(ready)) == (1, 99, 99)
    everything.pop()
    ready.add(iter([1_000]), 1)

    assert len(ready) == 99
    assert ready.take(200) == [*range(1, 99), 1_000]


async def test_waits_that_time_out_leave_nothing_behind() -> None:
    """An endpoint that polls an empty queue waits thousands of times a minute."""
    buffer = PrefetchBuffer("emails")

    for _ in range(100):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await buffer.wait()

    assert len(buffer._takers) == 0


async def test_a_message_wakes_the_call_that_waits_behind_one_that_timed_out() -> None:
    buffer = PrefetchBuffer("emails")
    first, second, third = [asyncio.create_task(buffer.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)

    buffer.wake(1)
    await second

    assert (first.cancelled(), third.done()) == (True, False)
    buffer.close()
    await third
