"""Which records a replay delivers again, from a log in memory and the leases of a tracker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from marq.admin import replay as replaying
from marq.admin.replay import Start
from marq.core.lease_book import LeaseBook
from marq.kafka.records import Records
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, start_key
from marq.settings.skipped_records import SkippedRecords
from marq.wire.large_messages import left_out
from marq.wire.marker_codec import decode
from marq.wire.markers import Ack, Acquire, Delay, Payload, Source
from tests.unit.client.fake_logs import FakeLogs
from tests.unit.client.fakes import FakeRecord

SETTINGS, TOPICS = ClientSettings.read("localhost:9092", {}, environment={}), Topics(6, 1, 10_000, 10_000)
QUEUE, OWN_TOPIC = "emails", "shop-orders"
P3, P5, OWN = Source("marq.messages", 3), Source("marq.messages", 5), Source(OWN_TOPIC, 0)


class Namespace(FakeLogs):
    """A queue with its open messages."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions = Definitions()
        self.book = LeaseBook(self.definitions.settings)

    def redelivered(self, source: Source, offset: int, identity: str) -> None:
        """Add the redelivery of a message."""
        headers = [("marq-id", identity.encode()), ("marq-attempt", b"2")]
        self.log.setdefault(source, []).append(FakeRecord(offset, QUEUE.encode(), headers=headers))

    def acquire(self, source: Source, offset: int) -> None:
        payload = Payload(1_000, 2, QUEUE.encode(), (), b"v")
        self.book.fold(Acquire(QUEUE, 7, source, [offset], 30_000, offset, [payload]), 1, self.book.applied + 1)

    async def owned(self) -> dict[int, Any]:
        return {0: SimpleNamespace(tracker=SimpleNamespace(book=self.book))}


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    namespace = Namespace()
    monkeypatch.setattr(replaying, "LogReader", lambda settings, committed: namespace)
    return namespace


async def written(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, Delay]:
    """Return the marker that a replay of all writes, and what it says."""
    writer = AsyncMock()
    monkeypatch.setattr(replaying, "cluster_of", lambda settings: SimpleNamespace(writer=lambda topics: writer))
    replay = replaying._Replaying(SETTINGS, TOPICS, cast("Any", namespace), namespace.definitions, QUEUE, "id")
    await replay.look(Start(0))
    await replay.write(None)
    [[marker]] = [call.args[0] for call in writer.write.await_args_list]
    delay = decode(marker.value)
    assert isinstance(delay, Delay)
    return marker.value, delay


async def replayed(namespace: Namespace, start: Start) -> replaying.Replayed:
    replay = replaying._Replaying(SETTINGS, TOPICS, cast("Any", namespace), namespace.definitions, QUEUE, "id")
    await replay.look(start)
    return replay.totals


@pytest.mark.parametrize(
    ("place", "acquired", "messages"),
    [(5, None, 2), (9, 5, 2), (8, 2, 3)],
    ids=["its redelivery waits", "its redelivery is in flight", "it has ended"],
)
async def test_a_replay_of_one_partition_leaves_out_a_message_that_is_unfinished_in_another(
    namespace: Namespace, place: int, acquired: int | None, messages: int
) -> None:
    namespace.sent(QUEUE, P3, range(10, 13))
    namespace.sent(QUEUE, P5, range(5))
    namespace.redelivered(P5, 5, "marq.messages/3/11")
    namespace.sent(QUEUE, P5, range(6, 9))
    namespace.place = {P3: 13, P5: place}
    if acquired is not None:
        namespace.acquire(P5, acquired)

    totals = await replayed(namespace, Start(place=(P3, 10)))

    assert (totals.messages, totals.unfinished, totals.earlier_records) == (messages, 3 - messages, 0)


async def test_a_replay_leaves_out_records_from_before_the_start_of_the_queue(namespace: Namespace) -> None:
    namespace.definitions.fold(b"change:" + QUEUE.encode(), {"topic": OWN_TOPIC, "start": "latest"})
    namespace.definitions.fold(start_key(QUEUE), SkippedRecords(5_000, {OWN: 7}).document())
    namespace.sent(QUEUE, OWN, range(10))
    namespace.place = {OWN: 10}

    for start in (Start(0), Start(place=(OWN, 2))):
        assert (await replayed(namespace, start)).messages == 3


async def test_a_replay_drops_headers_that_do_not_fit_into_markers(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = [("n" * 70_000, b"1"), ("own", b"x")]
    namespace.log[P3] = [FakeRecord(10, QUEUE.encode(), headers=headers), FakeRecord(11, QUEUE.encode())]
    namespace.place = {P3: 12}

    _, delay = await written(namespace, monkeypatch)

    assert [[name for name, _ in payload.headers] for payload in delay.payloads] == [
        ["own", "marq-replayed-from", "marq-expires-at"],
        ["marq-replayed-from", "marq-expires-at"],
    ]


async def test_a_message_that_does_not_fit_into_a_marker_stops_no_replay(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.log[P3] = [FakeRecord(10, QUEUE.encode(), b"0" * 20_000), FakeRecord(11, QUEUE.encode(), b"small")]
    namespace.place = {P3: 12}

    value, delay = await written(namespace, monkeypatch)

    assert len(value) < TOPICS.markers_limit_bytes
    assert [payload.value for payload in delay.payloads] == [None, b"small"]
    assert left_out(delay.payloads[0]).startswith("marq.messages/3/10 has ")


async def test_a_replay_of_an_ordered_queue_includes_finished_messages_behind_unfinished_ones(
    namespace: Namespace,
) -> None:
    namespace.definitions.fold(b"change:" + QUEUE.encode(), {"ordering": "key"})
    namespace.sent(QUEUE, P3, range(103))
    payloads = [Payload(1_000, 1, QUEUE.encode(), (), b"v")] * 99
    for offsets in (range(99), range(100, 101)):
        some = payloads[: len(offsets)]
        acquire = Acquire(QUEUE, 7, P3, offsets, 30_000, offsets.start, some, in_order=True)
        namespace.book.fold(acquire, 1, namespace.book.applied + 1)
    finished = [offset for offset in (*range(99), 100) if offset != 10]
    namespace.book.fold(Ack(QUEUE, 7, P3, finished), 1, namespace.book.applied + 1)
    # The position of the queue is its first unfinished message. No consumer has acquired 99, 101 and 102 yet.
    namespace.place = {P3: 10}

    totals = await replayed(namespace, Start(0))

    assert (totals.messages, totals.unfinished) == (99, 2)


async def test_a_replayed_message_keeps_the_headers_by_which_its_sender_chose_its_handler_and_its_line() -> None:
    kept = [("marq-type", b"welcome"), ("marq-ordering-key", b"k"), ("tenant", b"a")]
    record = FakeRecord(1, QUEUE.encode(), headers=[("marq-attempt", b"2"), *kept])
    replay = replaying._Replaying(SETTINGS, TOPICS, cast("Any", None), Definitions(), QUEUE, "id")

    payload = replay._payload(P3, Records.of([record])[0])

    own = [("marq-replayed-from", b"marq.messages/3/1"), ("marq-expires-at", b"never")]
    assert list(payload.headers) == [*kept, *own]
