"""A broker's directory: `data/` (topics), `logs/`, server.properties."""

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from marq_worker.broker import settings
from marq_worker.broker.errors import BrokerError, not_written

LOG_BYTES = 64 << 10


class BrokerDirectory:
    """A directory that is kept, or without a path a temporary one, until `remove()`."""

    def __init__(self, path: Path | None) -> None:
        self._removal: weakref.finalize[[int, Path], BrokerDirectory] | None = None
        self._unlock: weakref.finalize[[int], BrokerDirectory] | None = None
        try:
            self.path = self._make_temporary() if path is None else path
            self.data, self.logs = self.path / "data", self.path / "logs"
            #: Output of the JVM itself: refused flags, crashes.
            self.console = self.logs / "console.log"
            self.server_properties = self.path / "server.properties"
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BrokerError(not_written("directory", error)) from error

    @property
    def temporary(self) -> list[Path]:
        return [] if self._removal is None else [self.path]

    @property
    def formatted(self) -> bool:
        return (self.data / "meta.properties").exists()

    def lock(self) -> None:
        """Prevent other processes from starting a broker here until `unlock()` or this process's end. Idempotent.

        Kafka has a lock of its own, but takes it late: a second broker has written into the first one's metadata by
        then, and on a slow machine it is the first one that ends. Raises BrokerError: another broker has it.
        """
        if self._unlock is not None:
            return
        try:
            file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BrokerError(not_written("directory", error)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise BrokerError(f"another broker uses {self.path}: stop it or choose another directory") from error
        self._unlock = weakref.finalize(self, os.close, file)

    def unlock(self) -> None:
        """Let other processes start a broker here. Idempotent."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def write_settings(self, properties: Mapping[str, str]) -> None:
        try:
            self.server_properties.write_text(settings.render(properties), encoding="ascii")
            # An error message must quote the log of this start.
            (self.logs / "broker.log").unlink(missing_ok=True)
        except OSError as error:
            raise BrokerError(not_written("settings", error)) from error

    def log(self) -> str:
        """Return the end of the log of the broker and its JVM, since the start."""
        return "\n".join([_end_of(self.console), _end_of(self.logs / "broker.log")]).strip()

    def remove(self) -> None:
        """Delete a temporary directory."""
        if self._removal is not None:
            self._removal()

    def _make_temporary(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="marq-broker-"))
        self._removal = weakref.finalize(self, _remove, os.getpid(), path)
        return path


def _remove(owner: int, path: Path) -> None:
    if os.getpid() == owner:  # not a forked child that exits
        shutil.rmtree(path, ignore_errors=True)


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
