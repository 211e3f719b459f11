"""Workers that stand still end themselves and say what stood still; those that only wait go on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from app.watchdog import EXIT_CODE
from broker import EmbeddedBroker
from tests.worker import standstill
from tests.worker.harness import ROOT, Installation, Worker, eventually

Make = Callable[..., Worker]
#: Far above what any step of a worker takes, also on a starved machine.
WATCHDOG_SECONDS = 12
LIMIT_SECONDS = 120.0


class Victim:
    """A worker that can be made to stand still."""

    def __init__(self, new_worker: Make, directory: Path, **settings: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.worker = new_worker(
            data_directory=directory / "data",
            queues=settings.pop("queues", ""),
            environment={
                "PYTHONPATH": f"{standstill.site_folder(directory)}:{ROOT}",
                "MARQ_WATCHDOG": str(WATCHDOG_SECONDS),
                **settings,
            },
        )

    async def stands_still(self, how: Callable[[], None]) -> None:
        await self.worker.ready()
        standstill.stand_still(self.directory, how)
        await eventually(self._obeyed)

    async def _obeyed(self) -> bool:
        return standstill.is_obeyed(self.directory)

    async def last_words(self) -> str:
        """Wait for the end that the watchdog makes; return what it said."""
        assert await self.worker.ended(LIMIT_SECONDS) == EXIT_CODE, self.worker.log()
        [words] = [line for line in self.worker.log().splitlines() if "watchdog: " in line]
        return words


async def write_markers(broker: EmbeddedBroker, victim: Victim) -> None:
    async with Installation(broker.bootstrap_servers, victim.worker.names) as marq:
        for partition in (0, 1):
            await marq.acquire(await marq.send("waits", partition=partition), lease=60)


async def test_a_worker_that_stands_still_ends_itself_and_says_what_stood_still(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Consumers that die slowly (faust-streaming #175, #640) stay in their group and are never heard of again.

    All at once, for each takes its time: code that blocks the event loop, a consumer that fetches no more, an owner
    that does not come back from folding, and a rebalance that the worker does not get out of.
    """
    blocked, deaf, stuck = (Victim(new_worker, tmp_path / name) for name in ("blocked", "deaf", "stuck"))
    # Or the broker would wait for it to join, and a rebalance that others are in as well is none to end for.
    lost = Victim(new_worker, tmp_path / "lost", BROKER_REBALANCE_TIMEOUT="6")
    for victim in (blocked, deaf, stuck, lost):
        victim.worker.start()
    await blocked.stands_still(standstill.event_loop)
    await deaf.stands_still(standstill.fetch)
    await stuck.stands_still(standstill.fold)
    await lost.stands_still(standstill.rebalance)
    await asyncio.gather(write_markers(broker, deaf), write_markers(broker, stuck))
    other = new_worker(like=lost.worker, PYTHONPATH=str(ROOT)).start()

    words = await asyncio.gather(*(victim.last_words() for victim in (blocked, deaf, stuck, lost)))

    for said, expected in zip(
        words,
        (
            "the event loop has had no turn, for 12 s",
            r"markers partition \d stands still: what is there for it is not read",
            r"markers partition \d stands still: .*(folded|not read)",
            r"a rebalance of the group .*-app stands still: it does not end",
        ),
        strict=True,
    ):
        assert re.search(expected, said), said
    assert "most recent call first" in blocked.worker.log(), "where each thread stood"
    assert other.exit_code is None
