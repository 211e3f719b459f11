"""``python -m demo``: the main job, on an embedded broker or on that of MARQ_BOOTSTRAP_SERVERS.

Exit code 0: each message is accounted for, by the demo and by the data pipeline's audit. 1: one was lost, the two
accounts differ, or the demo could not do what it promises. 2: it could not
be carried through. 130: Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from broker import EmbeddedBroker
from broker.errors import BrokerError
from demo.audit import PREFIX, Audit, audit
from demo.cleanup import delete_topics
from demo.errors import DemoError
from demo.plan import Plan, read_plan
from demo.processes import Cast
from demo.progress import Display
from demo.report import show
from demo.run import Result, Run
from marq.core.errors import MarqError
from marq.settings import ClientSettings
from marq.topics import ensure_topics

#: The least that brokers allow by default: what a killed process had goes to others after this.
SESSION_SECONDS = 6.0


def main() -> int:
    plan = read_plan(sys.argv[1:])
    # Explicitly: a shell that starts us in the background leaves SIGINT ignored, and SIGTERM takes the same way.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    # What the clients of this process meet is said once, as the reason why the demo ends.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    notes = Console(stderr=True)
    try:
        with tempfile.TemporaryDirectory(prefix="marq-demo-", ignore_cleanup_errors=True) as folder:
            result, audited = _run(plan, Path(folder), notes)
    except (DemoError, BrokerError, MarqError) as error:
        notes.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        notes.print("stopped; processes and files are gone")
        return 130
    # A width of its own where there is no terminal, so that no table is folded.
    right = show(result, audited, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if right else 1


def _run(plan: Plan, folder: Path, notes: Console) -> tuple[Result, Audit]:
    with _broker(notes) as (servers, check):
        settings = ClientSettings.read(servers, {"prefix": f"{PREFIX}{secrets.token_hex(4)}"})
        environment = {
            "MARQ_BOOTSTRAP_SERVERS": servers,
            "MARQ_PREFIX": settings.names.prefix,
            "MARQ_SESSION_TIMEOUT": f"{SESSION_SECONDS:g}",
        }
        # Here, so that an address where no broker is gets one sentence, not five processes' logs.
        asyncio.run(ensure_topics(settings))
        try:
            with Display(notes, plan.messages) as display, Cast(plan, environment, folder) as cast:
                result = asyncio.run(Run(plan, settings, cast, display, check).play())
            names = settings.names
            return result, audit(servers, names.prefix, names.messages, result.tally.journals, notes.print)
        finally:
            _clean_up(settings, notes)


def _clean_up(settings: ClientSettings, notes: Console) -> None:
    if _given_servers():
        failure = asyncio.run(delete_topics(settings))
        if failure is not None:
            notes.print(f"warning: {failure}", highlight=False)


@contextmanager
def _broker(notes: Console) -> Iterator[tuple[str, Callable[[], None]]]:
    """The broker's address, and a function that raises when it is gone."""
    given = _given_servers()
    if given:
        yield given, lambda: None
        return
    broker = EmbeddedBroker()

    def check() -> None:
        if not broker.running:
            raise DemoError(f"the broker is gone:\n{broker.log_tail()}")

    try:
        broker.start()
        notes.print(f"Kafka on {broker.bootstrap_servers}", highlight=False)
        yield broker.bootstrap_servers, check
    finally:
        # Its data is thrown away, so it need not write it first; and a second Ctrl-C must not leave it behind.
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)
        broker.kill()
        broker.close()
        signal.signal(signal.SIGINT, former)


def _given_servers() -> str:
    return os.environ.get("MARQ_BOOTSTRAP_SERVERS", "").strip()


if __name__ == "__main__":
    sys.exit(main())
