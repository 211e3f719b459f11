"""How an owner's transaction fails."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.errors import ProducerFenced

from marq.owner.transaction_content import Write
from marq.wire.markers import Tick
from marq.wire.names import Names
from marq_worker.agents.partition_writer import PartitionWriter


class FencedProducer:
    """Takes records, and fails each on its own, as aiokafka does when another producer has the transactional id."""

    def __init__(self) -> None:
        self.sent: list[asyncio.Future[None]] = []

    async def begin_transaction(self) -> None: ...

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        self.sent.append(asyncio.get_running_loop().create_future())
        if len(self.sent) == 3:
            for future in self.sent:
                future.set_exception(ProducerFenced())
        return self.sent[-1]


async def test_a_transaction_that_is_fenced_raises_one_error_and_leaves_none_behind() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    producer = FencedProducer()
    context: Any = SimpleNamespace(names=Names("m"), max_message_bytes=1_000_000)
    writing = PartitionWriter(0, context)
    writing.producer = cast("Any", producer)

    with pytest.raises(ProducerFenced):
        await writing.commit(Write(now_ms=0, appended_ms=0, markers=[Tick(0, 0)] * 3))

    assert len(producer.sent) == 3
    del producer, writing
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []
