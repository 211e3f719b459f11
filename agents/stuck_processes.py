"""Handler processes that run but process nothing, because their event loop does not run, for pages and commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """The handler process of a ``group``; ``found`` is a sentence without a full stop, and ``blocked_s`` its length."""

    group: str
    queues: frozenset[str]
    blocked_s: float
    found: str
    advice: str


def stuck_processes(workers: Iterable[Mapping[str, Any]]) -> list[StuckProcess]:
    """Return the stuck handler processes of workers: their statistics, each with the worker's ``url``."""
    processes = ((worker["url"], process) for worker in workers for process in worker.get("handlers", ()))
    # A worker of an older version may lack some keys.
    return [_stuck(url, process) for url, process in processes if process.get("pid") and process.get("blocked_seconds")]


def _stuck(url: str, process: Mapping[str, Any]) -> StuckProcess:
    blocked_s, where = process["blocked_seconds"], f"handler process {process['pid']} of {url}"
    return StuckProcess(
        process["group"],
        frozenset(process["queues"]),
        blocked_s,
        f"{process.get('blocked_by') or 'a handler'} has blocked the event loop of {where} for {blocked_s:.0f} s",
        "write the handler as a plain function (def), or run the blocking call with asyncio.to_thread; the log of the"
        " worker shows the stack",
    )
