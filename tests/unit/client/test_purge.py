"""Purges of a log in memory, whose markers a lease book folds: they end waiting messages, and no others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import AsyncMock

import pytest

from marq.admin import purge as purging
from marq.admin.purge_errors import PurgeEnded
from marq.client.receipt import Receipt
from marq.core.lease_book import LeaseBook
from marq.core.storage.rows import State
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.records import Records
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, purge_key, start_key
from marq.settings.purged_offsets import Purge
from marq.wire.errors import BrokerUnavailable, Forbidden, MarqError
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Acquire, Batch, Cancel, Payload, Release, Source
from tests.unit.client.fakes import FakeRecord

QUEUE, P0 = "emails", Source("marq.messages", 0)
HOLDER, OTHER = 7, 8
LEASE_MS = 30_000


class Namespace:
    """One source, the tracker of its markers, and the definitions: all that a purge reads and writes."""

    def __init__(self) -> None:
        self.records: list[FakeRecord] = []
        #: The offset that the queue's consumers have committed.
        self.place = 0
        self.definitions = Definitions()
        self.definitions.fold(b"change:" + QUEUE.encode(), {"paused": True})
        self.book = LeaseBook(self.definitions.settings)
        self.time_ms = 1_000_000
        #: Offsets of leased messages that are not in handlers.
        self.prefetched: list[int] = []
        #: What another purge publishes while this one waits for the pause.
        self.published_in_pause: Purge | None = None

    def fill(self, offsets: range, timestamp_ms: int = 1_000) -> None:
        self.records += [FakeRecord(offset, QUEUE.encode(), timestamp=timestamp_ms) for offset in offsets]

    def fold(self, batch: Batch) -> None:
        self.book.fold(decode(encode(batch)), self.time_ms, self.book.applied + 1)

    def consume(self, offsets: range, from_offset: int | None = None) -> None:
        """Acquire and commit records, as a consumer does."""
        begin = offsets.start if from_offset is None else from_offset
        payloads = [Payload(1_000, 1, QUEUE.encode(), (), b"v")] * len(offsets)
        self.fold(Acquire(QUEUE, HOLDER, P0, offsets, LEASE_MS, begin, payloads))
        self.place = offsets.stop

    def state(self, offset: int) -> State | None:
        lease = self.book.open_in(QUEUE, P0).get(offset)
        return None if lease is None else lease.state

    @property
    def purge(self) -> Purge:
        purge = self.definitions.purge(QUEUE)
        assert purge is not None
        return purge

    # --- the queues topic ---------------------------------------------------------------------------------------------

    def __getitem__(self, queue: str) -> Any:
        return self.definitions.settings(queue)

    async def sync(self, limit_s: float) -> None: ...

    async def pause(self, queue: str) -> None:
        """Let consumers release the messages that they have not given to handlers."""
        if self.published_in_pause is not None:
            interrupted(self, self.published_in_pause)
        if self.prefetched:
            self.fold(
                Release(
                    QUEUE, HOLDER, P0, self.prefetched, [0] * len(self.prefetched), False, [""] * len(self.prefetched)
                )
            )

    async def publish(self, documents: Mapping[bytes, Mapping[str, Any]]) -> None:
        for key, document in documents.items():
            self.definitions.fold(key, document)

    # --- the inspector ------------------------------------------------------------------------------------------------

    async def places(self, queues: Collection[str]) -> dict[str, dict[Source, int]]:
        return {queue: {P0: self.place} for queue in queues}

    async def owned(self, *, incomplete: bool = False) -> dict[int, Any]:
        return {0: SimpleNamespace(tracker=SimpleNamespace(book=self.book))}

    # --- logs ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def ranges(self, topic: str) -> dict[Source, range]:
        return {P0: range(self.records[0].offset, self.records[-1].offset + 1)}

    async def read(self, ranges: Mapping[Source, range]) -> AsyncIterator[dict[Source, Records]]:
        wanted = [record for record in self.records if record.offset in ranges.get(P0, ())]
        if wanted:
            yield {P0: Records.of(wanted)}

    async def start(self) -> None: ...

    async def stop(self, limit_s: float) -> None: ...

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        for record in records:
            self.fold(decode(record.value))

    async def cancel(self, receipts: Sequence[Receipt]) -> list[bool]:
        offsets = sorted(receipt.offset for receipt in receipts)
        self.fold(Cancel(QUEUE, OTHER, P0, offsets))
        return [self.state(receipt.offset) is State.CANCELLED for receipt in receipts]


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    namespace = Namespace()
    monkeypatch.setattr(purging, "PAUSE_KNOWN_S", 0)
    monkeypatch.setattr(purging, "LogReader", lambda settings, committed: namespace)
    monkeypatch.setattr(purging, "Inspector", lambda settings, definitions: namespace)
    monkeypatch.setattr(purging, "cluster_of", lambda settings: SimpleNamespace(writer=lambda topics: namespace))
    return namespace


def use_clients(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "ensure_topics", AsyncMock(return_value=Topics(1, 1, 10_000, 10_000)))
    for client in ("Queues", "Producer"):
        monkeypatch.setattr(purging, client, SimpleNamespace(of=lambda settings: namespace))


async def purge(namespace: Namespace) -> purging.Purged:
    settings = ClientSettings.read("localhost:9092", {}, environment={})
    queues: Any = namespace
    run = purging._Purging(settings, Topics(1, 1, 10_000, 10_000), queues, queues, QUEUE, None, None)
    await run.note_held()
    await run.pause()
    return await run.run(delayed=False, in_flight=False)


def interrupted(namespace: Namespace, purge: Purge) -> None:
    """Publish a purge that has written no marker."""
    namespace.definitions.fold(purge_key(QUEUE), purge.document())


async def test_a_purge_leaves_messages_in_flight_although_an_earlier_one_was_interrupted(namespace: Namespace) -> None:
    namespace.fill(range(100, 400))
    interrupted(namespace, Purge(5_000, {P0: 200}, {P0: 100}))
    # The queue was resumed: its consumers skip the purged records.
    namespace.consume(range(200, 300))

    purged = await purge(namespace)

    assert (purged.waiting, purged.too_late) == (200, 0)
    assert {namespace.state(offset) for offset in range(200, 300)} == {State.LEASED}
    assert {namespace.state(offset) for offset in (*range(100, 200), *range(300, 400))} == {State.CANCELLED}
    namespace.fold(Release(QUEUE, HOLDER, P0, [250], [0], True, [""]))
    assert namespace.state(250) is State.RELEASED


async def test_nor_does_the_next_one_take_them_if_that_purge_is_interrupted_too(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.fill(range(100, 400))
    interrupted(namespace, Purge(5_000, {P0: 200}, {P0: 100}))
    namespace.consume(range(200, 300))
    with monkeypatch.context() as patch:
        patch.setattr(namespace, "write", fail_from(namespace, 300))
        with pytest.raises(ConnectionError):
            await purge(namespace)
    assert namespace.purge.starts == {P0: 300}

    purged = await purge(namespace)

    assert (purged.waiting, purged.too_late) == (100, 0)
    assert {namespace.state(offset) for offset in range(200, 300)} == {State.LEASED}
    assert {namespace.state(offset) for offset in (*range(100, 200), *range(300, 400))} == {State.CANCELLED}


def fail_from(namespace: Namespace, offset: int) -> Any:
    """Return a write that fails for messages from this offset on."""

    async def write(records: Sequence[MarkerRecord], limit_s: float) -> None:
        for record in records:
            batch = decode(record.value)
            assert isinstance(batch, Acquire)
            if batch.offsets[0] >= offset:
                raise ConnectionError
            namespace.fold(batch)

    return write


async def test_a_purge_keeps_records_that_an_interrupted_one_kept_and_consumers_hold(namespace: Namespace) -> None:
    namespace.fill(range(100, 150))
    # Newer than the first purge: consumers received it.
    namespace.fill(range(150, 151), timestamp_ms=5_001)
    namespace.fill(range(151, 200))
    interrupted(namespace, Purge(5_000, {P0: 200}, {P0: 100}))
    namespace.consume(range(150, 151))
    namespace.place = 200

    await purge(namespace)

    assert namespace.state(150) is State.LEASED


async def test_a_purge_leaves_messages_in_flight_that_their_consumer_releases_because_of_the_pause(
    namespace: Namespace,
) -> None:
    namespace.fill(range(100, 400))
    namespace.consume(range(100, 200))
    namespace.fold(Release(QUEUE, HOLDER, P0, [100], [0], True, ["failed"]))
    namespace.prefetched = [150, 151]

    purged = await purge(namespace)

    assert {offset: namespace.state(offset) for offset in (150, 151)} == dict.fromkeys((150, 151), State.RELEASED)
    assert (purged.waiting, purged.redelivery) == (200, 1)


async def test_a_purge_takes_over_from_one_that_goes_on_until_the_queue_is_paused(namespace: Namespace) -> None:
    namespace.fill(range(100, 200))
    interrupted(namespace, Purge(5_000, {P0: 150}, {P0: 100}))
    namespace.published_in_pause = Purge(5_000, {P0: 150})

    # The other one has ended the rest.
    assert (await purge(namespace)).waiting == 50


async def test_messages_that_an_earlier_purge_has_ended_are_not_counted_again(namespace: Namespace) -> None:
    namespace.fill(range(100, 200))
    # Without a consumer, the queue's position stays where it is.
    namespace.place = 100
    first = await purge(namespace)
    namespace.fill(range(200, 210))

    second = await purge(namespace)

    assert (first.waiting, first.too_late) == (100, 0)
    assert (second.waiting, second.too_late) == (10, 0)


async def test_a_purge_that_is_called_again_while_the_queue_is_paused_completes_the_first(namespace: Namespace) -> None:
    namespace.fill(range(100, 300))
    namespace.place = 100
    interrupted(namespace, Purge(5_000, {P0: 200}, {P0: 100}))

    purged = await purge(namespace)

    assert (purged.waiting, purged.too_late) == (200, 0)
    assert namespace.purge.ends == {P0: 300}
    assert namespace.purge.starts == {}


async def test_a_purge_of_a_recreated_topic_skips_no_later_messages(namespace: Namespace) -> None:
    interrupted(namespace, Purge(5_000, {P0: 1_000}))
    namespace.fill(range(5))

    await purge(namespace)

    assert namespace.purge.ends == {P0: 5}
    assert namespace.purge.left(P0, 5, 5_000)


async def test_a_purge_counts_even_if_the_clock_that_wrote_the_start_of_the_queue_was_ahead(
    namespace: Namespace,
) -> None:
    ahead = int(time.time() * 1000) + purging.SKEW_MS + 120_000
    namespace.definitions.fold(start_key(QUEUE), Purge(ahead, {P0: 100}).document())
    namespace.fill(range(100, 500))

    await purge(namespace)

    skipped = namespace.definitions.skipped(QUEUE)
    assert skipped is not None
    assert [skipped.left(P0, offset, 1_000) for offset in (99, 100, 499, 500)] == [False, False, False, True]


async def test_a_purge_that_fails_tells_that_the_queue_is_paused(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would stay paused unnoticed: the next purge finds it paused, and leaves it so."""
    use_clients(namespace, monkeypatch)
    namespace.fill(range(100, 200))
    settings = ClientSettings.read("localhost:9092", {}, environment={})

    async def fail(receipts: Sequence[Receipt]) -> list[bool]:
        raise Forbidden("no worker answered")

    async def resume(receipts: Sequence[Receipt]) -> list[bool]:
        namespace.definitions.fold(b"change:emails", {"paused": False})
        return [True] * len(receipts)

    monkeypatch.setattr(namespace, "cancel", fail)
    with pytest.raises(Forbidden) as told:
        await purging.purge(settings, QUEUE)
    # The SQS endpoint tries again, and knows that the queue was not paused.
    with pytest.raises(Forbidden) as told_the_endpoint:
        await purging.purge(settings, QUEUE, paused_before=False)
    monkeypatch.setattr(namespace, "cancel", resume)
    with pytest.raises(PurgeEnded) as ended:
        await purging.purge(settings, QUEUE)

    assert str(told.value) == "no worker answered; queue 'emails' is paused: purge it again, then resume it"
    assert str(told_the_endpoint.value) == "no worker answered"
    assert str(ended.value).endswith("purge it again to complete it")


@pytest.mark.parametrize("paused", [True, "2100-01-01T00:00:00+00:00"])
async def test_a_purge_of_a_queue_that_marq_toml_pauses_leaves_no_pause_of_its_own(
    paused: bool | str, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_clients(namespace, monkeypatch)
    namespace.definitions.fold(b"change:" + QUEUE.encode(), None)
    namespace.definitions.fold(b"file:" + QUEUE.encode(), {"paused": paused})
    namespace.fill(range(100, 200))
    changed = AsyncMock()
    monkeypatch.setattr(namespace, "change", changed, raising=False)

    purged = await purging.purge(ClientSettings.read("localhost:9092", {}, environment={}), QUEUE)

    assert purged.paused
    changed.assert_awaited_once_with(QUEUE, paused=None)


@pytest.mark.parametrize(
    ("fails", "error", "paused_before", "told"),
    [
        ("pause", BrokerUnavailable, None, "; queue 'emails' may be paused: purge it again, then resume it"),
        # The SQS endpoint tries again.
        ("pause", BrokerUnavailable, False, ""),
        # These fail before the pause is written.
        ("pause", Forbidden, None, ""),
        ("owned", BrokerUnavailable, None, ""),
    ],
)
async def test_a_pause_that_fails_tells_that_it_may_be_in_effect(
    fails: str,
    error: type[MarqError],
    paused_before: bool | None,
    told: str,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_clients(namespace, monkeypatch)
    monkeypatch.setattr(namespace, fails, AsyncMock(side_effect=error("why")))

    with pytest.raises(error) as raised:
        await purging.purge(
            ClientSettings.read("localhost:9092", {}, environment={}), QUEUE, paused_before=paused_before
        )

    assert str(raised.value) == f"why{told}"


async def test_a_message_that_a_purge_keeps_is_tracked_when_a_consumer_receives_it(namespace: Namespace) -> None:
    namespace.fill(range(10, 15))
    newer = int(time.time() * 1000) + 2 * purging.SKEW_MS
    namespace.fill(range(15, 17), timestamp_ms=newer)
    namespace.fill(range(17, 20))

    purged = await purge(namespace)
    namespace.consume(range(15, 17))

    assert (purged.waiting, purged.too_late) == (8, 0)
    assert {namespace.state(offset) for offset in (15, 16)} == {State.LEASED}
    assert {namespace.state(offset) for offset in (*range(10, 15), *range(17, 20))} == {State.CANCELLED}


async def test_a_purge_of_an_ordered_queue_completes_an_interrupted_one(namespace: Namespace) -> None:
    namespace.definitions.fold(b"change:" + QUEUE.encode(), {"paused": True, "ordering": "key"})
    due_ms = namespace.time_ms + 3_600_000
    namespace.fill(range(5, 6))
    namespace.records.append(FakeRecord(6, QUEUE.encode(), headers=[("marq-deliver-at", b"%d" % due_ms)]))
    namespace.fill(range(7, 8))
    # The interrupted purge has acquired 5, and consumers 6, which is delayed, and 7.
    payloads = [Payload(1_000, 1, QUEUE.encode(), (), b"v")] * 2
    namespace.fold(Acquire(QUEUE, OTHER, P0, [5, 6], LEASE_MS, 5, payloads, [due_ms] * 2))
    namespace.fold(Acquire(QUEUE, HOLDER, P0, [7], LEASE_MS, 7, payloads[:1], in_order=True))
    interrupted(namespace, Purge(5_000, {P0: 8}, {P0: 5}))

    await purge(namespace)

    assert {offset: namespace.state(offset) for offset in (5, 6, 7)} == {
        5: State.CANCELLED,
        6: State.DELAYED,
        7: State.LEASED_IN_ORDER,
    }
