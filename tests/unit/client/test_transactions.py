"""In which order a transaction of ACQUIREs is made."""

from __future__ import annotations

import asyncio
from typing import Any

from marq.kafka.group_reader import GroupCommit
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.protocol import Generation
from marq.kafka.transactions import MarkerTransactions
from marq.settings.client import ClientSettings
from marq.wire.names import Names


class SlowBroker:
    """A producer whose records are confirmed when the test says so."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = asyncio.Event()

    async def begin_transaction(self) -> None:
        self.steps.append("begin")

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        self.steps.append("record")
        self.sent.set()
        return self.confirmed

    async def send_offsets_to_transaction(self, *_: object) -> None:
        self.steps.append("offsets")

    async def commit_transaction(self) -> None:
        self.steps.append("commit")


async def test_offsets_are_sent_when_the_broker_has_the_records() -> None:
    """Together with the offsets, brokers refused about one record in fifteen for a moment (NOT_ENOUGH_REPLICAS)."""
    broker: Any = SlowBroker()
    transactions = MarkerTransactions(ClientSettings(names=Names("m")), 1_000_000, "id")
    commit = GroupCommit("g", Generation(1, "member", None), {}, {}, {})
    writing = asyncio.create_task(transactions._transact(broker, [MarkerRecord(0, b"x")], commit))
    await broker.sent.wait()
    await asyncio.sleep(0)
    before = list(broker.steps)

    broker.confirmed.set_result(None)
    await asyncio.wait_for(writing, 60)

    assert before == ["begin", "record"]
    assert broker.steps == ["begin", "record", "offsets", "commit"]
