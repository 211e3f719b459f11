"""What a handlers process tells its worker."""

from __future__ import annotations

import asyncio
import os

from app.reports import Reporter, reports


async def test_a_report_is_told_when_it_is_new_until_the_writer_ends() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    read = []

    async def listen() -> None:
        read.extend([report async for report in reports(reading)])

    listening = asyncio.create_task(listen())
    for state in ("closed", "closed", "open"):
        reporter.tell({"breakers": {"emails": state}})
    reporter.tell({"breakers": {"x" * 5_000: "open"}})
    os.close(writing)
    async with asyncio.timeout(60):
        await listening

    assert read == [{"breakers": {"emails": "closed"}}, {"breakers": {"emails": "open"}}]


async def test_nobody_waits_for_a_reader_that_is_slow_or_gone() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    for number in range(20_000):
        reporter.tell({"number": number})
    os.close(reading)
    reporter.tell({"number": -1})

    os.close(writing)
