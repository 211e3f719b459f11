"""A file system of a few MiB that can be filled to its last byte, and given room again."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from faults.errors import ConditionError

LIMIT_SECONDS = 30.0
BALLAST = "ballast"
CHUNK = bytes(1 << 16)
#: Its standard input is the sign: its end comes when the run closes it, and also when the run dies.
_KEEPER = """trap '' HUP INT TERM; cat >/dev/null; umount -l "$1" """


class SmallDisk:
    """A tmpfs of ``mebibytes`` on ``path`` within the `with`, and never longer than this process lives.

    Raises:
        ConditionError: this process may not mount, on entering.
    """

    def __init__(self, path: Path, mebibytes: int, mount: str = "mount") -> None:
        self.path = path
        self._mebibytes = mebibytes
        self._mount = mount
        self._keeper: subprocess.Popen[bytes] | None = None

    def fill(self) -> None:
        """Leave no room at all."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            size = len(CHUNK)
            while size:
                try:
                    ballast.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def make_room(self) -> None:
        """Take away what `fill` put there."""
        (self.path / BALLAST).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={self._mebibytes}m,mode=0700"
        command = [self._mount, "-t", "tmpfs", "-o", options, "marq-faults", str(self.path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise ConditionError(
                f"a disk that is full needs the right to mount a tmpfs on {self.path} ({said}): run this as root, in a"
                " container with --cap-add SYS_ADMIN"
            ) from error
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.communicate(timeout=LIMIT_SECONDS)
