"""In which order a transaction of ACQUIREs is made, and how it fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IllegalOperation

from marq.kafka.broker_clock import BrokerClock
from marq.kafka.group_reader import GroupCommit
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.protocol import Generation
from marq.kafka.transactions import MarkerTransactions
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.names import Names


class SlowBroker:
    """A producer whose records are confirmed when the test says so."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.confirmed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent = asyncio.Event()

    async def begin_transaction(self) -> None:
        self.steps.append("begin")

    async def send(self, *_: object, **__: object) -> asyncio.Future[Any]:
        self.steps.append("record")
        self.sent.set()
        return self.confirmed

    async def send_offsets_to_transaction(self, *_: object) -> None:
        self.steps.append("offsets")

    async def commit_transaction(self) -> None:
        self.steps.append("commit")


class EndedTransaction(SlowBroker):
    """A producer that has ended its transaction because of an error."""

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        raise IllegalOperation("not in a transaction")


async def test_a_transaction_that_the_producer_has_ended_is_not_known_to_be_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other errors would end the consumer."""
    broker: Any = EndedTransaction()
    transactions = MarkerTransactions(ClientSettings(names=Names("m")), 1_000_000, "id", BrokerClock())
    abandoned: list[object] = []

    async def running() -> Any:
        return broker

    async def give_up(producer: object) -> None:
        abandoned.append(producer)

    monkeypatch.setattr(transactions, "_running", running)
    monkeypatch.setattr(transactions, "_give_up", give_up)

    commit = GroupCommit("g", Generation(1, "member", None), {}, {}, {})
    with pytest.raises(BrokerUnavailable, match="not in a transaction"):
        await transactions.write([MarkerRecord(0, b"x")], commit, 60)

    assert abandoned == [broker]


async def test_offsets_are_sent_when_the_broker_has_the_records() -> None:
    """Together with the offsets, brokers refused about one record in fifteen for a moment (NOT_ENOUGH_REPLICAS)."""
    broker: Any = SlowBroker()
    clock = BrokerClock(lambda: 0.0)
    transactions = MarkerTransactions(ClientSettings(names=Names("m")), 1_000_000, "id", clock)
    commit = GroupCommit("g", Generation(1, "member", None), {}, {}, {})
    writing = asyncio.create_task(transactions._transact(broker, [MarkerRecord(0, b"x")], commit))
    await broker.sent.wait()
    await asyncio.sleep(0)
    before = list(broker.steps)

    broker.confirmed.set_result(SimpleNamespace(timestamp=1_000, timestamp_type=1))
    await asyncio.wait_for(writing, 60)

    assert before == ["begin", "record"]
    assert broker.steps == ["begin", "record", "offsets", "commit"]
    assert clock.now_ms() == 1_000
