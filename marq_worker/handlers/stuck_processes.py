"""Handler processes that take no messages: a handler blocks their event loop, a signal has stopped the process, or an
operator has made it quiet.

Pages and commands show them. Kafka removes a stopped process from its group after the session timeout, so it must not
be taken for a missing worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """The handler process of a ``group``; ``found`` is a sentence without a full stop.

    ``blocked_s``: for how long it has been blocked; it keeps growing while the process is ``stopped``.
    """

    group: str
    queues: frozenset[str]
    blocked_s: float
    stopped: bool
    found: str
    advice: str


def stuck_processes(workers: Iterable[Mapping[str, Any]]) -> list[StuckProcess]:
    """Return the stuck handler processes of workers: their statistics, each with the worker's ``url``."""
    processes = ((worker["url"], process) for worker in workers for process in worker.get("handlers", ()))
    # A worker of an older version may lack some keys.
    return [
        _stuck(url, process)
        for url, process in processes
        if process.get("pid") and (process.get("blocked_seconds") or process.get("stopped"))
    ]


def quiet_workers(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the addresses of workers with a handler process that takes no more messages, as an operator has wanted."""
    # A worker of an older version does not report it.
    return [worker["url"] for worker in workers if any(process.get("quiet") for process in worker.get("handlers", ()))]


def _stuck(url: str, process: Mapping[str, Any]) -> StuckProcess:
    blocked_s, pid = process["blocked_seconds"], process["pid"]
    stopped, where = bool(process.get("stopped")), f"handler process {pid} of {url}"
    queues = frozenset(process["queues"])
    if stopped:
        found = f"{where} was stopped by a signal (SIGSTOP), so no handler of its queues runs"
        advice = f"resume it on that machine with kill -CONT {pid}; after a kill -9 {pid}, its worker starts another"
        return StuckProcess(process["group"], queues, blocked_s, stopped, found, advice)
    return StuckProcess(
        process["group"],
        queues,
        blocked_s,
        stopped,
        f"{process.get('blocked_by') or 'a handler'} has blocked the event loop of {where} for {blocked_s:.0f} s",
        "write the handler as a plain function (def), or run the blocking call with asyncio.to_thread; the log of the"
        " worker shows the stack",
    )
