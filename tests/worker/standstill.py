"""Ways to stall a real worker: each replaces something in its process, when a file says so.

``site_folder`` makes what a worker's PYTHONPATH needs for it. Names are imported when the order comes, and not before:
the process has them by then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREVER_SECONDS = 3_600.0
_POLL_SECONDS = 0.05


def event_loop() -> None:
    """Code that blocks has got into the worker's event loop."""
    from marq_worker.app import app

    app.loop.call_soon_threadsafe(time.sleep, FOREVER_SECONDS)


def fetch() -> None:
    """The Kafka consumer's thread stays in its group and fetches no more."""
    from marq_worker.transport.batch_transport import BatchThread

    BatchThread._fetch_records = _hang


def fold() -> None:
    """An owner does not come back from folding."""
    from marq_worker.owner.ownership import Ownership

    Ownership._read = _hang


def rebalance() -> None:
    """The listener for revoked partitions never returns."""
    from marq_worker.owner.tracker_owners import TrackerOwners

    TrackerOwners.revoked = _hang


def handlers_fetch() -> bool:
    """The consumer of a handler process fetches no more; the worker itself is not meant."""
    from marq.kafka import group_reader
    from marq_worker.app import app
    from marq_worker.app.handlers_app import HandlersApp

    meant = isinstance(app, HandlersApp)
    if meant:
        group_reader.fetch_records = _hang  # type: ignore[assignment]
    return meant


def handlers_rebalance() -> bool:
    """A handler process never gets out of a rebalance; the worker itself is not meant."""
    from marq.consumer.receiver import Receiver
    from marq_worker.app import app
    from marq_worker.app.handlers_app import HandlersApp

    meant = isinstance(app, HandlersApp)
    if meant:
        Receiver.revoked = _hang  # type: ignore[method-assign]
    return meant


async def _hang(*_: Any, **__: Any) -> None:
    await asyncio.sleep(FOREVER_SECONDS)


def site_folder(directory: Path) -> Path:
    """Make a folder for PYTHONPATH: :func:`stand_still` stalls processes that use it."""
    folder = directory / "site"
    folder.mkdir()
    order = directory / "order"
    (folder / "sitecustomize.py").write_text(
        f"import tests.worker.standstill\ntests.worker.standstill.obey({str(order)!r})\n"
    )
    return folder


def stand_still(directory: Path, how: Callable[[], object]) -> None:
    """Give the order; it is followed within moments."""
    written = directory / "order.new"
    written.write_text(how.__name__)
    written.rename(directory / "order")


def take_back(directory: Path) -> None:
    """Take the order away, for processes that begin later."""
    (directory / "order").unlink()


def is_obeyed(directory: Path) -> bool:
    """Whether it was followed."""
    return (directory / "order.obeyed").exists()


def obey(order: str) -> None:
    """Wait for the order, in a worker's process."""

    def wait() -> None:
        path = Path(order)
        while not path.exists():
            time.sleep(_POLL_SECONDS)
        if globals()[path.read_text()]() is not False:
            path.with_name("order.obeyed").touch()

    threading.Thread(target=wait, daemon=True).start()
