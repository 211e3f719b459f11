"""Purges of a log in memory, whose markers a lease book folds: they end waiting messages, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from marq.admin import purge as purging
from marq.admin.purge import Extent, Purged
from marq.core.lease_book import LeaseBook
from marq.core.storage.rows import State
from marq.core.tracker import Tracker
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.owned_partitions import Owned
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, purge_key, start_key
from marq.settings.skipped_records import SkippedRecords
from marq.wire.errors import BrokerUnavailable, UnknownVersion
from marq.wire.marker_codec import encode
from marq.wire.markers import BLOCKED_MS, Acquire, Batch, Delay, Payload, Release, Source
from tests.unit.client.fake_logs import FakeLogs
from tests.unit.client.fakes import FakeRecord

QUEUE, P0, MARKERS = "emails", Source("marq.messages", 0), Source("marq.markers", 0)
DRAWN = Source(f"~{5:032x}", 0)
HOLDER, OTHER = 7, 8
LEASE_MS = 30_000
T0 = 1_000_000
SETTINGS = ClientSettings.read("localhost:9092", {}, environment={})


class Namespace(FakeLogs):
    """One source, one markers partition, and the definitions: all that a purge reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.log = {P0: [], MARKERS: []}
        self.place = {P0: 0}
        self.definitions = Definitions()
        #: What a purge has published (its in-flight ends) and marked, in order.
        self.steps: list[object] = []
        #: Called before a purge's markers are written.
        self.before_markers: Callable[[], None] = lambda: None

    def fill(self, offsets: range, timestamp_ms: int = 1_000) -> None:
        self.sent(QUEUE, P0, offsets, timestamp_ms)

    def mark(self, value: bytes) -> None:
        offset = len(self.log[MARKERS])
        self.log[MARKERS].append(FakeRecord(offset, None, value, timestamp=T0 + offset))

    def fold(self, batch: Batch) -> None:
        self.mark(encode(batch))

    def consume(self, offsets: range, *, in_order: bool = False) -> None:
        """Acquire and commit records, as a consumer does."""
        payloads = [Payload(1_000, 1, QUEUE.encode(), (), b"v")] * len(offsets)
        self.fold(Acquire(QUEUE, HOLDER, P0, offsets, LEASE_MS, offsets.start, payloads, in_order=in_order))
        self.place[P0] = offsets.stop

    def release(self, offset: int, delay_ms: int = 0) -> None:
        self.fold(Release(QUEUE, HOLDER, P0, [offset], [delay_ms], True, [""]))

    def delay(self, number: int, delay_ms: int) -> None:
        payload = Payload(1_000, 1, QUEUE.encode(), (), b"v")
        self.fold(Delay(QUEUE, OTHER, DRAWN, [number], [delay_ms], True, None, [payload]))

    def tracker(self) -> Tracker:
        tracker = Tracker(self.definitions.settings, 9)
        for record in self.log[MARKERS]:
            tracker.read(record.value, record.timestamp, record.offset)
        return tracker

    @property
    def book(self) -> LeaseBook:
        return self.tracker().book

    def states(self, offsets: Iterable[int], source: Source = P0) -> set[State | None]:
        leases = self.book.open_in(QUEUE, source)
        return {leases[offset].state if offset in leases else None for offset in offsets}

    @property
    def skipped(self) -> SkippedRecords:
        skipped = self.definitions.skipped(QUEUE)
        assert skipped is not None
        return skipped

    def interrupted(self, purge: SkippedRecords) -> None:
        """Publish a purge that has written no marker."""
        self.definitions.fold(purge_key(QUEUE), purge.document())

    # --- the queues topic ---------------------------------------------------------------------------------------------

    async def merge(
        self, what: str, key: bytes, read: Callable[[Definitions], Any], merged: Callable[..., Any]
    ) -> bool:
        document = merged(read(self.definitions) or {})
        self.definitions.fold(key, document)
        self.steps.append(document.get("in_flight", {}))
        return True

    # --- the inspector, and a writer of markers ---------------------------------------------------------------------

    async def owned(self) -> dict[int, Owned]:
        count = len(self.log[MARKERS])
        return {0: Owned(self.tracker(), count - 1, count)}

    async def start(self) -> None: ...

    async def stop(self, limit_s: float) -> None: ...

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        self.before_markers()
        self.steps.append("markers")
        for record in records:
            self.mark(record.value)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    namespace = Namespace()
    monkeypatch.setattr(purging, "KNOWN_S", 0)
    monkeypatch.setattr(purging, "LogReader", lambda settings, committed: namespace)
    monkeypatch.setattr(purging, "Inspector", lambda settings, definitions: namespace)
    monkeypatch.setattr(purging, "cluster_of", lambda settings: SimpleNamespace(writer=lambda topics: namespace))
    monkeypatch.setattr(purging, "ensure_topics", AsyncMock(return_value=Topics(1, 1, 10_000, 10_000)))
    monkeypatch.setattr(purging, "Queues", SimpleNamespace(of=lambda settings: namespace))
    return namespace


async def purge(**options: Any) -> Purged:
    return await purging.purge(SETTINGS, QUEUE, **options)


async def test_a_purge_ends_waiting_messages_and_leaves_those_in_flight(namespace: Namespace) -> None:
    namespace.fill(range(100, 400))
    namespace.consume(range(100, 200))
    namespace.release(100)

    assert await purge() == Purged(waiting=200, redelivery=1)

    assert namespace.states([100]) == {State.CANCELLED}
    assert namespace.states(range(101, 200)) == {State.LEASED}
    # A consumer that does not know of the purge yet acquires in vain, and later messages are tracked.
    namespace.consume(range(200, 410))
    assert namespace.states(range(200, 400)) == {None}
    assert namespace.states(range(400, 410)) == {State.LEASED}
    namespace.release(150)
    assert namespace.states([150]) == {State.RELEASED}


async def test_a_purge_of_messages_in_flight_tells_consumers_when_they_have_ended(namespace: Namespace) -> None:
    namespace.fill(range(5))
    namespace.consume(range(3))

    assert await purge(in_flight=True) == Purged(waiting=2)

    assert namespace.states(range(3)) == {State.CANCELLED}
    # In another order, a consumer could deliver a message that its tracker does not know, or drop one that it does.
    assert namespace.steps == [{}, "markers", {"marq.messages/0": 5}]
    assert [namespace.skipped.has_ended(P0, offset, 1_000) for offset in (4, 5)] == [True, False]


async def test_a_message_that_is_acquired_before_the_markers_is_in_flight(namespace: Namespace) -> None:
    namespace.fill(range(10))
    # By a consumer that does not know of the purge yet.
    namespace.before_markers = lambda: namespace.consume(range(4))

    assert await purge() == Purged(waiting=6)

    assert namespace.states(range(4)) == {State.LEASED}


async def test_a_purge_ends_messages_that_an_interrupted_one_only_made_consumers_skip(namespace: Namespace) -> None:
    namespace.fill(range(100, 400))
    namespace.interrupted(SkippedRecords(5_000, {P0: 200}))
    namespace.consume(range(200, 300))

    assert await purge() == Purged(waiting=200)

    assert namespace.states(range(200, 300)) == {State.LEASED}
    namespace.consume(range(100, 200))
    assert namespace.states(range(100, 200)) == {None}


async def test_messages_that_an_earlier_purge_has_ended_are_not_counted_again(namespace: Namespace) -> None:
    namespace.fill(range(100, 200))
    # Without a consumer, the queue's position stays where it is.
    namespace.place[P0] = 100
    first = await purge()
    namespace.fill(range(200, 210))

    assert (first.waiting, (await purge()).waiting) == (100, 10)


async def test_a_purge_with_an_earlier_extent_lowers_no_end_of_another_one(namespace: Namespace) -> None:
    namespace.fill(range(10))
    earlier = Extent({P0: 4}, {0: T0})
    await purge()

    assert (await purge(extent=earlier, in_flight=True)).total == 0

    assert namespace.skipped.ends == {P0: 10}
    # Messages from 4 on may still be in flight.
    assert namespace.skipped.in_flight == {P0: 4}


async def test_a_purge_ends_only_messages_that_existed_when_it_was_asked_about(namespace: Namespace) -> None:
    namespace.fill(range(10))
    namespace.delay(1, 60_000)
    extent = Extent({P0: 4}, {0: namespace.book.clock.now_ms})
    namespace.delay(2, 60_000)

    assert await purge(extent=Extent.parse(str(extent)), delayed=True) == Purged(waiting=4, delayed=1)

    assert [namespace.states([number], DRAWN) for number in (1, 2)] == [{State.CANCELLED}, {State.DELAYED}]
    namespace.consume(range(10))
    assert namespace.states(range(4)) == {None}
    assert namespace.states(range(4, 10)) == {State.LEASED}


async def test_a_purge_of_old_messages_leaves_those_sent_later(namespace: Namespace) -> None:
    namespace.fill(range(4), timestamp_ms=T0)
    namespace.delay(1, 60_000)
    namespace.delay(2, 60_000)
    namespace.fill(range(4, 10), timestamp_ms=T0 + 1)

    clocks = {0: namespace.book.clock.now_ms}
    extent = await purging.extent_now(SETTINGS, namespace.definitions, QUEUE, clocks, before_ms=T0 + 1)

    assert extent == Extent({P0: 4}, {0: T0})
    assert await purge(extent=extent, delayed=True) == Purged(waiting=4, delayed=1)
    assert [namespace.states([number], DRAWN) for number in (1, 2)] == [{State.CANCELLED}, {State.DELAYED}]


async def test_a_purge_of_messages_older_than_all_ends_none(namespace: Namespace) -> None:
    namespace.fill(range(4), timestamp_ms=T0)

    extent = await purging.extent_now(SETTINGS, namespace.definitions, QUEUE, {0: T0}, before_ms=T0)

    assert extent == Extent({P0: 0}, {0: T0 - 1})
    assert await purge(extent=extent) == Purged()
    assert namespace.skipped.left(P0, 0, T0)


@pytest.mark.parametrize("delayed", [False, True])
async def test_delayed_messages_end_only_on_request(namespace: Namespace, delayed: bool) -> None:
    # The queue is paused. So a message with a deduplication id and without a delay is still with its tracker.
    namespace.delay(1, 0)
    namespace.delay(2, 60_000)
    # The delay of this one ends during the pause.
    namespace.delay(3, 1)
    namespace.delay(4, 60_000)

    assert await purge(delayed=delayed) == Purged(waiting=1, delayed=3 * delayed)

    assert namespace.states([1], DRAWN) == {State.CANCELLED}
    assert namespace.states([2, 3, 4], DRAWN) == {State.CANCELLED if delayed else State.DELAYED}


async def test_of_an_ordered_queue_a_blocking_message_ends_and_one_that_is_retried_does_not(
    namespace: Namespace,
) -> None:
    namespace.definitions.fold(b"change:" + QUEUE.encode(), {"ordering": "key"})
    namespace.fill(range(5))
    namespace.consume(range(3), in_order=True)
    namespace.release(0, BLOCKED_MS)
    namespace.release(1, 5_000)

    assert await purge() == Purged(waiting=2, redelivery=1)

    states = [namespace.states([offset]) for offset in range(3)]
    assert states == [{State.CANCELLED}, {State.WAITING_IN_ORDER}, {State.LEASED_IN_ORDER}]


async def test_a_purge_of_a_recreated_topic_skips_no_later_messages(namespace: Namespace) -> None:
    namespace.interrupted(SkippedRecords(5_000, {P0: 1_000}))
    namespace.fill(range(5))

    await purge()

    assert namespace.skipped.ends == {P0: 5}


async def test_a_purge_counts_even_if_the_clock_that_wrote_the_start_of_the_queue_was_ahead(
    namespace: Namespace,
) -> None:
    ahead = int(time.time() * 1000) + purging.SKEW_MS + 120_000
    namespace.definitions.fold(start_key(QUEUE), SkippedRecords(ahead, {P0: 100}).document())
    namespace.fill(range(100, 500))

    await purge()

    skipped = namespace.skipped
    assert [skipped.left(P0, offset, 1_000) for offset in (99, 100, 499, 500)] == [False, False, False, True]


async def test_messages_of_a_sender_whose_clock_is_far_ahead_are_skipped_too(namespace: Namespace) -> None:
    """The tracker does not know timestamps: it would not redeliver a purged message that a consumer received."""
    newer = int(time.time() * 1000) + 1_000 * purging.SKEW_MS
    namespace.fill(range(5))
    namespace.fill(range(5, 7), timestamp_ms=newer)

    assert (await purge()).waiting == 7

    assert not namespace.skipped.left(P0, 6, newer)


async def test_a_record_of_a_newer_version_stops_a_purge_before_it_changes_anything(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.fill(range(5))
    monkeypatch.setattr(namespace, "owned", AsyncMock(side_effect=UnknownVersion("version 2")))

    with pytest.raises(UnknownVersion):
        await purge()

    assert namespace.steps == []


async def test_a_purge_whose_messages_cannot_be_counted_says_that_they_are_purged(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.fill(range(5))
    namespace.before_markers = lambda: monkeypatch.setattr(
        namespace, "ranges", AsyncMock(side_effect=BrokerUnavailable("no broker"))
    )

    with pytest.raises(BrokerUnavailable, match="its messages are purged, but could not be counted: no broker"):
        await purge()

    namespace.consume(range(5))
    assert namespace.states(range(5)) == {None}
