"""The last 15 minutes of each queue, as this worker's partitions saw it; in memory, a few bytes a sample.

Samples are taken at multiples of SAMPLE_SECONDS of the wall clock, so that those of several workers can be added up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isnan
from typing import Any

from mode import Service

log = logging.getLogger("marq.web")

SAMPLE_SECONDS = 10
KEEP_SECONDS = 15 * 60
SAMPLES = KEEP_SECONDS // SAMPLE_SECONDS
#: Queues with a history of their own: 10 numbers of 4 bytes per sample, 9 MB in all.
MAX_QUEUES = 2_000
#: Share of time to spend on sampling; with many open messages samples become less frequent.
MAX_SHARE = 0.01
#: Samples that may be left out in a row. More are unknown: the worker was suspended.
MAX_SKIPPED = 6
#: Keys of :mod:`agents.statistics`.
SERIES = (
    "waiting",
    "in_flight",
    "waiting_for_delivery",
    "waiting_for_redelivery",
    "waiting_for_dead_letters",
    "arrived_per_second",
    "acquired_per_second",
    "acked_per_second",
    "redelivered_per_second",
    "dead_lettered_per_second",
)
#: The keys that need a backlog counter.
_COUNTED = ("waiting", "arrived_per_second")
#: Stands for a value that is not known.
_UNKNOWN = float("nan")

Statistics = Mapping[str, Mapping[str, float]]


class MetricsHistory:
    """Samples of all queues together (under the empty name), and of each of the first :data:`MAX_QUEUES`."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {"": _Ring()}

    def add(self, slot: int, statistics: Statistics) -> None:
        """Add a sample; ``slot``: seconds since 1970 // :data:`SAMPLE_SECONDS`."""
        for queue, row in statistics.items():
            self._note(queue, slot, row)
        self._rings[""].put(slot, {name: _total(name, statistics) for name in SERIES})
        for queue in [queue for queue, ring in self._rings.items() if queue and slot - ring.last >= SAMPLES]:
            del self._rings[queue]

    def _note(self, queue: str, slot: int, row: Mapping[str, float]) -> None:
        ring = self._rings.get(queue)
        if ring is None:
            if len(self._rings) > MAX_QUEUES or not any(row.get(name) for name in SERIES):
                return
            ring = self._rings[queue] = _Ring()
        ring.put(slot, row)

    def local(self, queue: str, now_slot: int) -> dict[str, Any]:
        """Return the samples of a queue, or of all for an empty name; None for a missing one."""
        slots = range(now_slot - SAMPLES + 1, now_slot + 1)
        ring = self._rings.get(queue)
        series = {name: [None] * SAMPLES if ring is None else ring.series(name, slots) for name in SERIES}
        return {"first_slot": slots.start, "series": series}


def _total(name: str, statistics: Statistics) -> float:
    values = [row[name] for row in statistics.values() if name in row]
    return sum(values) if values or name not in _COUNTED else _UNKNOWN


class _Ring:
    """The samples of one queue, by slot."""

    __slots__ = ("_columns", "_slots", "last")

    def __init__(self) -> None:
        self._slots = array("q", [-1] * SAMPLES)
        self._columns = {name: array("f", [_UNKNOWN] * SAMPLES) for name in SERIES}
        self.last = 0

    def put(self, slot: int, row: Mapping[str, float]) -> None:
        """Add a sample. It ends a short time without one, because sampling took long: for this, the former one counts.

        Otherwise charts would have gaps, and sums with samples of other workers would fall.
        """
        if slot - self.last <= MAX_SKIPPED + 1:
            for skipped in range(self.last + 1, slot):
                self._slots[skipped % SAMPLES] = skipped
                for column in self._columns.values():
                    column[skipped % SAMPLES] = column[self.last % SAMPLES]
        index = slot % SAMPLES
        self._slots[index] = self.last = slot
        for name, column in self._columns.items():
            column[index] = row.get(name, _UNKNOWN)

    def series(self, name: str, slots: range) -> list[float | None]:
        column = self._columns[name]
        known = (self._slots[slot % SAMPLES] == slot and not isnan(column[slot % SAMPLES]) for slot in slots)
        return [column[slot % SAMPLES] if is_known else None for slot, is_known in zip(slots, known, strict=True)]


def add_up(answers: Sequence[Mapping[str, Any]], now_slot: int) -> dict[str, Any]:
    """Add up the samples of several workers; ``times`` in seconds since 1970, None for a missing value."""
    slots = range(now_slot - SAMPLES + 1, now_slot + 1)
    series: dict[str, list[float | None]] = {name: [None] * SAMPLES for name in SERIES}
    for answer in answers:
        shift = answer["first_slot"] - slots.start
        for name, sums in series.items():
            for index, value in enumerate(answer["series"].get(name, ()), shift):
                if value is not None and 0 <= index < SAMPLES:
                    sums[index] = (sums[index] or 0.0) + value
    return {"times": [slot * SAMPLE_SECONDS for slot in slots], "series": series}


class HistorySampler(Service):
    """Takes samples; ``look`` returns the current statistics."""

    def __init__(self, history: MetricsHistory, look: Callable[[], Awaitable[Statistics]]) -> None:
        super().__init__()
        self._history = history
        self._look = look

    @Service.task
    async def _sample(self) -> None:
        while not self.should_stop:
            await asyncio.sleep(SAMPLE_SECONDS - time.time() % SAMPLE_SECONDS)
            began_s = time.perf_counter()
            try:
                self._history.add(slot_now(), await self._look())
            except Exception:  # the next sample may be possible
                log.exception("no sample of the history was taken")
            took_s = time.perf_counter() - began_s
            await asyncio.sleep(max(0.0, took_s / MAX_SHARE - SAMPLE_SECONDS))


def slot_now() -> int:
    return int(time.time()) // SAMPLE_SECONDS
