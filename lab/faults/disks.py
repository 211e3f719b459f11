"""A full disk of a worker: a file system of a few MiB that can be filled and freed."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lab.faults.scenario import AtBroker, ConditionError, scenario
from lab.stage import Stage
from marq_worker.broker import EmbeddedBroker

#: Several times the size of RocksDB's files in this scenario.
MEBIBYTES = 128
FULL_SECONDS = 10.0
LIMIT_SECONDS = 30.0
BALLAST = "ballast"
CHUNK = bytes(1 << 16)
#: Unmounts at the end of its standard input, which the run closes, even if it dies.
_KEEPER = """trap '' HUP INT TERM; cat >/dev/null; umount -l "$1" """


class SmallDisk:
    """A tmpfs of ``mebibytes`` on ``path``, within the context; it never outlives this process.

    Raises:
        ConditionError: this process may not mount.
    """

    def __init__(self, path: Path, mebibytes: int, mount: str = "mount") -> None:
        self.path = path
        self._mebibytes = mebibytes
        self._mount = mount
        self._keeper: subprocess.Popen[bytes] | None = None

    def fill(self) -> None:
        """Leave no free space."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            size = len(CHUNK)
            while size:
                try:
                    ballast.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        """Free the space again."""
        (self.path / BALLAST).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={self._mebibytes}m,mode=0700"
        command = [self._mount, "-t", "tmpfs", "-o", options, "marq-faults", str(self.path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise ConditionError(
                f"a full disk needs the right to mount a tmpfs on {self.path} ({reason}): run this as root, in a"
                " container with --cap-add SYS_ADMIN"
            ) from error
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper is not None
        self._keeper.communicate(timeout=LIMIT_SECONDS)


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


@scenario(
    "worker-disk-full",
    f"the disk under the only worker's RocksDB is full for {FULL_SECONDS:.0f} s",
    "redelivery pauses and the log says why; it resumes when there is space",
    with_small_disk,
)
async def full(stage: Stage, here: WithSmallDisk) -> None:
    """The changelog has the whole table, so rows that the disk did not accept are not lost."""
    worker = await stage.begin(data=here.disk.path / "data")
    with stage.fault("cut", worker.name):
        here.disk.fill()
        await stage.until(lambda: stalled(stage), "the worker notices that its disk is full")
        await stage.play(FULL_SECONDS)
        here.disk.free()
    await stage.owned()
    await stage.delivered_more()


async def stalled(stage: Stage) -> bool:
    return any(part["state"] != "owner" for part in await stage.partitions())
