"""``python -m lab.demo``: the main job, on an embedded broker or on the one in MARQ_BOOTSTRAP_SERVERS.

Exit code 0: the checker and the data pipeline's audit account for each message. 1: one was lost, the two accounts
differ, or the demo did not keep its own promises. 2: the run or its audit could not be completed, which does not
mean that a message was lost. If the audit failed, the last line has ``"audit": "failed"``. 130: Ctrl-C during the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from lab.audit import HANDLED, Audit, audit
from lab.demo.progress import Display
from lab.demo.report import Account, account_of, how_to_retry, show
from lab.demo.run import DemoPlan, DemoRun, read_plan
from lab.program import RunError
from lab.topics import delete_topics
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError
from marq_worker.broker import EmbeddedBroker
from marq_worker.broker.embedded import START_LIMIT_SECONDS
from marq_worker.broker.errors import BrokerError

#: First part of each run's prefix.
PREFIX = "demo-"
#: Directory of the pipeline's data: the pipeline's own, unless it holds other data.
DATA_VARIABLE, DEFAULT_DATA, OTHER_DATA = "MARQ_PIPELINE_DATA", Path(".marq/pipeline"), Path(".marq/demo")
#: Directory of an embedded broker whose topics were not ingested; it replaces that of a former demo.
KEPT_BROKER = Path(".marq/demo-broker")


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
            account, audited, retry = _run(plan, Path(folder), data, notes)
    except (RunError, BrokerError, MarqError) as error:
        notes.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        notes.print("stopped; processes and files are gone")
        return 130
    # Without a terminal, a fixed width, so that tables are not wrapped.
    console = Console(width=None if sys.stdout.isatty() else 120)
    return show(account, audited, data, console, retry)


def _run(plan: DemoPlan, folder: Path, data: Path, notes: Console) -> tuple[Account, Audit | None, str]:
    """Return the account of a run, its audit, and how to repeat that if it failed."""
    audits = os.environ.get("SPARK") != "skip"
    report = str(data / "report.html") if audits else ""
    with Display(notes, plan.messages, report) as display, _broker(plan, display) as (servers, broker):
        settings = ClientSettings.read(servers, {"prefix": f"{PREFIX}{secrets.token_hex(4)}"})
        # Checked here, so that a wrong address results in one sentence and not in five processes' logs.
        partitions = asyncio.run(ensure_topics(settings)).markers_partitions
        keep = False
        try:
            run = DemoRun(plan, servers, settings.names.prefix, folder, partitions, display, broker)
            asyncio.run(run.carry_out())
            display.phase(f"check the history, {len(run.events):,} events")
            account = account_of(run.events, run.held_at_kill, run.rows_at_kill, plan.least_held, run.seconds)
            if not audits:
                return account, None, ""
            shutil.rmtree(data, ignore_errors=True)
            audited = audit(settings, data, run.events, display, plots=True, limit_s=plan.limit_seconds)
            keep = audited.needs_topics
            retry = _retry(audited, data, servers, settings.names.prefix, broker, display) if audited.failure else ""
            return account, audited, retry
        finally:
            if _given_servers() and not keep and (failure := asyncio.run(delete_topics(settings))):
                display.say(f"warning: {failure}")


@contextmanager
def _broker(plan: DemoPlan, display: Display) -> Iterator[tuple[str, EmbeddedBroker | None]]:
    """Yield the broker's address, and the broker if it is embedded."""
    if servers := _given_servers():
        yield servers, None
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


def _retry(
    audited: Audit, data: Path, servers: str, prefix: str, broker: EmbeddedBroker | None, display: Display
) -> str:
    """Return how to repeat a failed audit; keep the data of an embedded broker if that needs it."""
    if broker is None or not audited.needs_topics:
        return how_to_retry(audited, data, servers, prefix)
    display.phase("keep the broker's data")
    broker.stop()
    try:
        shutil.rmtree(KEPT_BROKER, ignore_errors=True)
        shutil.copytree(broker.data_directory, KEPT_BROKER)
    except OSError as error:
        return f"the broker's data could not be kept in {KEPT_BROKER}: {error}; to try again: make demo"
    return how_to_retry(audited, data, servers, prefix, KEPT_BROKER)


def _given_servers() -> str:
    return os.environ.get("MARQ_BOOTSTRAP_SERVERS", "").strip()


def data_directory() -> Path:
    """Return the directory for this run's data; it replaces a former run's, but no other data."""
    given = os.environ.get(DATA_VARIABLE, "").strip()
    data = Path(given) if given else DEFAULT_DATA
    return data if "://" not in given and (not data.exists() or _is_ours(data)) else OTHER_DATA


def _is_ours(data: Path) -> bool:
    try:
        return str(json.loads((data / "about.json").read_text())["prefix"]).startswith(PREFIX)
    except FileNotFoundError:
        # A demo that stopped before the pipeline's first job has written only the deliveries of its handlers.
        return data.is_dir() and {file.name for file in data.iterdir()} <= {HANDLED}
    except (OSError, ValueError, TypeError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main())
