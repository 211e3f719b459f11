"""The result of a check: violations with the events that show them, and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from lab.proof.history import Event

#: Findings that are kept: a history that is wrong throughout must not fill the memory.
MAX_FINDINGS = 1_000
#: Events that are printed for one finding.
MAX_EVENTS = 60


class Why(IntEnum):
    """Numbers in "Every cause of a duplicate", docs/guarantees.md."""

    KILLED = 1
    LEASE_ENDED = 2
    ACK_TOO_LATE = 3
    ACK_BEHIND_COPY = 4
    NOT_COMMITTED = 5
    ABORTED_COPY = 6
    SENT_AGAIN = 7
    OFFSETS_LOST = 8
    MOVED = 9
    CLOCK = 11
    TAKEN_BY_LATE_MARKER = 13


class Subject(Protocol):
    """Something that a finding is about: its text names it, and the numbers of its events show the finding."""

    @property
    def events(self) -> Sequence[int]: ...


class Finding(NamedTuple):
    """A property that does not hold; ``events`` are numbers of events, from 0."""

    property: str
    text: str
    events: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.property}: {self.text}"


@dataclass
class Report:
    """The result; without violations it is only counts."""

    events: int = 0
    sent: int = 0
    accepted: int = 0
    delivered: int = 0
    acked: int = 0
    dead: int = 0
    acked_and_dead: int = 0
    redelivered: int = 0
    #: Messages that their sender or queue delayed, and cancelled ones, which were delayed or waiting for redelivery.
    delayed: int = 0
    cancelled: int = 0
    #: Messages whose deduplication ids were accepted before: they are dropped.
    deduplicated: int = 0
    #: Messages delivered at most once and never finished; dead letters that were redriven.
    abandoned: int = 0
    redriven: int = 0
    lost: int = 0
    #: Messages that retention removed before a consumer received them; open ones in logs that stopped with an alarm.
    expired_unread: int = 0
    stranded: int = 0
    #: Messages that were dropped or dead-lettered because they had expired.
    message_expired: int = 0
    #: Messages that are delayed past the end of the history.
    waiting: int = 0
    #: Messages that no consumer had acquired when a purge ended them.
    purged: int = 0
    duplicates: int = 0
    #: Dead letters of messages that had one already, without a redrive in between.
    dead_twice: int = 0
    #: Duplicates, leases that ran out, and dead letters of messages that a handler finished, by their cause; for the
    #: last kind, 0 if the history does not show it.
    causes: Counter[int] = field(default_factory=Counter)
    expiries: Counter[int] = field(default_factory=Counter)
    done_and_dead: Counter[int] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def find(
        self, property_: str, subject: Subject | str, text: str, *others: Subject, events: Iterable[int] = ()
    ) -> None:
        """Note that a property does not hold for a subject, as its events, those of others, or further ones show."""
        self.violations[property_] += 1
        if len(self.findings) < MAX_FINDINGS:
            shown = others if isinstance(subject, str) else (subject, *others)
            numbers = {*events, *[number for one in shown for number in one.events]}
            self.findings.append(Finding(property_, f"{subject}: {text}", tuple(sorted(numbers))))

    def summary(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "findings"}
        return {
            name: {str(key): number for key, number in sorted(count.items())} if isinstance(count, Counter) else count
            for name, count in counts.items()
        }


def told(findings: list[Finding], events: Iterable[Event]) -> list[str]:
    """Return each finding with its events, line by line."""
    wanted = {number for finding in findings for number in finding.events}
    found = {number: event for number, event in enumerate(events) if number in wanted}
    lines: list[str] = []
    for finding in findings:
        lines.append(str(finding))
        numbers = [number for number in finding.events if number in found]
        if len(numbers) > MAX_EVENTS:
            lines.append(f"    (the last {MAX_EVENTS} of {len(numbers)} events)")
        lines += [f"    {number}: {json.dumps(found[number], ensure_ascii=False)}" for number in numbers[-MAX_EVENTS:]]
    return lines
