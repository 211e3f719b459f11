"""Queues over a log in a list, whose faults and other writers the test decides."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

import marq.queues.following
from marq.kafka.records import Row
from marq.queues.queues import MAX_TRIES, Queues
from marq.queues.schedules import Schedules
from marq.queues.subscription_start import start_document
from marq.settings.definitions import Definitions
from marq.settings.queue_options import QueueOptions
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError
from marq.wire.markers import Source
from tests.effective import effective
from tests.unit.client.list_log import ListLog


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ListLog:
    made = ListLog()
    monkeypatch.setattr(marq.queues.following, "definition_log", lambda _: made)
    monkeypatch.setattr(marq.queues.following, "RETRY_S", 0)
    return made


@pytest.fixture
async def queues(log: ListLog) -> AsyncIterator[Queues]:
    async with Queues("none:1") as started:
        yield started


async def test_a_change_that_changes_nothing_writes_nothing(queues: Queues, log: ListLog) -> None:
    await queues.change("emails", lease=5)

    await queues.change("emails", lease=5)
    await queues.change("emails")
    await queues.change("other", lease=None)
    await queues.reset("other")

    assert log.writes == 1


async def test_a_change_that_another_client_has_undone_meanwhile_is_made_again(queues: Queues, log: ListLog) -> None:
    await queues.pause("emails")
    # This client has not read it yet.
    log.append(b"change:emails", None)

    settings = await queues.pause("emails")

    assert settings.paused
    assert log.writes == 2


async def test_a_change_that_is_made_already_needs_the_broker_too(
    queues: Queues, log: ListLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queues.pause("emails")

    async def end() -> int:
        raise BrokerUnavailable("no broker")

    monkeypatch.setattr(log, "end", end)

    with pytest.raises(BrokerUnavailable, match="no broker"):
        await queues.pause("emails")
    with pytest.raises(BrokerUnavailable, match="no broker"):
        await queues.resume("reports")


async def test_a_reset_tells_of_a_schedule_that_it_had_not_read_yet(log: ListLog) -> None:
    async with Schedules("none:1") as schedules:
        log.append(b"schedule:nightly", {"queue": "reports", "cron": "0 1 * * *"})

        assert await schedules.reset("nightly")
        assert not await schedules.reset("nightly")

    assert log.keys() == [b"schedule:nightly"] * 2


async def test_settings_that_are_taken_back_leave_no_definition(queues: Queues, log: ListLog) -> None:
    await queues.change("emails", lease=5, max_attempts=2, dead_letter=False)

    assert await queues.change("emails", lease=None) == effective(max_attempts=2, dead_letter=False)
    assert await queues.reset("emails") == effective()
    assert queues.definitions.names() == []


async def test_durations_are_written_in_seconds(queues: Queues, log: ListLog) -> None:
    settings = await queues.change("emails", lease=timedelta(minutes=1), backoff={"max": timedelta(hours=1)})

    assert (settings.lease, settings.backoff["max"]) == (60, 3_600)
    assert json.loads(log.entries[-1].value or b"") == {"lease": 60.0, "backoff": {"max": 3600.0}}


async def test_a_listener_is_called_after_each_change_until_it_ends(queues: Queues) -> None:
    calls: list[int] = []

    def broken() -> None:
        raise ZeroDivisionError

    queues.listen(broken)
    end = queues.listen(lambda: calls.append(queues["emails"].max_attempts))
    for attempts in (2, 3):
        await queues.change("emails", max_attempts=attempts)
    end()
    end()
    await queues.change("emails", max_attempts=4)

    assert calls == [2, 3]


async def test_callers_of_one_client_take_turns(queues: Queues) -> None:
    await asyncio.gather(*[queues.change(f"queue-{number % 3}", max_attempts=number + 1) for number in range(12)])

    assert [queues[f"queue-{number}"].max_attempts for number in range(3)] == [10, 11, 12]


async def test_queues_of_different_groups_may_name_one_topic(queues: Queues) -> None:
    await queues.change("orders", topic="shop-orders", group="shop")
    said = "queue 'emails': topic 'shop-orders' is also that of queue 'orders' in the same group 'shop'"
    with pytest.raises(ConfigError, match=said):
        await queues.change("emails", topic="shop-orders", group="shop")

    assert (await queues.change("emails", topic="shop-orders")).topic == "shop-orders"
    with pytest.raises(ConfigError, match=said):
        await queues.change("emails", group="shop")
    # Other settings may change even if two writers left such a combination.
    await queues.publish({b"file:emails": {"group": "other"}, b"change:emails": {"topic": "shop-orders"}})
    assert (await queues.change("emails", lease=3)).lease == 3


def begin_of_audit(queues: Queues) -> SkippedRecords:
    begin = queues.definitions.begin("audit")
    assert begin is not None
    return begin


async def test_a_queue_that_starts_at_the_latest_record_skips_the_earlier_ones(queues: Queues, log: ListLog) -> None:
    log.ends = {Source("shop-orders", 0): 7, Source("shop-orders", 1): 0}
    await queues.change("audit", topic="shop-orders", start="latest")
    await queues.change("orders", topic="shop-orders")

    begin = queues.definitions.skipped("audit")
    assert begin is not None
    assert begin.ends == log.ends
    assert queues.definitions.skipped("orders") is None
    # The start comes first: no consumer may know the definition without it.
    assert log.keys()[:2] == [b"start:audit", b"change:audit"]


async def test_a_start_is_decided_once_for_a_topic(queues: Queues, log: ListLog) -> None:
    log.ends = {Source("shop-orders", 0): 7}
    await queues.change("audit", topic="shop-orders", start="latest")
    log.ends = {Source("shop-orders", 0): 9}
    await queues.change("audit", topic=None)
    await queues.change("audit", topic="shop-orders")
    await queues.change("audit", lease=3)
    # Another writer that did not know of it.
    await queues.publish({b"start:audit": start_document("shop-orders", log.ends, 0)})

    assert begin_of_audit(queues).ends == {Source("shop-orders", 0): 7}

    starts = {Source("shop-orders", 0): 7, Source("other", 0): 3}
    log.ends = {Source("other", 0): 3}
    await queues.change("audit", topic="other")
    assert begin_of_audit(queues).ends == starts

    # Back in its former topic, it continues where it was. Compaction leaves only the last record.
    log.ends = {Source("shop-orders", 0): 11}
    await queues.change("audit", topic="shop-orders")
    assert begin_of_audit(queues).ends == starts
    [*_, last] = [entry for entry in log.entries if entry.key == b"start:audit"]
    compacted = Definitions()
    compacted.fold(last.key, json.loads(last.value or b""))
    assert compacted.begin("audit") == begin_of_audit(queues)


async def test_a_start_needs_a_topic(queues: Queues) -> None:
    said = "queue 'audit': start = \"latest\" .changed at run time. has no effect without topic: set both or neither"
    with pytest.raises(ConfigError, match=said):
        await queues.change("audit", start="latest")
    await queues.change("audit", start="latest", topic="shop-orders")
    # Not in the way of a queue that leaves its topic.
    assert (await queues.change("audit", topic=None)).start == "latest"


async def test_in_a_topic_that_does_not_exist_yet_a_queue_starts_at_the_first_record(
    queues: Queues, log: ListLog
) -> None:
    log.ends = {}
    await queues.change("audit", topic="new", start="latest")
    begin = begin_of_audit(queues)
    assert begin.left(Source("new", 0), 0, 0)

    # Also if it leaves the topic and returns.
    log.ends = {Source("new", 0): 5}
    await queues.change("audit", topic=None)
    await queues.change("audit", topic="new")
    assert begin_of_audit(queues) == begin


async def test_wrong_names_of_settings_and_queues_are_refused(queues: Queues, log: ListLog) -> None:
    with pytest.raises(TypeError, match="'lese'"):
        await queues.change("emails", lese=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="must not be empty"):
        await queues.change("", lease=3)
    with pytest.raises(ConfigError, match="not int"):
        queues[3]  # type: ignore[index]
    assert log.writes == 0


async def test_what_another_said_in_between_is_taken_up(queues: Queues, log: ListLog) -> None:
    await queues.change("emails", lease=5)
    log.before_next_write((b"change:emails", {"lease": 5, "concurrency": 9}), (b"change:other", {"lease": 7}))
    found = await queues.change("emails", max_attempts=2)

    assert found == effective(lease=5, max_attempts=2, concurrency=9)
    assert json.loads(log.entries[-1].value or b"") == {"lease": 5, "concurrency": 9, "max_attempts": 2}
    assert log.writes == 3


class SharedLog(ListLog):
    """The log of several clients, each of which writes and reads at random moments."""

    def __init__(self, entries: list[Row], rng: random.Random) -> None:
        super().__init__()
        self.entries, self._rng = entries, rng

    async def read(self) -> tuple[list[Row], int]:
        await self._pass()
        start, self._read = self._read, min(self._read + self._rng.choice([1, 1, 2, 99]), len(self.entries))
        return self.entries[start : self._read], self._read

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        await self._pass()
        offsets = await super().write(records)
        await self._pass()
        return offsets

    async def ends_of(self, topic: str) -> dict[Source, int]:
        await self._pass()
        return {Source(topic, 0): self._rng.randrange(1_000_000)}

    async def _pass(self) -> None:
        for _ in range(self._rng.randrange(1, 12)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(60))
async def test_changes_of_three_clients_at_the_same_time_are_all_made(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    entries = [Row(0, 0, b"change:emails", b'{"max_attempts": 3}', ())]
    monkeypatch.setattr(marq.queues.following, "definition_log", lambda _: SharedLog(entries, rng))
    changes: list[QueueOptions] = [{"lease": 60}, {"concurrency": 7}, {"paused": True}]
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(Queues("none:1")) for _ in changes]
        await asyncio.gather(
            *[client.change("emails", **options) for client, options in zip(clients, changes, strict=True)]
        )

    assert json.loads(entries[-1].value or b"") == {"max_attempts": 3, "lease": 60, "concurrency": 7, "paused": True}


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("seed", range(40))
async def test_of_several_concurrent_starts_of_a_queue_compaction_keeps_the_first_one(
    seed: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    entries = [Row(0, 0, b"change:emails", b"{}", ())]
    monkeypatch.setattr(marq.queues.following, "definition_log", lambda _: SharedLog(entries, rng))
    async with AsyncExitStack() as opened:
        started = [await opened.enter_async_context(Queues("none:1")) for _ in range(clients)]
        await asyncio.gather(*[client.change("audit", topic="shop-orders", start="latest") for client in started])

    starts = [json.loads(entry.value or b"") for entry in entries if entry.key == b"start:audit"]
    assert starts[-1] == starts[0]


async def test_a_group_that_has_no_room_for_one_queue_more_is_left_as_it_is(
    queues: Queues, log: ListLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marq.kafka.queue_positions.MAX_SNAPSHOT_BYTES", 4_400)
    for number in range(35):
        log.append(b"file:%d-%s" % (number, b"x" * 97), {"group": "g"})
    await queues.change("last", lease=5)

    with pytest.raises(ConfigError, match="group 'g' would have 36 queues"):
        await queues.change("y" * 97, group="g")

    assert log.writes == 1
    await queues.change("0-" + "x" * 97, lease=7)


async def test_what_another_took_back_in_between_is_not_brought_back(queues: Queues, log: ListLog) -> None:
    await queues.change("emails", lease=5)
    log.before_next_write((b"change:emails", None))

    assert await queues.change("emails", max_attempts=2) == effective(max_attempts=2)


async def test_garbage_in_between_is_no_reason_to_write_again(queues: Queues, log: ListLog) -> None:
    log.before_write = lambda: log.append(b"change:emails", b"garbage") and None

    assert await queues.change("emails", max_attempts=2) == effective(max_attempts=2)
    assert log.writes == 1


async def test_a_reset_wins_against_a_change_that_came_before_it(queues: Queues, log: ListLog) -> None:
    await queues.change("emails", lease=5)
    log.before_write = lambda: log.append(b"change:emails", {"lease": 6}) and None

    assert await queues.reset("emails") == effective()
    assert log.writes == 2


async def test_a_change_gives_up_if_another_client_never_stops(queues: Queues, log: ListLog) -> None:
    log.before_write = lambda: log.append(b"change:emails", {"lease": log.writes}) and None

    expected = f"queue 'emails': other clients changed its settings during each of {MAX_TRIES} attempts"
    with pytest.raises(MarqError, match=expected):
        await queues.change("emails", max_attempts=2)


async def test_no_error_ends_the_reading(queues: Queues, log: ListLog, caplog: pytest.LogCaptureFixture) -> None:
    for error in (BrokerUnavailable("away"), AssertionError("a bug of somebody's")):
        log.errors = [error, error]
        log.append(b"change:emails", {"lease": 1})

        # Only what is read later is read at all.
        assert (await queues.change("emails", lease=2)).lease == 2
        await queues.reset("emails")

    assert caplog.text.count("cannot read the definitions of queues, retrying") == 2
    assert "a bug of somebody's" in caplog.text


async def test_a_change_that_is_never_read_back_is_not_known_to_be_seen(log: ListLog) -> None:
    async def nothing() -> tuple[list[Row], int]:
        await asyncio.Event().wait()
        raise AssertionError

    read = asyncio.Event()
    async with Queues("none:1", request_timeout=1) as queues:
        queues.listen(read.set)
        # The read that is under way begins.
        await asyncio.sleep(0)
        log.read = nothing  # type: ignore[method-assign]
        # It ends, so that the next one is the one above.
        log.append(b"change:other", {"lease": 1})
        await asyncio.wait_for(read.wait(), 60)

        with pytest.raises(BrokerUnavailable, match="was not read back within 1 s"):
            await queues.change("emails", lease=2)


async def test_of_two_concurrent_writers_of_a_layer_the_first_one_wins(queues: Queues, log: ListLog) -> None:
    placement = {"sends": [1], "reads": None}
    log.before_next_write((b"placement:a", placement), (b"placement:b", b"garbage"))
    await queues.replace({b"placement:a": {"sends": [2], "reads": [2]}, b"placement:b": {"sends": [3], "reads": [3]}})

    assert queues.definitions.placement("a").document() == placement
    assert queues.definitions.placement("b").sends == (3,)
    assert json.loads(log.entries[-1].value or b"") == placement
    assert log.writes == 2


async def test_a_later_record_of_another_writer_is_not_overwritten(queues: Queues, log: ListLog) -> None:
    first, ours, last = ({"sends": [number], "reads": None} for number in (1, 2, 3))

    def after() -> None:
        log.after_write = lambda: None
        log.append(b"placement:a", last)

    log.before_next_write((b"placement:a", first))
    log.after_write = after
    await queues.replace({b"placement:a": ours})

    assert queues.definitions.placement("a").document() == last
    assert log.writes == 1


async def test_it_is_said_when_it_is_not_known_whether_all_is_known(queues: Queues, log: ListLog) -> None:
    await queues.sync(1)
    log.entries.append(Row(0, 0, b"change:emails", b"{}", ()))
    log.errors = [BrokerUnavailable("away")] * 1_000

    with pytest.raises(BrokerUnavailable, match=r"could not be read within 0\.05 s"):
        await queues.sync(0.05)
