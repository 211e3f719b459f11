"""Delays a message, moves it and cancels another: ``python -m examples.later QUEUE``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys
from datetime import UTC, datetime, timedelta

import marq


async def main(queue: str) -> None:
    async with marq.Producer() as producer:
        daily = await producer.send(queue, b"daily", delay=timedelta(hours=8))
        monthly = await producer.send(queue, b"monthly", at=datetime.now(UTC) + timedelta(days=30))
        print("moved:", await producer.reschedule(daily, delay=1))
        print("cancelled:", await producer.cancel(monthly.id))
        print("cancelled again:", await producer.cancel(monthly))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
