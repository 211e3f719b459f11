"""What a mutant is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Change = tuple[str, str]


class Mutant(NamedTuple):
    """Replaces texts of modules.

    ``about`` is the hard case or the order of operations that it breaks; ``killed_by`` names checks of
    lab/proof/checker.py and tests/simulation/oracle.py; ``faults`` are those of the worlds that it is put into, and
    ``plan`` has their other settings, if few random worlds would meet it.
    """

    about: str
    name: str
    changes: Mapping[str, Sequence[Change]]
    killed_by: frozenset[str]
    faults: Mapping[str, float] | None = None
    plan: Mapping[str, Any] | None = None

    @property
    def inside(self) -> bool:
        """Whether the checker of histories can't notice the mutant."""
        return self.name in INSIDE or self.killed_by <= TURNS


#: Checks of who has a turn when: no history has all that waited.
TURNS = {"limit", "rate", "priority"}
#: Names of mutants that harm no message: they change only statistics, or rows that are never read.
INSIDE = {
    "a first acquisition counts as a repeated one",
    "the second row of a message outlives it",
    "messages due in the same millisecond are sent in any order",
    "a message that failed its last attempt waits for its backoff",
    "a dropped message counts as cancelled",
}


def mutant(about: str, name: str, module: str, killed_by: str, *changes: Change, **faults: float) -> Mutant:
    """Return a mutant of one module."""
    return Mutant(about, name, {module: changes}, frozenset(killed_by.split()), faults or None)


#: Orders of operations. A comment at each in the code says what the opposite order would lose or duplicate.
MARKER_FIRST = "marker before offset"
CHANGELOG_FIRST = "changelog before acknowledgement"
ONE_TRANSACTION = "copy, fact and row in one transaction"
FENCE_FIRST = "fencing before recovery"
TICK_FIRST = "TICK read back before firing"
ONE_START = "ACQUIRE and offset in one transaction"
ORDERS = (MARKER_FIRST, CHANGELOG_FIRST, ONE_TRANSACTION, FENCE_FIRST, TICK_FIRST, ONE_START)

#: Hard cases, each with a test of its own in test_hard_cases.py.
IDENTITY = "identity"
REOPENING = "reopening"
COALESCING = "coalescing"
LEASE_LOST = "LeaseLost"
FIRING = "firing"
SIZES = "sizes"
UNKNOWN_VERSION = "unknown version"
RETENTION = "retention"
OLD_STATE = "old local state"
SETTINGS = "settings"
READERS = "readers"
GROUPS = "groups"
HOLDER = "holder"
DELAYING = "delay"
CANCELLING = "cancel"
MOVING = "reschedule"
ANSWERING = "answer"
AT_MOST_ONCE = "at most once"
ORDERING = "ordering"
SUBSCRIPTIONS = "subscriptions"
DEDUPLICATION = "deduplication"
KILLERS = "killers"
PURGING = "purge"
LIMITS = "limits"
PRIORITIES = "priorities"
EXPIRY = "expiry"
HARD_CASES = (
    IDENTITY, REOPENING, COALESCING, LEASE_LOST, FIRING, SIZES, UNKNOWN_VERSION, RETENTION, OLD_STATE, SETTINGS,
    READERS, GROUPS, HOLDER, DELAYING, CANCELLING, MOVING, ANSWERING, AT_MOST_ONCE, ORDERING, SUBSCRIPTIONS,
    DEDUPLICATION, KILLERS, PURGING, LIMITS, PRIORITIES, EXPIRY,
)  # fmt: skip

#: And what is not hard, but must be right.
TIME = "time"
ATTEMPTS = "attempts"
FIDELITY = "fidelity"
