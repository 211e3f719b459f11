"""``python -m lab.demo``: the main job, on an embedded broker or on the one in MARQ_BOOTSTRAP_SERVERS.

Exit code 0: the checker and the data pipeline's audit account for each message. 1: one was lost, the two accounts
differ, or the demo did not keep its own promises. 2: the run or its audit could not be completed, which does not
mean that a message was lost. If the audit failed, the last line has ``"audit": "failed"``. 130: Ctrl-C during the run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lab.audit import Audit, audit
from lab.demo.data_directory import PREFIX, data_directory
from lab.demo.plan import Plan, read_plan
from lab.demo.progress import Display
from lab.demo.report import how_to_retry, show
from lab.demo.result import Result, result_of
from lab.demo.run import Run
from lab.program import RunError
from lab.proof.history import Event
from lab.topics import delete_topics
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.broker import EmbeddedBroker
from marq_worker.broker.embedded import START_LIMIT_SECONDS
from marq_worker.broker.errors import BrokerError

#: Number of events that the checker reads between two updates of the display.
CHECKED_EVENTS = 1_000


@dataclass(frozen=True)
class Account:
    """Results of the demo; ``retry`` says how to repeat a failed audit."""

    result: Result
    events: list[Event]
    audit: Audit | None
    retry: str = ""


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
            account = _run(plan, Path(folder), data, notes)
    except (RunError, BrokerError, MarqError) as error:
        notes.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        notes.print("stopped; processes and files are gone")
        return 130
    # Without a terminal, a fixed width, so that tables are not wrapped.
    console = Console(width=None if sys.stdout.isatty() else 120)
    return show(account.result, account.events, account.audit, data, console, account.retry)


def _run(plan: Plan, folder: Path, data: Path, notes: Console) -> Account:
    with Display(notes, plan.messages) as display, _broker(plan, display) as (servers, broker):
        settings = ClientSettings.read(servers, {"prefix": f"{PREFIX}{secrets.token_hex(4)}"})
        # Checked here, so that a wrong address results in one sentence and not in five processes' logs.
        partitions = asyncio.run(ensure_topics(settings)).markers_partitions
        account = None
        try:
            run = asyncio.run(_play(plan, settings, folder, partitions, display, broker))
            display.phase(f"check the history, {len(run.events):,} events")
            account = Account(_judged(run, plan, display), run.events, None)
            if os.environ.get("SPARK") != "skip":
                shutil.rmtree(data, ignore_errors=True)
                audited = audit(settings, data, run.events, display, plots=True, limit_s=plan.limit_seconds)
                retry = how_to_retry(audited, data, _given_servers(), settings.names.prefix) if audited.failure else ""
                account = replace(account, audit=audited, retry=retry)
            return account
        finally:
            # An audit that failed before it had ingested the topics can be repeated only if they are kept.
            if account is None or account.audit is None or not account.audit.failure or account.audit.ingested:
                _clean_up(settings, display)


async def _play(
    plan: Plan, settings: ClientSettings, folder: Path, partitions: int, display: Display, broker: EmbeddedBroker | None
) -> Run:
    async with Run(plan, settings, folder, partitions, display, broker) as run:
        await run.carry_out()
    return run


def _judged(run: Run, plan: Plan, display: Display) -> Result:
    def watched(events: Iterable[Event]) -> Iterator[Event]:
        for number, event in enumerate(events):
            if not number % CHECKED_EVENTS:
                display.detail(f"checked {number:,} events")
            yield event

    # The check creates no garbage before its end, and garbage collection would take a third of the time.
    gc.disable()
    try:
        return result_of(run.events, run.kills, plan.least_held, run.seconds, watched)
    finally:
        gc.enable()


def _clean_up(settings: ClientSettings, display: Display) -> None:
    if _given_servers():
        failure = asyncio.run(delete_topics(settings))
        if failure is not None:
            display.say(f"warning: {failure}")


@contextmanager
def _broker(plan: Plan, display: Display) -> Iterator[tuple[str, EmbeddedBroker | None]]:
    """Yield the broker's address, and the broker if it is embedded."""
    given = _given_servers()
    if given:
        yield given, None
        return
    display.phase("start the broker")
    broker = EmbeddedBroker()
    try:
        broker.start(max(START_LIMIT_SECONDS, plan.limit_seconds))
        display.say(f"Kafka on {broker.bootstrap_servers}")
        yield broker.bootstrap_servers, broker
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
