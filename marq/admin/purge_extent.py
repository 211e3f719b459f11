"""What a purge ends: the messages that existed when it began, in the topic and with the trackers."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from marq.client.backends import require_kafka
from marq.client.receipt import Receipt
from marq.core.storage.rows import HELD, WAITING, LeaseRow, State
from marq.dead_letters.snapshots import Snapshot
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.purged_offsets import read_offsets, written_offsets
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq.wire.names import check_queue_name, is_scheduled, is_synthetic


@dataclass(frozen=True)
class Extent:
    """What existed when the user was asked to confirm a purge: a purge with an extent ends no later messages.

    ``ends`` are the end offsets of the partitions with the queue's records. ``clocks`` are the log's clocks of the
    markers partitions: a delayed message has no record, and existed if its lease began by then. ``dead_letters``,
    if given, is a snapshot of the dead letters.
    """

    ends: Mapping[Source, int]
    clocks: Mapping[int, int]
    dead_letters: Snapshot | None = None

    def __str__(self) -> str:
        return json.dumps({"ends": written_offsets(self.ends), "clocks": self.clocks}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of ``str()``, which has no dead letters; raise ConfigError if the text is not an extent."""
        try:
            document = json.loads(text)
            clocks = {int(partition): int(clock_ms) for partition, clock_ms in document["clocks"].items()}
            return cls(read_offsets(document, "ends"), clocks)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"extent={text[:40]}: not the extent of a purge; get a new one and pass it unchanged"
            ) from error

    def has(self, markers_partition: int, source: Source, number: int, since_ms: int) -> bool:
        """Whether a message existed."""
        if source in self.ends:
            return number < self.ends[source]
        return since_ms <= self.clocks.get(markers_partition, -1)


async def existing_ranges(view: LogReader, sources: Iterable[Source]) -> dict[Source, range]:
    """Return the existing offsets of source partitions; partitions that do not exist are left out."""
    wanted = set(sources)
    return {
        source: span
        for topic in sorted({source.topic for source in wanted})
        for source, span in (await view.ranges(topic)).items()
        if source in wanted
    }


async def extent_now(
    settings: ClientSettings, definitions: Definitions, queue: str, clocks: Mapping[int, int]
) -> Extent:
    """Return the extent of a purge without counting, given the clocks of the trackers; same errors as :func:`purge`."""
    check_purgeable(settings, queue)
    return Extent(await end_offsets(settings, Inspector(settings, definitions), queue), clocks)


async def end_offsets(settings: ClientSettings, inspector: Inspector, queue: str) -> dict[Source, int]:
    """Return the end offsets of the partitions with a queue's records."""
    async with LogReader(settings, committed=False) as view:
        spans = await existing_ranges(view, (await inspector.places([queue]))[queue])
    return {source: span.stop for source, span in spans.items()}


async def held_places(inspector: Inspector, queue: str) -> set[tuple[Source, int]]:
    """Return the places of a queue's messages in flight."""
    return {
        (source, number)
        for content in (await inspector.owned()).values()
        for source, leases in content.tracker.book.leases_by_source()
        for number, lease in leases
        if lease.queue == queue and lease.state in HELD
    }


async def open_messages(
    inspector: Inspector,
    queue: str,
    *,
    delayed: bool,
    in_flight: bool = False,
    extent: Extent | None = None,
    leave: Container[tuple[Source, int]] = (),
) -> tuple[list[tuple[Receipt, str]], dict[int, int]]:
    """Return open messages of a queue, each with its kind, and the trackers' clocks.

    They are those that no consumer holds, and on request those in flight, except those at the places to ``leave``.
    """
    held, clocks = [], {}
    states = {*WAITING, *(HELD if in_flight else ())}
    for partition, content in (await inspector.owned()).items():
        book = content.tracker.book
        clocks[partition] = book.clock.now_ms
        for source, leases in book.leases_by_source():
            if is_scheduled(source.topic):
                # The schedule continues; its next time is not a message yet.
                continue
            for number, lease in leases:
                if lease.queue != queue or lease.state not in states or (source, number) in leave:
                    continue
                if extent is not None and not extent.has(partition, source, number, lease.since_ms):
                    continue
                kind = _kind(lease, source, book.clock.now_ms)
                if in_flight and lease.state is State.WAITING_IN_ORDER:
                    # Too late for a cancellation: its consumer may be about to deliver it again.
                    kind = "in flight"
                if delayed or kind != "delayed":
                    held.append((Receipt(queue, *source, number), kind))
    return held, clocks


def _kind(lease: LeaseRow, source: Source, now_ms: int) -> str:
    if lease.state in HELD:
        return "in flight"
    if lease.state in (State.RELEASED, State.WAITING_IN_ORDER):
        return "redelivery"
    # Messages left with a tracker while the queue was paused are due since they were read. A message without a
    # record waits if its sender did not delay it, because delayed ones also become due during the pause of a purge.
    return "delayed" if lease.due_ms > (lease.since_ms if is_synthetic(source.topic) else now_ms) else "waiting"


def check_purgeable(settings: ClientSettings, queue: str) -> None:
    """Raise ConfigError if the name is wrong or the queue is not on Kafka."""
    check_queue_name(queue)
    require_kafka(settings, "purge", "receive and acknowledge the messages instead")
