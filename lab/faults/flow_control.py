"""Whether deliveries in a history kept to the limits of their queue, and were fair to its keys and to lower priorities.

A message runs from its delivery until its handler begins to settle it. The handlers of a killed process have ended, and
those of a paused one may exceed the limits, so neither count any longer (docs/limits.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from lab.proof.history import Event
from marq.settings.limits import Limits, Rate

#: Time over which a rate is counted, and how late a handler may begin after its turn.
RATE_WINDOW_S, LATE_S = 5.0, 1.0
#: How many messages of a busy key wait when it could delay others.
FLOODED = 500


class Peaks(NamedTuple):
    """The most messages at a time: of a key, of a partition, of all processes, and of all since the last rebalance."""

    of_key: int
    of_partition: int
    of_queue: int
    since_rebalance: int


class _Run(NamedTuple):
    key: str
    source: str
    began_ms: float


def exceeded(events: Iterable[Event], queue: str, limits: Limits) -> list[str]:
    """Return how a queue's limits were exceeded by more than docs/limits.md says, or were not even reached."""
    events = sorted(events, key=lambda event: float(event["at_ms"]))
    key_of = _keys(events)
    peaks = peaks_of(events, queue, key_of)
    most = inf if limits.concurrency is None else limits.concurrency
    most_of_key = inf if limits.per_key.concurrency is None else limits.per_key.concurrency
    # During a rebalance, a consumer may still run more than its new share.
    allowed = (most_of_key, most, 2 * most, most)
    found = [
        f"{name}: {seen} ran at a time, {limit} may"
        for name, seen, limit in zip(Peaks._fields, peaks, allowed, strict=True)
        if seen > limit
    ]
    if peaks.of_key < most_of_key < inf:
        found.append(f"no key came to its limit: {peaks}")
    begun: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["op"] == "deliver" and event["queue"] == queue:
            begun["the queue"].append(event["at_ms"] / 1000)
            begun[key_of.get(event["record"], "")].append(event["at_ms"] / 1000)
    for name, begun_s in begun.items():
        rate = limits.rate if name == "the queue" else limits.per_key.rate
        if rate is not None and (text := _too_fast(begun_s, rate)):
            found.append(f"{name}: {text}")
    return found


def peaks_of(events: Iterable[Event], queue: str, key_of: dict[str, str]) -> Peaks:
    """Return the most messages of a queue that ran at a time, from events in the order of time.

    ``key_of`` lacks the records of sends whose outcome is unknown; they do not count.
    """
    running: dict[tuple[str, str], _Run] = {}
    gone, peaks, rebalanced_ms = set[str](), Peaks(0, 0, 0, 0), -inf
    for event in events:
        op, process = event["op"], event["process"]
        if op == "deliver" and event["queue"] == queue and process not in gone and event["record"] in key_of:
            record = event["record"]
            run = _Run(key_of[record], record.rpartition("/")[0], event["at_ms"])
            running[process, record] = run
            runs = running.values()
            now = Peaks(
                sum(other.key == run.key for other in runs),
                sum(other.source == run.source for other in runs),
                len(running),
                sum(other.began_ms > rebalanced_ms for other in runs),
            )
            peaks = Peaks(*map(max, peaks, now))
        elif op in ("ack", "release", "reject") and event["type"] == "invoke":
            for offset in event["offsets"]:
                running.pop((process, f"{event['source']}/{offset}"), None)
        elif op == "revoke":
            rebalanced_ms = event["at_ms"]
        elif op in ("kill", "pause") and event["type"] != "ok":
            if op == "kill":
                gone.add(event["target"])
            running = {place: run for place, run in running.items() if place[0] != event["target"]}
    return peaks


def turns_of_others(events: Iterable[Event], queue: str, key: str, least: int = FLOODED) -> list[int]:
    """Return how many messages of a busy key began while each message of another key waited, until the first fault.

    Only messages count that were sent behind at least this many of that key in their partition. A killed consumer's
    messages of that key stay leased for a while, and compete with no others.
    """
    events = sorted(events, key=lambda event: float(event["at_ms"]))
    key_of = _keys(events)
    waiting, begun, sent_when, counts = Counter[str](), Counter[str](), dict[str, int](), list[int]()
    for event in events:
        if event["op"] in ("kill", "pause"):
            break
        if event["op"] not in ("send", "deliver") or event["type"] != "ok" or event["queue"] != queue:
            continue
        record = event["record"]
        source = record.rpartition("/")[0]
        if event["op"] == "send":
            waiting[source] += key_of[record] == key
            if key_of[record] != key and waiting[source] >= least:
                sent_when[record] = begun[source]
        elif key_of.get(record) == key:
            begun[source] += 1
            waiting[source] -= 1
        elif (before := sent_when.pop(record, None)) is not None:
            counts.append(begun[source] - before)
    # Those that have not begun have waited for at least as many.
    return counts + [begun[record.rpartition("/")[0]] - before for record, before in sent_when.items()]


def passed_by(events: Iterable[Event], queue: str, lower: str) -> list[int]:
    """Return how many messages of a queue each process began in a row, while messages of a lower one waited.

    A run ends when the process begins a message of the lower queue. A message waits from its sending until its first
    delivery, and counts only for messages of its partition.
    """
    waiting, begun = defaultdict[str, set[str]](set), set[str]()
    runs, current = list[int](), Counter[str]()
    for event in sorted(events, key=lambda event: float(event["at_ms"])):
        if event["op"] not in ("send", "deliver") or event["type"] != "ok" or event["queue"] not in (queue, lower):
            continue
        process, record = event["process"], event["record"]
        source = record.rpartition("/")[0]
        if event["op"] == "send":
            if event["queue"] == lower and record not in begun:
                waiting[source].add(record)
        elif event["queue"] == queue:
            current[process] += bool(waiting[source])
        else:
            begun.add(record)
            waiting[source].discard(record)
            runs.append(current.pop(process, 0))
    return [*runs, *current.values()]


def _keys(events: Iterable[Event]) -> dict[str, str]:
    """Return the ordering key of each record that its sender knows."""
    sends = [event for event in events if event["op"] == "send" and event["type"] == "ok"]
    return {event["record"]: event["ordering_key"] for event in sends if "ordering_key" in event}


def _too_fast(begun_s: Sequence[float], rate: Rate) -> str:
    """Return how many more messages began within a window than a rate allows, if any; ``begun_s`` is sorted."""
    allowed = rate.burst() + (RATE_WINDOW_S + LATE_S) / rate.interval_s
    most = max(bisect_left(begun_s, at_s + RATE_WINDOW_S) - index for index, at_s in enumerate(begun_s))
    return f"{most} began within {RATE_WINDOW_S:g} s, {rate} allows {allowed:.0f}" if most > allowed else ""
