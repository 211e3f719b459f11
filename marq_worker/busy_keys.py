"""The keys whose messages wait for their turns, in queues with limits, fairness or a priority.

Only the consumers know them. Handler processes report them to their worker; pages, commands and metrics add them up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from marq.consumer.ordering import KeyQueues
from marq.consumer.turns import Turns
from marq.settings.limits import HEADER_KEY
from marq.wire.names import ORDERING_KEY_HEADER
from marq_worker.redaction import Redaction

#: Keys of one queue to show: those with the most waiting messages. A process tells of this many keys of all queues.
MAX_KEYS, MAX_TOLD_KEYS = 10, 100


def report(
    turns: Turns[KeyQueues], key_setting: str, redaction: Redaction, now_s: float, most: int = MAX_KEYS
) -> dict[str, Any]:
    """Return how many keys of a queue wait and are at a limit, and the busiest of them."""
    keys = turns.busy_keys(now_s)
    header = key_setting.removeprefix(HEADER_KEY) if key_setting.startswith(HEADER_KEY) else ORDERING_KEY_HEADER
    busiest = heapq.nlargest(most, keys, key=lambda key: key.waiting)
    return {
        "waiting": len(keys),
        "at_limit": sum(key.at_limit for key in keys),
        "busiest": [
            {
                "key": redaction.ordering_key(key.key, header),
                "waiting": key.waiting,
                "running": key.running,
                "at_limit": key.at_limit,
                "first_sent_ms": key.source.timestamp_ms(key.first),
            }
            for key in busiest
        ],
    }


def add_up(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the reports of several processes on one queue; the messages of a key may be in several partitions."""
    told = list(reports)
    busiest = [key for each in told for key in each["busiest"]]
    return {
        "waiting": sum(each["waiting"] for each in told),
        "at_limit": sum(each["at_limit"] for each in told),
        "busiest": heapq.nlargest(MAX_KEYS, busiest, key=lambda key: int(key["waiting"])),
    }


def of_queue(queue: str, workers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all handler processes of some workers report on a queue."""
    processes = [process for worker in workers for process in worker.get("handlers", ())]
    # A worker of an older version has none.
    return add_up([process["keys"][queue] for process in processes if queue in process.get("keys", {})])
