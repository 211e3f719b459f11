"""Whether groups that have members have partitions, too: a group in which nobody has one reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.checkup.findings import Finding, problem
from app.checkup.reading import Reader, queues_of
from marq.core.definitions import Definitions
from marq.core.names import Names
from marq.inspector import Waiting


def unassigned(first: Iterable[Reader], second: Iterable[Reader]) -> list[Reader]:
    """Return the groups that had members and no partition at both looks: at one, a rebalance may be under way."""
    before = {reader.group for reader in first if reader.unassigned}
    return [reader for reader in second if reader.unassigned and reader.group in before]


def queues_unassigned(names: Names, definitions: Definitions, groups: Iterable[Reader]) -> list[str]:
    """Return the queues of groups."""
    return [queue for each in groups for queue in queues_of(each.group, names, definitions)]


def judge_assignments(
    names: Names, definitions: Definitions, groups: Sequence[Reader], waiting: Waiting
) -> list[Finding]:
    """Judge groups in which no member has a partition."""
    findings = []
    for each in groups:
        count = sum(waiting.counts[queue] for queue in queues_of(each.group, names, definitions))
        findings.append(
            problem(
                f"group {each.group}",
                f"none of its members ({each.members}) has a partition, so nothing is read; messages waiting: {count:,}"
                f"{'' if waiting.complete else ' or more'}",
                advice="restart its consumers, or the workers for a group of handlers: the group then assigns again",
            )
        )
    return findings
