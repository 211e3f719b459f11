"""What happens to a worker's disk: it is full, and there is room again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from broker import EmbeddedBroker
from faults.disk import SmallDisk
from faults.scenario import AtBroker, Scenario
from faults.stage import Stage

#: Messages before and after the fault.
SOME = 300
#: Room for RocksDB's files of this scenario, several times over.
MEBIBYTES = 128
FULL_SECONDS = 10.0


@dataclass(frozen=True)
class WithSmallDisk(AtBroker):
    """A broker, and a disk for a worker."""

    disk: SmallDisk


@contextmanager
def with_small_disk() -> Iterator[WithSmallDisk]:
    with (
        tempfile.TemporaryDirectory(prefix="marq-disk-") as folder,
        SmallDisk(Path(folder), MEBIBYTES) as disk,
        EmbeddedBroker() as broker,
    ):
        yield WithSmallDisk(broker, disk)


async def full(stage: Stage, here: WithSmallDisk) -> None:
    """The table is whole in its changelog, so what the disk did not take is not lost."""
    worker = await stage.worker(data=here.disk.path / "data")
    stage.load()
    await stage.consumer()
    await stage.consumer()
    await stage.delivered_more(SOME)
    with stage.fault("cut", worker.name):
        here.disk.fill()
        await stage.until(lambda: stands_still(stage), "the worker notices that its disk is full")
        await stage.play(FULL_SECONDS)
        here.disk.make_room()
    await stage.owned()
    await stage.delivered_more(SOME)


async def stands_still(stage: Stage) -> bool:
    return any(part["state"] != "owner" for part in await stage.partitions())


SCENARIOS = [
    Scenario(
        "worker-disk-full",
        f"the disk under the only worker's RocksDB is full for {FULL_SECONDS:.0f} s",
        "redelivery stands still and the worker's log says why; it goes on by itself when there is room",
        full,
        with_small_disk,
    ),
]
