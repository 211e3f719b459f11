"""Whether a queue has messages: they move while they are counted, and none may be missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.storage.rows import LeaseRow, State
from marq.kafka.inspector import Waiting
from marq.queues import definition_log
from marq.queues.definition_log import MAX_SCANNED, KafkaDefinitionLog, UnfinishedMessages
from marq.queues.ordered_changes import refusal
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import schedule_topic, synthetic_topic

TOPIC, SENDER = Source("marq.messages", 0), Source(synthetic_topic(5), 0)
SCHEDULE = Source(schedule_topic("nightly", "0" * 12), 0)
WAITING, FINISHED = "waiting", "finished"


class MovingMessage:
    """Stands for the inspector of a queue with one message, which moves after each look."""

    def __init__(self, *places: str | State, source: Source = TOPIC, complete: bool = True) -> None:
        self._places = list(places)
        #: Where it was at each look.
        self._seen: list[str | State] = []
        self._source = source
        self._complete = complete
        self.ends: Mapping[int, int] | None = None

    def _look(self) -> str | State:
        self._seen.append(self._places.pop(0) if len(self._places) > 1 else self._places[0])
        return self._seen[-1]

    async def waiting(self, queues: Collection[str], limit: int) -> Waiting:
        place = self._look()
        return Waiting(
            Counter({"q": int(place == WAITING)}),
            uncommitted=Counter({"q": int(place == FINISHED)}),
            complete=self._complete,
            ends={TOPIC: 5},
        )

    async def marker_ends(self) -> dict[int, int]:
        return {0: 7}

    async def owned(self, *, ends: Mapping[int, int]) -> dict[int, Any]:
        self.ends, place = ends, self._look()
        leases = [(self._source, 3, LeaseRow(queue, 0, 1, 0, 0, place)) for queue in ("q", "other")
                  if isinstance(place, State)]  # fmt: skip
        return {0: SimpleNamespace(tracker=SimpleNamespace(book=SimpleNamespace(open_leases=lambda: iter(leases))))}

    async def arrived(self, queue: str, ends: Mapping[Source, int]) -> int:
        assert ends == {TOPIC: 5}
        self._look()
        # The record remains when the message moves on.
        return int(WAITING in self._seen[1:])


async def counted(monkeypatch: pytest.MonkeyPatch, message: MovingMessage) -> UnfinishedMessages:
    monkeypatch.setattr(definition_log, "Inspector", lambda settings, definitions: message)
    return await KafkaDefinitionLog(ClientSettings()).messages_of("q", Definitions())


@pytest.mark.parametrize(
    "places",
    [
        [WAITING, State.LEASED_IN_ORDER, State.LEASED_IN_ORDER],
        [State.DELAYED, WAITING, WAITING],
        [State.DELAYED, WAITING, State.LEASED_IN_ORDER],
        [State.RELEASED, WAITING, WAITING],
    ],
)
async def test_a_message_that_moves_is_counted(monkeypatch: pytest.MonkeyPatch, places: list[str | State]) -> None:
    message = MovingMessage(*places)

    found = await counted(monkeypatch, message)

    assert found
    # Its ACQUIRE may be behind an open transaction.
    assert message.ends == {0: 7}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.LEASED_IN_ORDER, UnfinishedMessages(0, 1, 0)),
        (State.WAITING_IN_ORDER, UnfinishedMessages(0, 1, 0)),
        (State.DELAYED, UnfinishedMessages(0, 0, 1)),
    ],
)
async def test_messages_are_counted_by_what_has_to_happen_to_them(
    monkeypatch: pytest.MonkeyPatch, state: State, expected: UnfinishedMessages
) -> None:
    assert await counted(monkeypatch, MovingMessage(state, source=SENDER)) == expected


async def test_the_next_message_of_a_schedule_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await counted(monkeypatch, MovingMessage(State.DELAYED, source=SCHEDULE))


async def test_a_finished_message_counts_until_its_consumer_has_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await counted(monkeypatch, MovingMessage(FINISHED))

    assert found == UnfinishedMessages(0, 0, 0, uncommitted=1)
    assert "can't change yet, because 1 finished messages" in refusal("q", "ordering", found)


async def test_records_that_were_not_read_may_be_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await counted(monkeypatch, MovingMessage("nowhere", complete=False))

    assert found == UnfinishedMessages(0, 0, 0, MAX_SCANNED)
    assert str(found).startswith("more than 200,000 records after its consumers' positions")
