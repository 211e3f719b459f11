"""``python -m demo``: the main job, on an embedded broker or on the one in MARQ_BOOTSTRAP_SERVERS.

Exit code 0: the checker and the data pipeline's audit account for each message. 1: one was lost, the two accounts
differ, or the demo did not keep its own promises. 2: it could not be completed. 130: Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from demo.data_directory import PREFIX, data_directory
from demo.plan import Plan, read_plan
from demo.progress import Display
from demo.report import show
from demo.result import Result, result_of
from demo.run import Run
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.broker import EmbeddedBroker
from marq_worker.broker.errors import BrokerError
from proof.history import Event
from rig.audit import Audit, audit
from rig.program import RigError
from rig.topics import delete_topics


def main() -> int:
    plan = read_plan(sys.argv[1:])
    # Set explicitly: a shell that starts us in the background leaves SIGINT ignored. SIGTERM is handled the same way.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    # If clients of this process fail, the demo prints the reason once, at its end.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    notes, data = Console(stderr=True), data_directory()
    try:
        with tempfile.TemporaryDirectory(prefix="marq-demo-", ignore_cleanup_errors=True) as folder:
            result, events, audited = _run(plan, Path(folder), data, notes)
    except (RigError, BrokerError, MarqError) as error:
        notes.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        notes.print("stopped; processes and files are gone")
        return 130
    # Without a terminal, a fixed width, so that tables are not wrapped.
    right = show(result, events, audited, data, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if right else 1


def _run(plan: Plan, folder: Path, data: Path, notes: Console) -> tuple[Result, list[Event], Audit | None]:
    with _broker(notes) as (servers, check):
        settings = ClientSettings.read(servers, {"prefix": f"{PREFIX}{secrets.token_hex(4)}"})
        # Checked here, so that a wrong address results in one sentence and not in five processes' logs.
        partitions = asyncio.run(ensure_topics(settings)).markers_partitions
        try:
            with Display(notes, plan.messages) as display:
                run = asyncio.run(_play(plan, settings, folder, partitions, display, check))
            audited = None
            if os.environ.get("SPARK") != "skip":
                shutil.rmtree(data, ignore_errors=True)
                audited = audit(settings, data, run.events, notes.print)
            return result_of(run.events, run.kills, plan.least_held, run.seconds), run.events, audited
        finally:
            _clean_up(settings, notes)


async def _play(
    plan: Plan, settings: ClientSettings, folder: Path, partitions: int, display: Display, check: Callable[[], None]
) -> Run:
    async with Run(plan, settings, folder, partitions, display, check) as run:
        await run.carry_out()
    return run


def _clean_up(settings: ClientSettings, notes: Console) -> None:
    if _given_servers():
        failure = asyncio.run(delete_topics(settings))
        if failure is not None:
            notes.print(f"warning: {failure}", highlight=False)


@contextmanager
def _broker(notes: Console) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the broker's address, and a function that raises if the broker has ended."""
    given = _given_servers()
    if given:
        yield given, lambda: None
        return
    broker = EmbeddedBroker()

    def check() -> None:
        if not broker.running:
            raise RigError(f"the broker is gone:\n{broker.log_tail()}")

    try:
        broker.start()
        notes.print(f"Kafka on {broker.bootstrap_servers}", highlight=False)
        yield broker.bootstrap_servers, check
    finally:
        # Its data is deleted, so it need not shut down cleanly; and a second Ctrl-C must not leave it running.
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)
        broker.kill()
        broker.close()
        signal.signal(signal.SIGINT, former)


def _given_servers() -> str:
    return os.environ.get("MARQ_BOOTSTRAP_SERVERS", "").strip()


if __name__ == "__main__":
    sys.exit(main())
