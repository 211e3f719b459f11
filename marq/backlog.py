"""Records that were fetched and are not acquired yet.

They are nobody's: no lease, no commit. So the flow may read far more than it has room for, which matters where most
records of a topic belong to other queues, and still never holds more messages than it may.
"""

from __future__ import annotations

from collections.abc import Mapping

from marq.core.markers import Source
from marq.records import Records
from marq.serving import Serving


class Backlog:
    """Per source partition, in order; ``serving`` says which records are ours."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._records: dict[Source, Records] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def count(self) -> int:
        """How many records, whosoever they are."""
        return sum(map(len, self._records.values()))

    def put(self, records: Mapping[Source, Records]) -> None:
        """Add what follows on the records that are there."""
        for source, read in records.items():
            before = self._records.get(source)
            self._records[source] = Records.joined([before, read]) if before is not None else read

    def clear(self) -> dict[Source, int]:
        """Forget all; return where reading must go on to find it again."""
        starts = {source: read.offsets[0] for source, read in self._records.items()}
        self._records = {}
        return starts

    def cut(self, room: int) -> dict[Source, Records]:
        """Take out records with at most ``room`` messages of ours, and the others between and after them."""
        taken: dict[Source, Records] = {}
        left: dict[Source, Records] = {}
        for source, read in self._records.items():
            count = len(read)
            end = count if count <= room else self._serving.end(source, read, room)
            if end:
                taken[source] = read if end == count else read[:end]
                room -= end if end == count <= room else self._serving.count(source, taken[source])
            if end < count:
                left[source] = read[end:]
        self._records = left
        return taken
