"""Counters that begin at 0 with the worker and never fall, as Prometheus wants them.

The counters of a lease book are its partition's: they survive restarts and go from worker to worker. If a worker showed
them as they are, its own would jump by all that a partition has ever seen when it takes that over: a rate that nobody
had. So what was counted before a takeover is taken off, and what was counted here stays when the partition goes.

What a former owner had folded and not written is folded, and counted, once more: up to MARQ_FLUSH_INTERVAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from marq.core.rows import Counts

_FIELDS = tuple(each.name for each in fields(Counts))


@dataclass
class _Term:
    """What a partition had counted when it was taken over, and when it was last looked at."""

    before: Mapping[str, Counts]
    last: Mapping[str, Counts]


@dataclass
class Totals:
    """What has happened in each queue while this worker owned the partitions."""

    _past: dict[str, Counts] = field(default_factory=dict)
    _terms: dict[int, _Term] = field(default_factory=dict)

    def note(self, partition: int, before: Mapping[str, Counts], now: Mapping[str, Counts]) -> None:
        """Note a partition's counters; ``before`` is another object after each takeover that recovered the table."""
        term = self._terms.get(partition)
        if term is not None and term.before is before:
            term.last = now
            return
        if term is not None:
            _add(self._past, term)
        self._terms[partition] = _Term(before, now)

    def by_queue(self) -> dict[str, Counts]:
        """Return the counters of each queue."""
        found = {queue: Counts(*_values(counts)) for queue, counts in self._past.items()}
        for term in self._terms.values():
            _add(found, term)
        return found


def _add(sums: dict[str, Counts], term: _Term) -> None:
    nothing = Counts()
    for queue, counts in term.last.items():
        total, before = sums.setdefault(queue, Counts()), term.before.get(queue, nothing)
        for name in _FIELDS:
            setattr(total, name, getattr(total, name) + getattr(counts, name) - getattr(before, name))


def _values(counts: Counts) -> list[int]:
    return [getattr(counts, name) for name in _FIELDS]
