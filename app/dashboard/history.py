"""The last quarter of an hour of each queue, as this worker's partitions saw it; in memory, some bytes a sample.

Samples are taken at multiples of some seconds of the wall clock, so that those of several workers can be added up.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

SAMPLE_SECONDS = 10
KEEP_SECONDS = 15 * 60
SAMPLES = KEEP_SECONDS // SAMPLE_SECONDS
#: Queues that have a history of their own: 8 numbers of 4 bytes in each sample, 6 MB for so many.
MAX_QUEUES = 2_000
#: Sampling counts the open messages; where they are so many that it takes long, it is done less often.
MAX_SHARE = 0.01
#: What is kept: figures of :mod:`agents.statistics`.
SERIES = (
    "in_flight",
    "waiting_for_delivery",
    "waiting_for_redelivery",
    "waiting_for_dead_letters",
    "acquired_per_second",
    "acked_per_second",
    "redelivered_per_second",
    "dead_per_second",
)
_NOTHING = float("nan")

Figures = Mapping[str, Mapping[str, float]]


class History:
    """Samples of all queues together (under the empty name), and of each of the first :data:`MAX_QUEUES`."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {"": _Ring()}

    def add(self, slot: int, figures: Figures) -> None:
        """Note the figures of a moment; ``slot``: seconds since 1970 // :data:`SAMPLE_SECONDS`."""
        total = dict.fromkeys(SERIES, 0.0)
        for queue, row in figures.items():
            for name in SERIES:
                total[name] += row[name]
            self._note(queue, slot, row)
        self._rings[""].put(slot, total)
        for queue in [queue for queue, ring in self._rings.items() if queue and slot - ring.last >= SAMPLES]:
            del self._rings[queue]

    def _note(self, queue: str, slot: int, row: Mapping[str, float]) -> None:
        ring = self._rings.get(queue)
        if ring is None:
            if len(self._rings) > MAX_QUEUES or not any(row[name] for name in SERIES):
                return
            ring = self._rings[queue] = _Ring()
        ring.put(slot, row)

    def local(self, queue: str, now_slot: int) -> dict[str, Any]:
        """Return the samples of a queue, of all of them for an empty name; None where there is none."""
        slots = range(now_slot - SAMPLES + 1, now_slot + 1)
        ring = self._rings.get(queue)
        series = {name: [None] * SAMPLES if ring is None else ring.series(name, slots) for name in SERIES}
        return {"first_slot": slots.start, "series": series}


class _Ring:
    """The samples of one queue, by slot."""

    __slots__ = ("_columns", "_slots", "last")

    def __init__(self) -> None:
        self._slots = array("q", [-1] * SAMPLES)
        self._columns = {name: array("f", [_NOTHING] * SAMPLES) for name in SERIES}
        self.last = 0

    def put(self, slot: int, row: Mapping[str, float]) -> None:
        place = slot % SAMPLES
        self._slots[place] = self.last = slot
        for name, column in self._columns.items():
            column[place] = row[name]

    def series(self, name: str, slots: range) -> list[float | None]:
        column = self._columns[name]
        return [column[slot % SAMPLES] if self._slots[slot % SAMPLES] == slot else None for slot in slots]


def add_up(answers: Sequence[Mapping[str, Any] | None], now_slot: int) -> dict[str, Any]:
    """Add up what several workers keep; ``times`` are seconds since 1970, None of a series: nobody sampled then."""
    slots = range(now_slot - SAMPLES + 1, now_slot + 1)
    series: dict[str, list[float | None]] = {name: [None] * SAMPLES for name in SERIES}
    for answer in answers:
        if answer is None:
            continue
        shift = answer["first_slot"] - slots.start
        for name, sums in series.items():
            for place, value in enumerate(answer["series"].get(name, ()), shift):
                if value is not None and 0 <= place < SAMPLES:
                    sums[place] = (sums[place] or 0.0) + value
    return {"times": [slot * SAMPLE_SECONDS for slot in slots], "series": series}


async def keep(history: History, look: Callable[[], Awaitable[Figures]]) -> None:
    """Take samples, for ever."""
    while True:
        now_s = time.time()
        await asyncio.sleep(SAMPLE_SECONDS - now_s % SAMPLE_SECONDS)
        began_s = time.perf_counter()
        figures = await look()
        history.add(slot_now(), figures)
        took_s = time.perf_counter() - began_s
        await asyncio.sleep(max(0.0, took_s / MAX_SHARE - SAMPLE_SECONDS))


def slot_now() -> int:
    """Return the slot of this moment."""
    return int(time.time()) // SAMPLE_SECONDS
