"""Virtual time: what happens when, and in which order."""

from __future__ import annotations

import asyncio

from marq.testing.clock import VirtualClock


def test_what_is_due_happens_in_its_order_and_what_comes_last_after_the_rest_of_its_moment() -> None:
    clock, happened = VirtualClock(), []
    began_ms = clock.now_ms
    clock.after(2, lambda: happened.append("end of a wait"), last=True)
    clock.after(2, lambda: happened.append("second"))
    clock.after(1, lambda: happened.append("first"))
    cancelled = clock.after(1, lambda: happened.append("cancelled"))
    cancelled.cancel()

    while (next_ms := clock.next_ms) is not None:
        clock.move(next_ms)
        happened.append(clock.now_ms - began_ms)

    assert happened == ["first", 1_000, "second", 2_000, "end of a wait", 2_000]


def test_time_has_whole_milliseconds_and_never_ends_a_sleep_early() -> None:
    clock = VirtualClock()
    began_ms = clock.now_ms

    timers = [clock.after(seconds, lambda: None) for seconds in (1 / 3, 0.1, 20, 0.0004, 0)]

    assert [timer.when_ms - began_ms for timer in timers] == [334, 100, 20_000, 1, 0]


def test_a_lease_is_over_for_its_holder_in_the_millisecond_in_which_it_is_over_for_the_tracker() -> None:
    for lease_ms in (100, 1_000, 30_000, 3_600_000):
        clock = VirtualClock()
        for _ in range(200):
            taken_s, due_ms = clock.now_s(), clock.now_ms + lease_ms

            clock.move(due_ms)

            assert clock.now_s() >= taken_s + lease_ms / 1000
            clock.move(clock.now_ms + 7)


async def test_a_sleep_ends_when_its_time_has_come_and_a_cancelled_one_leaves_nothing() -> None:
    clock = VirtualClock()
    sleeping = asyncio.create_task(clock.sleep(5))
    cancelled = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)

    assert clock.next_ms == clock.now_ms + 5_000
    clock.move(clock.now_ms + 5_000)

    await asyncio.wait_for(sleeping, 60)
    assert clock.next_ms is None


def test_time_wakes_no_sleeper_of_a_closed_event_loop() -> None:
    clock, loop = VirtualClock(), asyncio.new_event_loop()
    # Not asyncio.run, which would end the task.
    sleeping = loop.create_task(clock.sleep(1))
    # Otherwise asyncio logs during a later test that a pending task was destroyed.
    sleeping._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    assert clock.next_ms is None
    clock.move(clock.now_ms + 1_000)

    assert not sleeping.done()
    sleeping.get_coro().close()
