"""Reads the open messages of markers partitions from outside, without their owners.

It folds the changelog and the markers that follow it, as a tracker does when it takes a partition over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from marq.core.deliveries.dead_letter_records import text_of
from marq.core.storage import rows
from marq.core.tracker import Tracker
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Row
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import UnknownVersion
from marq.wire.markers import Source
from marq.wire.record_headers import record_id

#: Limit for a book's changed rows in memory while markers are folded.
_PENDING_ROWS = 50_000


class Unknown(NamedTuple):
    """A marker record of a newer version, which stops its partition."""

    offset: int
    timestamp_ms: int
    value: bytes
    #: The reason why it is unreadable.
    error: str


@dataclass(frozen=True)
class Owned:
    """The content of a markers partition's changelog and markers.

    ``behind`` is the number of markers after the changelog, without Kafka's control records. ``owner`` is the name of
    the last writer of its rows, or ""; ``written_ms`` the log's clock then. ``unknown`` is the record before which an
    owner of this version stops; no later record is folded.
    """

    tracker: Tracker
    applied: int
    end: int
    behind: int = 0
    owner: str = ""
    written_ms: int | None = None
    unknown: Unknown | None = None


async def owned_partitions(
    settings: ClientSettings,
    definitions: Definitions,
    progress: Callable[[int, int], None] | None = None,
    *,
    incomplete: bool = False,
    ends: Mapping[int, int] | None = None,
) -> dict[int, Owned]:
    """Return the content of each markers partition.

    ``incomplete``: if a record of a newer version stops a partition, return the content before that record. ``ends``:
    read each partition at least to this offset, even if an open transaction must end first.

    Raises BrokerUnavailable if a topic could not be read; UnknownVersion if a record of a newer version stops a
    partition, and ``incomplete`` is False.
    """
    async with LogReader(settings, committed=True) as view:
        changelog = await view.ranges(settings.names.changelog)
        markers = await view.ranges(settings.names.markers)
        tables, writers = await _tables(view, changelog, progress)
        found = {}
        for source, span in markers.items():
            number, end = source.partition, max(span.stop, (ends or {}).get(source.partition, 0))
            tracker = Tracker(definitions.settings, holder=0, ordered=partial(definitions.quarantine, number))
            tracker.book.restore(sorted(tables.pop(number, {}).items()))
            applied, behind, unknown = tracker.book.applied, 0, None
            async for fetched in view.read({source: range(max(applied + 1, span.start), end)}):
                for row in fetched.get(source, ()):
                    behind += 1
                    if unknown is None:
                        unknown = _read(tracker, row)
                    if tracker.book.pending_rows > _PENDING_ROWS:
                        tracker.book.take_changes()
            if unknown is not None and not incomplete:
                raise UnknownVersion(
                    f"record {record_id(source, unknown.offset)} stops its partition: {unknown.error}, so its open"
                    " messages are unknown: `marq quarantine` shows what to do"
                )
            owner, written_ms = writers.get(number, ("", None))
            found[number] = Owned(tracker, applied, end, behind, owner, written_ms, unknown)
    return found


async def _tables(
    view: LogReader, changelog: Mapping[Source, range], progress: Callable[[int, int], None] | None
) -> tuple[dict[int, dict[bytes, bytes]], dict[int, tuple[str, int]]]:
    """Return the rows of each partition, without payloads, and its last writer."""
    tables: dict[int, dict[bytes, bytes]] = {source.partition: {} for source in changelog}
    writers: dict[int, tuple[str, int]] = {}
    scanned, total = 0, sum(map(len, changelog.values()))
    async for fetched in view.read(changelog):
        for source, read in fetched.items():
            table = tables[source.partition]
            for row in read:
                _take_row(table, row)
                if row.key == rows.APPLIED_KEY:
                    writers[source.partition] = (text_of(row.headers, rows.OWNER_HEADER), row.timestamp)
            scanned += len(read)
        if progress is not None:
            progress(scanned, total)
    return tables, writers


def _read(tracker: Tracker, row: Row) -> Unknown | None:
    try:
        tracker.read(row.value, row.timestamp, row.offset)
    except UnknownVersion as error:
        return Unknown(row.offset, row.timestamp, row.value or b"", str(error))
    return None


def _take_row(table: dict[bytes, bytes], row: Row) -> None:
    if row.key is None or row.key == rows.IDENTITY_KEY:
        return
    if row.value is None:
        table.pop(row.key, None)
    else:
        table[row.key] = rows.encoded_lease(row.value) if row.key.startswith(b"r") else row.value


def open_counts(owned: Iterable[Owned]) -> dict[str, dict[str, int]]:
    """Return the numbers of open messages of each queue, under the names on the workers' pages."""
    totals: dict[str, Counter[str]] = {}
    for content in owned:
        for queue, gauge in content.tracker.book.gauges().items():
            counts = totals.setdefault(queue, Counter())
            counts["in_flight"] += gauge.in_flight
            counts["waiting_for_redelivery"] += gauge.released
            counts["waiting_for_dead_letters"] += gauge.rejected
            counts["waiting_for_delivery"] += gauge.delayed
    return {queue: {name: counts[name] for name in OPEN} for queue, counts in totals.items()}


#: The kinds of open messages.
OPEN: Sequence[str] = ("in_flight", "waiting_for_delivery", "waiting_for_redelivery", "waiting_for_dead_letters")
