"""The lease table of one markers partition on one host's disk, and how it catches up with its changelog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.simulation.log import Partition

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long a compacted changelog remembers a deletion; seven days on a real broker.
DELETE_RETENTION_MS = 1_600
#: Local files that are older may have missed one.
MAX_LOCAL_AGE_MS = DELETE_RETENTION_MS // 2


class LocalTable:
    """The rows, the changelog that they come from (it may have been recreated), and how much of it they contain."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.position = 0
        self.written_ms = 0
        self.changelog: Partition | None = None

    def write(self, changes: Mapping[bytes, bytes | None], position: int, now_ms: int) -> None:
        for key, row in changes.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        self.position = position
        self.written_ms = now_ms

    def discard(self) -> None:
        self.rows = {}
        self.position = 0

    def prepare(self, world: World, changelog: Partition) -> None:
        """Discard the rows if the changelog can't bring them up to date."""
        if self.changelog is not changelog:
            if self.changelog is not None:
                world.stats["changelogs_made_anew"] += 1
            self.discard()
            self.changelog = changelog
        if self.rows and world.now_ms - self.written_ms > MAX_LOCAL_AGE_MS:
            world.stats["old_tables"] += 1
            self.discard()

    def replay(self, changelog: Partition, end: int, now_ms: int) -> None:
        """Read some of the changelog."""
        found = changelog.read(self.position, end, committed=True)
        self.write({record.key or b"": record.value for record in found}, end, now_ms)
