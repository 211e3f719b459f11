"""The broker's operating system process, and the watchdog that ends it when this program dies without stopping it."""

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

from broker.directory import BrokerDirectory

WATCHDOG = Path(__file__).with_name("watchdog.py")


class BrokerProcess:
    """A JVM in its own session, so that Ctrl-C in the terminal reaches our code first and the broker goes last."""

    def __init__(self, command: list[str], directory: BrokerDirectory, environment: Mapping[str, str]) -> None:
        with directory.console.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory.path,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        arguments = [str(os.getpid()), str(self._process.pid), *map(str, directory.temporary)]
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._paused = False
        weakref.finalize(self, _end, os.getpid(), self._process, self._watchdog)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there, paused or not."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._process.send_signal(signal.SIGCONT)
        self._paused = False

    def stop(self, limit_seconds: float) -> None:
        """SIGTERM, and kill -9 after the limit."""
        self.resume()  # a stopped process does not see SIGTERM
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # kill() says it again, louder
            self._process.wait(limit_seconds)
        self.kill()

    def kill(self) -> None:
        """kill -9, for the watchdog too: it has nobody left to watch. Idempotent."""
        _end(os.getpid(), self._process, self._watchdog)


def _end(owner: int, *processes: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:
        return  # a forked child that exits must not take its parent's broker with it
    for process in processes:
        process.kill()
        process.wait()
