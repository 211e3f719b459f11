"""The keys whose messages wait for their turns, in queues with limits, fairness or a priority.

Only the consumers know them. Handler processes report them to their worker; pages, commands and metrics add them up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from marq.consumer.ordering import KeyQueues
from marq.consumer.turns import Turns
from marq.settings.limits import key_header
from marq_worker.redaction import HIDDEN, Redaction

#: Keys of one queue to show: those with the most waiting messages. A process tells of this many keys of all queues.
MAX_KEYS, MAX_TOLD_KEYS = 10, 100


def report(
    turns: Turns[KeyQueues], settings: Iterable[str], redaction: Redaction, now_s: float, most: int = MAX_KEYS
) -> dict[str, Any]:
    """Return how many keys of a queue wait and are at a limit, and the busiest of them.

    ``settings`` are all that ``key`` has been, because messages keep the keys that they were read with.
    """
    headers = [key_header(key) for key in sorted(settings)]
    keys: dict[bytes, dict[str, Any]] = {}
    for busy in turns.busy_keys(now_s):
        # The messages of a key may be in several partitions.
        found = {
            "waiting": busy.waiting,
            "running": busy.running,
            "at_limit": busy.at_limit,
            "first_sent_ms": busy.source.timestamp_ms(busy.first),
        }
        _add(keys.setdefault(busy.key, _nothing()), found)
    busiest = heapq.nlargest(most, keys.items(), key=lambda pair: int(pair[1]["waiting"]))
    return {
        "waiting": len(keys),
        "at_limit": sum(total["at_limit"] for total in keys.values()),
        "busiest": [{"key": redaction.ordering_key(key, headers), **total} for key, total in busiest],
    }


def _nothing() -> dict[str, Any]:
    return {"waiting": 0, "running": 0, "at_limit": False, "first_sent_ms": None}


def _add(total: dict[str, Any], found: Mapping[str, Any]) -> None:
    total["waiting"] += found["waiting"]
    total["running"] += found["running"]
    total["at_limit"] |= found["at_limit"]
    times = [sent_ms for sent_ms in (total["first_sent_ms"], found["first_sent_ms"]) if sent_ms is not None]
    total["first_sent_ms"] = min(times, default=None)


def add_up(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the reports of several processes on one queue."""
    told, hidden = list(reports), list[dict[str, Any]]()
    keys: dict[str, dict[str, Any]] = {}
    for key in [key for one in told for key in one["busiest"]]:
        if key["key"] == HIDDEN:
            hidden.append(key)
        else:
            _add(keys.setdefault(key["key"], {"key": key["key"], **_nothing()}), key)
    return {
        "waiting": sum(one["waiting"] for one in told),
        "at_limit": sum(one["at_limit"] for one in told),
        "busiest": heapq.nlargest(MAX_KEYS, [*keys.values(), *hidden], key=lambda key: int(key["waiting"])),
    }


def of_queue(queue: str, workers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all handler processes of some workers report on a queue."""
    processes = [process for worker in workers for process in worker.get("handlers", ())]
    # A worker of an older version has none.
    return add_up([process["keys"][queue] for process in processes if queue in process.get("keys", {})])
