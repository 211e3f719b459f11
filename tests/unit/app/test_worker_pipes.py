"""What a handler process tells its worker."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from marq_worker.handlers.worker_pipes import REPEAT_SECONDS, Reporter, reports


async def test_a_report_is_told_when_it_is_new_until_the_writer_ends() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    read = []

    async def listen() -> None:
        read.extend([report async for report in reports(reading)])

    listening = asyncio.create_task(listen())
    for state in ("closed", "closed", "open"):
        reporter.tell({"breakers": {"emails": state}})
    # A process that dies may have written a part of a report.
    os.write(writing, b'{"breakers"')
    os.close(writing)
    async with asyncio.timeout(60):
        await listening

    assert [report for report in read if report] == [
        {"breakers": {"emails": "closed"}},
        {"breakers": {"emails": "open"}},
    ]


async def test_the_breakers_of_many_queues_are_reported_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the pipe has no room for all of them at once, and when queues are removed."""
    reading, writing = os.pipe()
    reporter, now_s = Reporter(writing), 100.0
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.time", SimpleNamespace(monotonic=lambda: now_s))
    breakers = {f"{number:03d}{'é' * 126}": {"state": "closed", "openings": 0} for number in range(600)}
    fewer = dict(list(breakers.items())[:200])
    complete = []

    async with asyncio.timeout(60):
        async for report in reports(reading, silence_s=0.01):
            if report:
                complete.append(report)
            if len(complete) == 2:
                break
            reporter.tell({"breakers": fewer if complete else breakers, "in_flight": 1})

    os.close(writing)
    assert complete == [{"breakers": breakers, "in_flight": 1}, {"breakers": fewer, "in_flight": 1}]


async def test_a_report_that_does_not_change_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    reporter, now_s = Reporter(writing), 100.0
    monkeypatch.setattr("marq_worker.handlers.worker_pipes.time", SimpleNamespace(monotonic=lambda: now_s))

    for passed_s in (0, REPEAT_SECONDS / 2, REPEAT_SECONDS / 2):
        now_s += passed_s
        reporter.tell({"in_flight": 0})
    os.close(writing)

    assert [report async for report in reports(reading)] == [{"in_flight": 0}, {"in_flight": 0}]


async def test_a_reader_notes_each_silence_and_hears_what_comes_after_it() -> None:
    reading, writing = os.pipe()
    reporter, read = Reporter(writing), []

    async for report in reports(reading, silence_s=0.01):
        read.append(report)
        if len(read) == 3:
            reporter.tell({"in_flight": 1})
        if report is not None:
            os.close(writing)

    assert read[:3] == [None, None, None]
    assert read.count({"in_flight": 1}) == 1


async def test_writers_do_not_wait_for_a_slow_or_closed_reader() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    for number in range(20_000):
        reporter.tell({"number": number})
    os.close(reading)
    reporter.tell({"number": -1})

    os.close(writing)
