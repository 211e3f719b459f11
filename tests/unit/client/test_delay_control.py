"""Requests to move and cancel messages: which markers answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace

import pytest

from marq.client.delivery_time import When
from marq.client.receipt import Receipt
from marq.kafka.marker_writer import MarkerRecord
from marq.producer.delay_control import DelayControl
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import ANY_QUEUE, Answer, Batch, Cancel, Cause, Fact, Kind, Outcome, Reschedule, Source

PLACE = Source("orders", 3)
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


def answer(request: Cancel | Reschedule, outcome: Outcome, queue: str | None = None) -> Answer:
    return Answer(request.queue if queue is None else queue, request.holder, PLACE, [5], [outcome])


async def asked(queue: str, when: When | None, script: Script) -> tuple[bool, int]:
    """Return what a request was told, and how often it was written."""
    log = Log(script)
    control = DelayControl(log, SimpleNamespace(markers_partitions=1), log, 5.0)  # type: ignore[arg-type]
    [in_time] = await control.ask([Receipt(queue, *PLACE, 5)], when)
    return in_time, log.requests


@pytest.mark.parametrize("when", [None, LATER])
async def test_a_marker_about_another_queues_message_at_the_place_is_no_answer(when: When | None) -> None:
    def script(request: Cancel | Reschedule) -> Iterable[Batch]:
        yield fact(Kind.REDELIVERED, "other")
        yield fact(Kind.CANCELLED, "other")
        yield answer(request, Outcome.TOO_LATE, "other")
        yield fact(Kind.CANCELLED, "emails") if when is None else answer(request, Outcome.DONE)

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
        yield fact(Kind.REDELIVERED, "emails") if len(requests) == 1 else answer(request, Outcome.TOO_LATE)

    assert await asked(ANY_QUEUE, None, script) == (False, 2)
