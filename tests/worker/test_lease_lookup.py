"""Questions to trackers about messages in flight, on a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import marq
from marq.client import message_token
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Source
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.sqs.polling import LeaseLookup
from tests.worker.harness import Worker, eventually, take

LIMIT_S = 20


async def test_a_tracker_knows_what_is_in_flight(broker: EmbeddedBroker, tmp_path: Path) -> None:
    worker = Worker(broker.bootstrap_servers, tmp_path)
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": worker.names.prefix}, owner="the test")
    questions = LeaseLookup(settings, limit_s=1)
    with pytest.raises(MarqError):
        await questions.is_in_flight(message_token.Token("emails", 1, Source("marq.messages", 0), 0))
    options = {"bootstrap_servers": broker.bootstrap_servers, "prefix": worker.names.prefix}
    try:
        async with marq.Producer(**options) as producer, marq.Consumer("emails", **options) as consumer:
            await producer.send_many("emails", [b"acked", b"held"])
            messages = await take(consumer, 2)
            tokens = [message_token.decode(message.token) for message in messages]
            await messages[0].ack()
            async with questions:
                with pytest.raises(BrokerUnavailable, match="no tracker answered within 1 s"):
                    await questions.is_in_flight(tokens[0])

            await worker.start().ready(2)

            async with LeaseLookup(settings, limit_s=LIMIT_S) as questions:
                asked = await asyncio.gather(*[questions.is_in_flight(token) for token in tokens])
                assert asked == [False, True]
                await messages[1].release()
                await eventually(lambda: questions.is_in_flight(tokens[1]), lambda held: not held)
    finally:
        worker.close()
