"""What the page of a message concludes from markers that are gone, or that it has not read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Self

import pytest

from marq.kafka.records import Records
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.marker_codec import encode
from marq.wire.markers import Ack, Acquire, Payload, Purge, Renew, Source
from marq.wire.names import markers_partition
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard import pages, timeline_reader
from marq_worker.web.dashboard.timeline_reader import TimelineReader

CLIENT = ClientSettings.read("kafka:9092", {"prefix": "marq"}, environment={})
MESSAGES, OFFSET, PARTITIONS = Source("marq.messages", 0), 5, 2
OWN = markers_partition(*MESSAGES, PARTITIONS)
OTHER = 1 - OWN
#: When the message was sent; markers before that are of others.
SENT_MS = 1_000_000
BEFORE_MS = SENT_MS - 120_000

ACQUIRE = encode(
    Acquire("emails", 7, MESSAGES, [OFFSET], 30_000, OFFSET, [Payload(SENT_MS, 1, b"emails", [], b"hello")])
)
ACK = encode(Ack("emails", 7, MESSAGES, [OFFSET]))
RENEW = encode(Renew("emails", 7, MESSAGES, [OFFSET], 30_000))
FOREIGN = encode(Ack("emails", 7, MESSAGES, [OFFSET + 1]))

Marker = tuple[int, bytes]


class Log:
    """Stands in for the log: markers by partition, from a first offset on, read one partition after the other."""

    def __init__(self, markers: Mapping[int, Sequence[Marker]], first: Mapping[int, int]) -> None:
        self.markers = {Source("marq.markers", partition): rows for partition, rows in markers.items()}
        self.first = {source: first.get(source.partition, 0) for source in self.markers}
        self._positions: dict[Source, int] = {}

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def has_topic(self, topic: str) -> bool:
        return topic == MESSAGES.topic

    async def ranges(self, topic: str) -> dict[Source, range]:
        if topic == MESSAGES.topic:
            return {MESSAGES: range(OFFSET + 1)}
        return {
            source: range(self.first[source], self.first[source] + len(rows)) for source, rows in self.markers.items()
        }

    async def offsets_at(self, sources: Collection[Source], time_ms: int) -> dict[Source, int | None]:
        return {
            source: next(
                (
                    self.first[source] + index
                    for index, (at_ms, _) in enumerate(self.markers[source])
                    if at_ms >= time_ms
                ),
                None,
            )
            for source in sources
        }

    async def read(self, ranges: Mapping[Source, range]) -> AsyncIterator[dict[Source, Records]]:
        if MESSAGES in ranges:
            yield {MESSAGES: Records([OFFSET], [SENT_MS], [b"emails"], [b"hello"])}
            return
        for source, span in ranges.items():
            if span:
                rows = [self.markers[source][offset - self.first[source]] for offset in span]
                times, values = zip(*rows, strict=True)
                self._positions[source] = span.stop
                yield {source: Records(list(span), times, [None] * len(rows), values)}

    async def positions(self) -> dict[Source, int]:
        return self._positions


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def read(
        own: Sequence[Marker],
        other: Sequence[Marker] = (),
        since_ms: int | None = None,
        partitions: int = PARTITIONS,
        first: int = 0,
    ) -> dict[str, Any]:
        """Read a page; ``own``: markers of the message's partition, which is read first, from offset ``first`` on."""
        log = Log({OWN: own, OTHER: other}, {OWN: first, OTHER: first})
        monkeypatch.setattr(timeline_reader, "LogReader", log)

        async def consumers(queue: str) -> Mapping[str, str]:
            return {}

        reader = TimelineReader(CLIENT, Definitions(), partitions, Redaction(), consumers)
        story = await reader.message("marq.messages/0/5", "emails", since_ms)
        story |= {"complete": True, "now": None}
        return story | {"status": pages._status(story, None, dead_letters_read=True)}

    return read


async def test_a_message_is_waiting_if_all_markers_since_it_was_sent_were_read_and_none_is_about_it(read: Any) -> None:
    old = (BEFORE_MS, FOREIGN)

    for story in (
        await read([]),
        await read([(SENT_MS, FOREIGN)]),
        # Retention has removed markers, but only such as are older than one that is left.
        await read([old], first=9),
        await read([old, (SENT_MS, FOREIGN)], first=9),
        # The first marker about the message would be in another partition.
        await read([old], [(SENT_MS, FOREIGN)], first=9),
    ):
        assert (story["status"], story["missing"]) == ("waiting", "")


async def test_a_message_that_was_purged_before_a_consumer_acquired_it_is_purged(read: Any) -> None:
    purge, before = [encode(Purge("emails", 7, MESSAGES, [end])) for end in (OFFSET + 1, OFFSET)]
    others = encode(Purge("others", 7, MESSAGES, [OFFSET + 1]))

    assert (await read([(SENT_MS, before), (SENT_MS + 1, others)]))["status"] == "waiting"
    assert (await read([(SENT_MS + 2, purge)]))["status"] == "purged"
    assert (await read([(SENT_MS, ACQUIRE), (SENT_MS + 1, ACK), (SENT_MS + 2, purge)]))["status"] == "acknowledged"


@pytest.mark.parametrize("left", [[], [(SENT_MS + 1, FOREIGN)]])
async def test_the_status_of_a_message_whose_markers_retention_may_have_removed_is_unknown(
    read: Any, left: list[Marker]
) -> None:
    story = await read(left, first=9)

    assert (story["status"], story["missing"]) == ("unknown", "retention has removed markers")


async def test_a_message_whose_last_markers_are_left_has_their_status(read: Any) -> None:
    assert (await read([(SENT_MS + 1, ACK)], first=9))["status"] == "acknowledged"


async def test_the_status_is_unknown_on_a_page_that_starts_after_the_events(read: Any) -> None:
    own = [(BEFORE_MS, FOREIGN), (SENT_MS + 1, ACQUIRE), (SENT_MS + 2, ACK), (SENT_MS + 9, FOREIGN)]

    assert (await read(own))["status"] == "acknowledged"
    story = await read(own, since_ms=SENT_MS + 5)
    assert (story["status"], story["missing"]) == ("unknown", "this page starts after it was sent")


async def test_the_status_is_unknown_if_no_markers_can_be_read(read: Any) -> None:
    story = await read([], partitions=0)

    assert (story["status"], story["missing"]) == ("unknown", "the markers could not be read")


async def test_a_cut_history_continues_before_the_unread_markers_of_every_partition(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = [(SENT_MS + number, FOREIGN) for number in range(10)]
    late = [(SENT_MS + 1_000 + number, FOREIGN) for number in range(10)]

    # The first partition was read to its end, so only the second one has unread markers.
    monkeypatch.setattr(timeline_reader, "MAX_RECORDS", 15)
    assert (await read(late, early))["cut_ms"] == SENT_MS + 4

    # Nothing of the second one was read.
    monkeypatch.setattr(timeline_reader, "MAX_RECORDS", 5)
    story = await read(late, early)
    assert (story["cut_ms"], story["status"]) == (SENT_MS - 60_000, "unknown")


async def test_a_history_of_many_events_continues_at_the_first_one_that_is_not_shown(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_reader, "MAX_EVENTS", 3)
    own = [(SENT_MS, ACQUIRE), *((SENT_MS + number, RENEW) for number in range(1, 4)), (SENT_MS + 9, ACK)]

    story = await read(own)
    assert ([event["kind"] for event in story["events"]], story["cut_ms"]) == (["ACQUIRE", "RENEW"], SENT_MS + 3)
    story = await read(own, since_ms=story["cut_ms"])
    assert [event["kind"] for event in story["events"]] == ["RENEW", "ACK"]
