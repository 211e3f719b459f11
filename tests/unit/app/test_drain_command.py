"""When `marq drain` reports a queue as drained, with counts that need no broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from marq.kafka.inspector import MAX_SCANNED, Waiting
from marq.wire.markers import Source
from marq_worker.commands import purge as command
from marq_worker.commands.open_messages import OpenReport

P0 = Source("marq.messages", 0)
QUEUE = "emails"


class Counting:
    """A queue's unread records: those of other queues first, then its own messages."""

    def __init__(self, foreign: int, own: int) -> None:
        self.foreign, self.own = foreign, own

    async def waiting(self, queues: list[str], limit: int = MAX_SCANNED) -> Waiting:
        end = min(self.foreign + self.own, limit)
        counts = Counter({QUEUE: max(0, end - self.foreign)})
        return Waiting(counts, complete=end == self.foreign + self.own, ends={P0: end})

    async def marker_ends(self) -> dict[int, int]:
        return {}

    async def arrived(self, queue: str, ends: Mapping[Source, int]) -> int:
        return self.foreign + self.own - ends[P0]


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the workers answer."""
    answer: dict[str, Any] = {"complete": True}

    async def opened(*_: object) -> OpenReport:
        return OpenReport(**answer)

    monkeypatch.setattr(command, "opened", opened)
    return answer


def draining(counting: Counting) -> command.Draining:
    return command.Draining(None, counting, QUEUE)  # type: ignore[arg-type]


def said(draining: command.Draining) -> str:
    return command._said(
        {
            "queue": QUEUE,
            "drained": False,
            "waiting_complete": draining.waiting_complete,
            "open_complete": draining.open_complete,
            **draining.found,
        }
    )


async def test_a_queue_behind_many_records_of_others_is_drained() -> None:
    assert await draining(Counting(foreign=3 * MAX_SCANNED, own=0)).look()


async def test_a_message_behind_many_records_of_others_is_found() -> None:
    looks = draining(Counting(foreign=3 * MAX_SCANNED, own=1))

    assert not await looks.look()
    assert said(looks) == "queue 'emails': not drained: 1 waiting, 0 in flight, 0 delayed"


async def test_a_large_backlog_is_not_counted_to_its_end() -> None:
    looks = draining(Counting(foreign=0, own=3 * MAX_SCANNED))

    assert not await looks.look()
    assert "at least 1,000,000 waiting" in said(looks)


async def test_a_worker_that_did_not_respond_is_named_as_the_reason(workers: dict[str, Any]) -> None:
    workers["complete"] = False
    looks = draining(Counting(foreign=0, own=0))

    assert not await looks.look()
    assert "incomplete: a worker did not respond" in said(looks)
