"""A process with a log, and a watchdog that ends it if this program dies without stopping it."""

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

_WATCHDOG = Path(__file__).with_name("watchdog.py")


def watch(group: int, temporary: Sequence[Path] = ()) -> subprocess.Popen[bytes]:
    """Start a watchdog: it kills a process group, and deletes directories, if this program dies before the group."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_WATCHDOG), str(os.getpid()), str(group), *map(str, temporary)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


class ChildProcess:
    """A process in its own session, so that Ctrl-C in the terminal reaches this program first.

    ``log_file`` receives its output. The watchdog deletes the ``temporary`` directories. `write` needs
    ``stdin=subprocess.PIPE``. Until `start`, its attributes may be changed.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        *,
        directory: Path,
        environment: Mapping[str, str],
        temporary: Sequence[Path] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.command = command
        self.log_file = log_file
        self.directory = directory
        self.environment = environment
        self._temporary = temporary
        self._stdin = stdin
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._paused = False

    def start(self) -> Self:
        """Start the process and its watchdog."""
        assert self._process is None, f"{self.command} was started before"
        with self.log_file.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=self._stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=dict(self.environment),
                start_new_session=True,
            )
        watchdog = watch(self._process.pid, self._temporary)
        # At most once: later, another process may have the same id.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, watchdog)
        return self

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.command} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._started.poll()

    def write(self, data: bytes) -> None:
        """Write to its standard input."""
        stdin = self._started.stdin
        assert stdin is not None
        stdin.write(data)
        stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to the process, but not to processes that it started."""
        self._started.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP to its group; returns when the process has stopped."""
        os.killpg(self.pid, signal.SIGSTOP)
        self._paused = True
        # On a busy machine its threads run on for a while. macOS has no waitid before Python 3.13.
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT to its group after `pause()`."""
        if self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)
        self._paused = False

    def wait(self, limit_seconds: float) -> bool:
        """Return whether the process ends within the limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started.wait(limit_seconds)
        return not self.running

    def terminate(self) -> None:
        """SIGTERM."""
        self.resume()  # a stopped process does not see SIGTERM
        self.signal(signal.SIGTERM)

    def join(self, limit_seconds: float) -> None:
        """Wait for the end; kill -9 after the limit."""
        self.wait(limit_seconds)
        self.kill()

    def kill(self) -> None:
        """kill -9 to its group and to the watchdog. Idempotent."""
        self._end()


def _end(owner: int, *processes: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:
        return  # a forked child must not end its parent's broker when it exits
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
