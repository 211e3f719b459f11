"""The processes of a scenario: real workers and consumers that can be killed, paused and started again."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.ports import free_port
from demo.processes import Child
from faults import handling
from proof.history import Event

#: How long a worker may take to answer with its figures.
ANSWER_SECONDS = 2.0


class Participant(Child):
    """A process that writes a history, which is read while it grows."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.history = folder / f"{name}.jsonl"
        self.history.touch()
        self._read_to = 0
        super().__init__(name, [*command[:2], name, str(self.history), *command[2:]], environment, folder)
        #: Whether it is going to kill itself.
        self.doomed = any(option.startswith("--die") for option in command)
        #: Whether it has to end because another process uses its instance id.
        self.replaced = False

    @property
    def has_killed_itself(self) -> bool:
        """Whether it is dead as it was told to be: what it would have become before that is never seen."""
        return self.doomed and not self.running and self._process.returncode == -signal.SIGKILL

    def check(self) -> None:
        # First whether it runs: it may die between the two questions.
        if not self.replaced and not self.running and not self.has_killed_itself:
            super().check()

    def new_events(self) -> list[Event]:
        """Return what it has told since this was last asked."""
        with self.history.open("rb") as file:
            file.seek(self._read_to)
            lines = file.read()
        # What kill -9 cut short is no line.
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read_to += len(lines)
        return [json.loads(line) for line in lines.splitlines()]

    def pause(self) -> None:
        """SIGSTOP, to all of its group."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.killpg(self.pid, signal.SIGCONT)


class ConsumerProcess(Participant):
    """``python -m faults.consumer``."""

    def __init__(
        self, name: str, queue: str, options: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        super().__init__(name, ["-m", "faults.consumer", queue, *options], environment, folder)


class WorkerProcess(Participant):
    """``python -m faults.worker``, with a data directory and a web port of its own."""

    def __init__(
        self, name: str, data: Path, options: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.data = data
        self._port = free_port("127.0.0.1")
        own = {
            handling.VARIABLE: str(folder / f"{name}.jsonl"),
            "MARQ_DATA_DIR": str(data),
            "MARQ_WEB_BIND": "127.0.0.1",
            "MARQ_WEB_PORT": str(self._port),
        }
        super().__init__(name, ["-m", "faults.worker", *options], {**own, **environment}, folder)

    def partitions(self) -> dict[int, dict[str, Any]]:
        """The markers partitions that it has; nothing while it does not answer."""
        return {part["partition"]: part for part in self._figures().get("partitions", ())}

    def counts(self, queue: str) -> dict[str, float]:
        """What it counts of a queue; nothing while it does not answer."""
        return dict(self._figures().get("queues", {}).get(queue, {}))

    def _figures(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port}/api/queues?scope=worker"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}
