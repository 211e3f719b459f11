"""Schedules: what their owner writes, so that each time comes once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from marq.core.deliveries.schedule_planner import MAX_MISSED, MAX_RUNS
from marq.core.lease_book import LeaseBook
from marq.core.storage import rows
from marq.core.storage.rows import State
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import Schedule, home_partition
from marq.wire.marker_codec import encode
from marq.wire.markers import Cause, Delay, Fact, Kind
from marq.wire.names import ENVELOPE_ROOM_BYTES, PREVIOUS_HEADER, RUNS_HEADER, is_synthetic, markers_partition
from tests.unit.core.schedule_life import PARTITIONS, Life, at, every, times


def step(name: str) -> Callable[..., Callable[[Life], object]]:
    return lambda *arguments, **options: lambda life: getattr(life, name)(*arguments, **options)


define, until, sleep, work, restart = map(step, ("define", "until", "sleep", "work", "restart"))
cancel, deliver_now = step("cancel"), step("deliver_now")
OLD, NEW = define(value="old"), define(value="new")
CATCHING_UP, DISABLED = define(catch_up=True), define(catch_up=True, enabled=False)
STORIES = {
    "of the times without a worker, the first comes late": ([define(), sleep(at(5) + 7)], times(0, 1), times(6, 1)),
    "with catch_up, each of them comes": (
        [CATCHING_UP, sleep(at(2 * MAX_MISSED + 5) + 7)], times(0, 2 * MAX_MISSED + 6), times(2 * MAX_MISSED + 6, 1),
    ),
    "a new schedule has nothing to catch up with": ([CATCHING_UP], [], times(0, 1)),
    "a definition that comes back goes on": ([OLD, until(at(1)), NEW, OLD, until(at(4))], times(0, 5), times(5, 1)),
    "a disabled schedule stops": ([CATCHING_UP, until(at(0)), DISABLED, until(at(5) + 1)], times(0, 1), []),
    "a disabled schedule starts again": (
        [CATCHING_UP, until(at(0)), DISABLED, until(at(5) + 1), CATCHING_UP, until(at(7))],
        [*times(0, 1), *times(6, 2)], times(8, 1),
    ),
    "a cancelled time is left out": ([define(), cancel(), until(at(2))], times(1, 2), times(3, 1)),
    "a message that is delivered at once was that of its time": (
        [define(), deliver_now(), until(at(2))], times(0, 3), times(3, 1),
    ),
    "a cancelled time stays cancelled after changes": (
        [OLD, cancel(), NEW, OLD, NEW, until(at(2))], times(1, 2), times(3, 1),
    ),
    "a cancelled time that its owner knows stays cancelled": (
        [OLD, cancel(), work(), NEW, OLD, NEW, until(at(2))], times(1, 2), times(3, 1),
    ),
    "a change to more frequent times begins at once": (
        [define(cron="*/3600 * * * *"), until(times(0, 1, 3600)[0] + 1), define(cron="*/60 * * * *")],
        times(0, 1, 3600), [times(0, 1, 3600)[0] + 60],
    ),
    "a time that was delivered early is not repeated after changes": (
        [OLD, deliver_now(), work(), NEW, restart(), OLD, restart(), until(at(2))], times(0, 3), times(3, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "delivered", "waiting"), STORIES.values(), ids=STORIES)
def test_each_time_comes_once(steps: list[Callable[[Life], object]], delivered: list[int], waiting: list[int]) -> None:
    life = Life()
    for do in steps:
        do(life)

    assert (life.delivered, life.waiting) == (delivered, waiting)


def test_one_message_waits_and_each_time_comes_once() -> None:
    life = Life()
    life.define(value="go", headers={"kind": "daily"})

    assert life.waiting == times(0, 1)
    [delay] = [batch for batch in life.log if isinstance(batch, Delay)]
    assert (delay.queue, delay.relative, delay.from_offset) == ("reports", False, 0)
    [payload] = delay.payloads
    assert (payload.key, payload.value, list(payload.headers)) == (b"reports", b"go", [("kind", b"daily")])

    life.until(times(0, 4)[-1])

    assert life.delivered == times(0, 4)
    assert life.waiting == times(4, 1)
    last = [batch for batch in life.log if isinstance(batch, Delay)][-1]
    runs = b",".join(b"%d" % time_s for time_s in reversed(times(0, 4)))
    assert list(last.payloads[0].headers) == [
        ("kind", b"daily"),
        (PREVIOUS_HEADER, b"%d" % at(3)),
        (RUNS_HEADER, runs),
    ]


@pytest.mark.parametrize("catch_up", [False, True])
def test_each_message_names_the_last_runs_of_its_definition(catch_up: bool) -> None:
    life = Life()
    life.define(catch_up=catch_up)
    life.until(at(2))
    life.restart()
    assert life.runs == times(0, 3)[::-1]

    # when one is cancelled
    life.cancel()
    life.until(at(5))
    assert life.runs == [*times(4, 2)[::-1], *times(0, 3)[::-1]]

    # when no worker runs for a while
    life.sleep(at(9) + 7)
    assert life.runs[: 4 if catch_up else 1] == (times(6, 4)[::-1] if catch_up else times(6, 1))

    # when there were more than a message keeps
    life.until(at(40))
    assert life.runs == times(31, MAX_RUNS)[::-1]

    # when its messages become others, with other ids
    life.define(value="new", catch_up=catch_up)
    assert life.runs == []
    life.until(at(42))
    assert life.runs == times(41, 2)[::-1]


def test_a_message_of_a_schedule_is_known_by_its_name_and_time_in_one_partition_for_all_definitions() -> None:
    schedules = [Schedule("s", "reports", f"{minute} * * * *") for minute in range(50)]

    sources = [schedule.source(PARTITIONS) for schedule in schedules]

    assert len(set(sources)) == 50
    assert {markers_partition(*source, PARTITIONS) for source in sources} == {home_partition("s", PARTITIONS)}
    assert all(is_synthetic(source.topic) and source.topic.startswith("~schedule/s/") for source in sources)


def test_nothing_is_planned_before_all_that_was_written_is_known() -> None:
    life = Life()
    life.define()
    life.restart(caught_up=False)

    assert life.planner.plan(life.tracker, life.now_ms, life.payload) == []
    life.work()
    assert life.waiting == times(0, 1)


def test_a_restart_plans_nothing_that_is_planned() -> None:
    life = Life()
    life.define()
    life.until(at(1))
    for _ in range(3):
        before = len(life.log)
        life.restart()
        assert [batch for batch in life.log[before:] if isinstance(batch, Delay | Fact)] == []
    life.until(at(3))

    assert life.delivered == times(0, 4)


def test_repeated_writes_count_once_permanently() -> None:
    life = Life()
    life.define()
    [delay] = [batch for batch in life.log if isinstance(batch, Delay)]
    life.append(delay)
    life.until(at(2))
    life.append(delay)
    life.until(at(4))

    assert life.delivered == times(0, 5)


def test_what_follows_a_message_is_said_together_with_its_delivery() -> None:
    """Else an owner that dies in between leaves it to the next one, which takes the times since then for missed."""
    life = Life()
    life.define()
    life.now_ms = at(0) * 1000
    life.tracker.saw(life.now_ms)
    life.append(life.tracker.tick(life.now_ms))
    fires = life.tracker.due()

    [following] = life.planner.follow(life.tracker, fires, life.now_ms, life.payload)

    assert following.offsets == times(1, 1)
    for batch in [*life.tracker.facts(fires), following]:
        life.append(batch)
    life.sleep(at(5) + 7)
    assert life.delivered == times(1, 1)
    assert life.waiting == times(6, 1)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("catch_up", "late"), [(False, times(0, 1)), (True, times(0, 11))])
def test_times_while_the_queue_is_paused_are_missed_times(catch_up: bool, late: list[int], restarts: bool) -> None:
    life = Life()
    life.define(catch_up=catch_up)
    life.paused = True
    life.until(at(10) + 7)
    assert (life.delivered, life.waiting) == ([], times(0, 1))

    if restarts:
        life.restart()
    life.paused = False
    life.work()

    assert (life.delivered, life.waiting) == (late, times(11, 1))


@pytest.mark.parametrize("limit_bytes", [2_000, 4_000, 16_384, 65_536, 200_000, 262_144, 1_048_588])
def test_missed_messages_never_exceed_what_the_markers_topic_accepts(limit_bytes: int) -> None:
    """A refused write is repeated by each new owner, so nothing in the partition would be redelivered."""
    for size in sorted({min(size, limit_bytes - 1_500) for size in (10, 400, 10_000, 60_000)}):
        life = Life()
        life.limit_bytes = limit_bytes
        life.restart()
        life.define(catch_up=True, value="x" * size, headers={"kind": "daily"})
        life.sleep(at(2 * MAX_MISSED + 5) + 7)

        assert len(life.delivered) == 2 * MAX_MISSED + 6
        assert max(len(encode(batch)) for batch in life.log) <= limit_bytes + ENVELOPE_ROOM_BYTES


def test_a_changed_message_takes_the_place_of_the_one_that_waits() -> None:
    life = Life()
    life.define(value="old")
    life.define(value="new")

    [(source, number, lease)] = life.book.open_leases()
    assert (number, lease.queue) == (at(0), "reports")
    payload = life.book.fresh_payload(lease.queue, source, number)
    assert payload is None or payload.value == b"new"
    withdrawn = [batch for batch in life.log if isinstance(batch, Fact)]
    assert [(fact.kind, fact.offsets, fact.causes) for fact in withdrawn] == [
        (Kind.CANCELLED, times(0, 1), [Cause.WITHDRAWN])
    ]
    assert life.book.counts["reports"].cancelled == 1
    life.until(at(2))
    assert life.delivered == times(0, 3)


def test_a_change_in_the_moment_in_which_a_message_is_due_loses_no_time_and_doubles_none() -> None:
    for late_ms in (-1, 0, 1, 500):
        life = Life()
        life.define(value="old")
        life.now_ms = at(0) * 1000 + late_ms
        life.define(value="new")
        life.until(at(2))

        assert life.delivered == times(0, 3)


def test_a_change_waits_for_the_message_that_is_on_its_way() -> None:
    life = Life()
    life.define(value="old")
    life.now_ms = at(0) * 1000
    life.tracker.saw(life.now_ms)
    life.append(life.tracker.tick(life.now_ms))
    fires = life.tracker.due()
    assert len(fires) == 1

    life.define(value="new")
    assert life.planner.plan(life.tracker, life.now_ms, life.payload) == []
    for fact in life.tracker.facts(fires):
        life.append(fact)
    planned = life.work()

    assert [batch.offsets for batch in planned if isinstance(batch, Delay)] == [times(1, 1)]


def test_what_is_withdrawn_is_not_fired_while_that_is_on_its_way_and_again_if_it_came_to_nothing() -> None:
    life = Life()
    life.define()
    life.layers.fold("schedule", "s", None)
    life.now_ms = at(0) * 1000
    life.tracker.saw(life.now_ms)
    life.append(life.tracker.tick(life.now_ms))
    assert len(life.planner.plan(life.tracker, life.now_ms, life.payload)) == 1
    assert life.tracker.due() == []

    life.tracker.take_over_again()
    life.work()

    assert (life.delivered, life.waiting) == ([], [])


def test_a_schedule_that_is_removed_leaves_nothing() -> None:
    life = Life()
    life.define()
    life.until(at(1))
    life.remove()
    life.until(at(4))

    assert (life.delivered, life.waiting) == (times(0, 2), [])
    assert not life.book.scheduled
    assert [key for key in life.table if key[:1] in (b"m", b"r", b"s")] == []


def test_a_definition_that_is_withdrawn_without_a_message_counts_for_no_queue() -> None:
    """Its name was listed as a queue."""
    [only] = times(0, 1)
    life = Life(lambda schedule, after_s: only if after_s < only else None)
    life.define()
    life.until(only)
    assert (life.delivered, life.waiting) == ([only], [])
    life.remove()

    assert life.book.counts.keys() == {"reports"}


@pytest.mark.parametrize("next_time", [lambda schedule, after_s: None, every(60)])
def test_a_schedule_without_another_time_or_too_large_has_no_message(
    next_time: Callable[[Schedule, int], int | None],
) -> None:
    life = Life(next_time)
    life.limit_bytes = 2_000
    life.restart()
    life.define(value="x" * 1_500)

    assert life.waiting == []


def test_all_is_told_from_the_rows() -> None:
    life = Life()
    life.define()
    life.until(at(1))
    restored = LeaseBook(lambda queue: QueueSettings())
    restored.restore(life.table.items())

    [source] = restored.scheduled
    assert source == life.layers.current["s"].source(PARTITIONS)
    assert restored.last_number(source) == at(2)
    assert [lease.state for lease in restored.open_in("reports", source).values()] == [State.DELAYED]
    assert rows.mark_key("", source) in life.table
