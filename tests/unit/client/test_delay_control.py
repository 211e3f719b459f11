"""Requests to move and cancel messages: which markers answer them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace

import pytest

from marq.client.receipt import Receipt
from marq.client.send_options import When
from marq.kafka.marker_writer import MarkerRecord
from marq.producer.delay_control import DelayControl
from marq.wire.errors import BrokerUnavailable
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import (
    ANY_QUEUE,
    MAX_BATCH_MARKERS,
    Answer,
    Batch,
    Cancel,
    Cause,
    Fact,
    Kind,
    RequestOutcome,
    Reschedule,
    Source,
)
from marq.wire.names import Names, markers_partition

PLACE = Source("orders", 3)
#: Time limit for anything that a test is not about.
LIMIT_S = 20.0
LATER = When(1_000, relative=True)
Script = Callable[[Cancel | Reschedule], Iterable[Batch]]


class Log:
    """A markers partition with a tracker: ``script`` has the markers that follow on each request."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._values: list[bytes] = []
        self.requests = 0

    async def markers_reader(self, partitions: object) -> Log:
        return self

    async def incarnations(self, topics: Iterable[str]) -> dict[str, str]:
        return {}

    async def writer(self) -> Log:
        return self

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        for record in records:
            request = decode(record.value)
            assert isinstance(request, Cancel | Reschedule)
            self.requests += 1
            for batch in self._script(request):
                self._values.append(encode(batch))

    async def read(self) -> list[bytes]:
        """Return the next marker; if there is none, the time to wait for it passes at once."""
        if not self._values:
            raise TimeoutError
        return [self._values.pop(0)]

    async def stop(self, limit_s: float) -> None:
        pass

    def check_running(self) -> None:
        pass

    def now_s(self) -> float:
        return 0.0

    async def within(self, limit_s: float, work: Awaitable[None]) -> None:
        await work


def fact(kind: Kind, queue: str) -> Fact:
    return Fact(kind, queue, 9, PLACE, [5], [1], [Cause.CANCELLED if kind is Kind.CANCELLED else Cause.EXPIRED])


def answer(request: Cancel | Reschedule, outcome: RequestOutcome, queue: str | None = None) -> Answer:
    return Answer(request.queue if queue is None else queue, request.holder, PLACE, [5], [outcome])


def topics(markers_partitions: int) -> SimpleNamespace:
    return SimpleNamespace(markers_partitions=markers_partitions, markers_limit_bytes=1_114_124)


async def asked(queue: str, when: When | None, script: Script) -> tuple[bool, int]:
    """Return what a request was told, and how often it was written."""
    log = Log(script)
    control = DelayControl(log, Names(), topics(1), log, 5.0)  # type: ignore[arg-type]
    [in_time] = await control.ask([Receipt(queue, *PLACE, 5)], when)
    return in_time, log.requests


@pytest.mark.parametrize("when", [None, LATER])
async def test_a_marker_about_another_queues_message_at_the_place_is_no_answer(when: When | None) -> None:
    def script(request: Cancel | Reschedule) -> Iterable[Batch]:
        yield fact(Kind.REDELIVERED, "other")
        yield fact(Kind.CANCELLED, "other")
        yield answer(request, RequestOutcome.TOO_LATE, "other")
        yield fact(Kind.CANCELLED, "emails") if when is None else answer(request, RequestOutcome.DONE)

    assert await asked("emails", when, script) == (True, 1)


async def test_of_a_request_without_a_queue_one_message_in_time_is_enough() -> None:
    def script(request: Cancel | Reschedule) -> Iterable[Batch]:
        yield fact(Kind.REDELIVERED, "other")
        yield fact(Kind.CANCELLED, "emails")

    assert await asked(ANY_QUEUE, None, script) == (True, 1)


async def test_a_request_without_a_queue_is_repeated_until_a_tracker_says_that_it_is_too_late() -> None:
    requests = []

    def script(request: Cancel | Reschedule) -> Iterable[Batch]:
        requests.append(request)
        yield fact(Kind.REDELIVERED, "emails") if len(requests) == 1 else answer(request, RequestOutcome.TOO_LATE)

    assert await asked(ANY_QUEUE, None, script) == (False, 2)


class Partitions(Log):
    """Markers partitions with trackers, of which those of ``silent`` do not answer; a thousand seconds take one."""

    def __init__(self, silent: int) -> None:
        super().__init__(lambda request: ())
        self._silent = silent
        self._readers: list[tuple[set[int], asyncio.Queue[bytes]]] = []
        #: Each request when it is written, with its partition.
        self.written: asyncio.Queue[int] = asyncio.Queue()

    async def markers_reader(self, partitions: object) -> Log:
        assert isinstance(partitions, set)
        values: asyncio.Queue[bytes] = asyncio.Queue()
        self._readers.append((partitions, values))
        return Reader(values)

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        for record in records:
            request = decode(record.value)
            assert isinstance(request, Cancel)
            self.written.put_nowait(record.partition)
            if record.partition == self._silent:
                continue
            done = [RequestOutcome.DONE] * len(request.offsets)
            value = encode(Answer(request.queue, request.holder, request.source, request.offsets, done))
            for partitions, values in self._readers:
                if record.partition in partitions:
                    values.put_nowait(value)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() * 1_000

    async def within(self, limit_s: float, work: Awaitable[None]) -> None:
        async with asyncio.timeout(limit_s / 1_000):
            await work


class Reader(Log):
    def __init__(self, values: asyncio.Queue[bytes]) -> None:
        self._next = values

    async def read(self) -> list[bytes]:
        return [await self._next.get()]


@pytest.mark.parametrize("when", [None, LATER])
async def test_more_messages_than_fit_into_a_marker_are_requested_with_several(when: When | None) -> None:
    def done(request: Cancel | Reschedule) -> list[Batch]:
        return [
            Answer(request.queue, request.holder, PLACE, request.offsets, [RequestOutcome.DONE] * len(request.offsets))
        ]

    log = Log(done)
    control = DelayControl(log, Names(), topics(1), log, 5.0)  # type: ignore[arg-type]

    in_time = await control.ask([Receipt("q", *PLACE, offset) for offset in range(MAX_BATCH_MARKERS + 1)], when)

    assert (set(in_time), len(in_time), log.requests) == ({True}, MAX_BATCH_MARKERS + 1, 2)


async def test_a_tracker_that_does_not_answer_holds_up_no_later_requests() -> None:
    sources = {markers_partition("orders", number, 2): Source("orders", number) for number in range(10)}
    silent, other = (Receipt("emails", *sources[partition], 5) for partition in (0, 1))
    log = Partitions(silent=0)
    control = DelayControl(log, Names(), topics(2), log, 1e6)  # type: ignore[arg-type]

    async with asyncio.timeout(LIMIT_S):
        first = asyncio.create_task(control.ask([silent], None))
        assert await log.written.get() == 0
        assert await control.ask([other], None) == [True]
        while await log.written.get() != 1:
            pass

        # Requests to both are written at once, too.
        second = asyncio.create_task(control.ask([silent, other], None))
        while await log.written.get() != 1:
            pass
        assert not first.done()

        await control.stop()
        for task in (first, second):
            with pytest.raises(BrokerUnavailable, match="unknown whether message"):
                await task


async def test_a_stop_ends_requests_that_have_not_been_written() -> None:
    log = Partitions(silent=0)
    control = DelayControl(log, Names(), topics(1), log, 1e6)  # type: ignore[arg-type]
    asking = asyncio.create_task(control.ask([Receipt("emails", *PLACE, 5)], None))
    await asyncio.sleep(0)

    await control.stop()

    with pytest.raises(BrokerUnavailable, match="the producer was stopped"):
        await asyncio.wait_for(asking, LIMIT_S)
    assert log.written.empty()
