"""Pages read dead letters once, and then only what is new; what is settled or gone is not counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

import marq
from marq.dead_letters.filters import Filters
from marq.dead_letters.log import Stored
from marq.dead_letters.selection import CountKey, Spot, Survey
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard import dead_letters
from marq_worker.web.dashboard.dead_letters import DeadLetterIndex, KindOfError, TooManyDeadLetters
from marq_worker.web.dashboard.queries import DashboardQueries


@asynccontextmanager
async def namespace(
    broker: Broker | None = None,
) -> AsyncIterator[tuple[DeadLetterIndex, marq.Producer, marq.Consumer, marq.DeadLetters]]:
    """An index, and the clients that make dead letters and settle them."""
    async with (
        broker or Broker() as broker,
        broker.producer() as producer,
        broker.consumer("emails") as consumer,
        marq.DeadLetters(broker.address) as dead,
    ):
        index = DeadLetterIndex(ClientSettings.read(broker.address), lambda dead_letter: {"reason": dead_letter.reason})
        yield index, producer, consumer, dead
        await index.stop()


async def reject(consumer: marq.Consumer, producer: marq.Producer, *reasons: str) -> None:
    """Let a message of `emails` die of each of these."""
    await producer.send_many("emails", [b"x"] * len(reasons))
    for reason, message in zip(reasons, await consumer.receive(max_messages=len(reasons)), strict=True):
        await message.reject(reason)


async def test_what_died_and_what_was_settled_since_the_last_look_is_seen() -> None:
    async with namespace() as (index, producer, consumer, dead):
        await reject(consumer, producer, "no customer 1", "no customer 2", "too late")
        await index.read()
        assert index.counts() == {"emails": 3}

        await dead.delete("emails", kind="no customer N", limit=1)
        await reject(consumer, producer, "no customer 3", "no customer 4")

        kinds = await index.kinds(None, {})
        assert [(kind.group.reason, kind.dead_letters) for kind in kinds] == [("no customer N", 3), ("too late", 1)]
        found = await index.newest("emails", {"kind": "no customer N"}, 2)
        assert [letter.reason for letter in found] == ["no customer 4", "no customer 3"]
        assert index.counts() == {"emails": 4}
        assert index.read_at is not None


@pytest.mark.parametrize(
    ("queue", "filters", "reasons"),
    [
        (None, {}, ["no customer 5", "too late", "no customer 1"]),
        ("emails", {"reason": "CUSTOMER"}, ["no customer 5", "no customer 1"]),
        ("emails", {"kind": "too late"}, ["too late"]),
        ("others", {}, []),
        ("others", {"reason": "customer"}, []),
    ],
)
async def test_dead_letters_and_kinds_come_newest_first_whatever_filters_them(
    queue: str | None, filters: Filters, reasons: list[str]
) -> None:
    broker = Broker()
    async with namespace(broker) as (index, producer, consumer, _):
        for reason in ("no customer 1", "too late", "no customer 5"):
            await reject(consumer, producer, reason)
            await broker.advance(1)

        found = await index.newest(queue, filters, 10)
        kinds = await index.kinds(queue, filters)

        assert [letter.reason for letter in found] == reasons
        assert [sample and sample["reason"] for sample in await index.samples(kinds)] == [
            reason for reason in reasons if reason != "no customer 1"
        ]


async def test_kinds_are_described_with_their_times_and_a_redacted_sample() -> None:
    broker = Broker()
    async with namespace(broker) as (_, producer, consumer, _):
        await reject(consumer, producer, "no customer 1")
        await broker.advance(60)
        await reject(consumer, producer, "no customer 2")
        pages_data = DashboardQueries.__new__(DashboardQueries)
        pages_data._statistics = cast("Any", SimpleNamespace(redaction=Redaction(["card"])))
        pages_data._index = DeadLetterIndex(ClientSettings.read(broker.address), pages_data._describe)

        [kind] = await pages_data.kinds("emails", {})
        await pages_data._index.stop()

    first, last = (datetime.fromisoformat(kind[f"{which}_dead_lettered_at"]) for which in ("first", "last"))
    assert (kind["queue"], kind["kind"], kind["dead_letters"]) == ("emails", "no customer N", 2)
    assert timedelta(seconds=60) <= last - first < timedelta(seconds=62)
    assert kind["sample"]["reason"] == "no customer 2"
    assert kind["sample"]["value"] != "x"


async def test_a_sample_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with namespace() as (index, producer, consumer, _):
        await reject(consumer, producer, "a", "b")
        kinds = await index.kinds(None, {})
        samples = await index.samples(kinds)

        def read_again(_: object) -> None:
            raise AssertionError

        monkeypatch.setattr("marq.dead_letters.log.dead_letter_log", read_again)

        assert await index.samples(kinds) == samples
        assert await index.samples(kinds[1:]) == samples[1:]
        with pytest.raises(AssertionError):
            await index.samples(kinds)


async def test_so_many_that_no_page_reads_them_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_UNREAD", 1)
    async with namespace() as (index, producer, consumer, _):
        await reject(consumer, producer, "a", "b")

        with pytest.raises(TooManyDeadLetters, match="2 records of dead letters are unread"):
            await index.read()


async def test_who_stops_waiting_does_not_stop_the_reading() -> None:
    async with namespace() as (index, producer, consumer, _):
        await reject(consumer, producer, "a")
        impatient = asyncio.create_task(index.read())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])

        await index.read()

        assert index.counts() == {"emails": 1}


class Log:
    """Dead letters of partition 0, from ``first`` on; notes what is asked for."""

    def __init__(self, first: int, last: int) -> None:
        self.span = range(first, last)
        self.sought: list[int] = []

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ranges(self) -> dict[int, range]:
        return {0: self.span}

    async def records(self, ranges: Mapping[int, range]) -> AsyncIterator[Sequence[Stored]]:
        if ranges[0]:
            self.sought.append(ranges[0].start)
            yield [Stored(0, offset, 1, b"emails", b"", []) for offset in ranges[0]]

    def seek(self, positions: Mapping[int, int]) -> None: ...

    async def read(self) -> Sequence[Stored]:
        return []


async def test_a_survey_reads_on_and_forgets_what_retention_removed_or_a_new_topic_does_not_have() -> None:
    survey = Survey("dead", lambda queue, record: True)
    log = Log(0, 5)
    offsets = []
    for span in (range(5), range(3, 8), range(8, 8), range(2)):
        log.span = span
        await survey.make(log)
        offsets.append([spot.offset for spot in survey.spots()])

    assert offsets == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [], [0, 1]]
    assert log.sought == [0, 5, 0]


async def test_each_sample_of_a_partition_is_read_by_a_reader_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that seeks again may return records of partitions that it read before."""
    logs: list[Log] = []

    def open_log(_: object) -> Log:
        logs.append(Log(0, 9))
        return logs[-1]

    monkeypatch.setattr("marq.dead_letters.log.dead_letter_log", open_log)
    index = DeadLetterIndex(ClientSettings.read("localhost:1"), lambda dead_letter: {"id": dead_letter.id})
    spots = [Spot(0, offset, 1, offset) for offset in (5, 1)]

    samples = await index.samples([KindOfError(CountKey("emails", ""), 1, spot, spot) for spot in spots])

    assert [log.sought for log in logs] == [[5], [1]]
    assert [sample and sample["id"].rpartition("/")[2] for sample in samples] == ["5", "1"]
