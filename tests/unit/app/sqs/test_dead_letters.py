"""What the endpoint sends when it moves a message to a dead-letter queue, or back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marq.client.message_token import Token
from marq.settings.queue import QueueSettings
from marq.wire.markers import Source
from marq_worker.sqs.dead_letters import DeadLetterSender
from marq_worker.sqs.deliveries import SqsDelivery

SETTINGS = {"fair": QueueSettings(fair=True), "plain": QueueSettings()}


@pytest.mark.parametrize(("target", "key"), [("fair", b"tenant-1"), ("plain", None)])
async def test_a_moved_message_keeps_its_group_as_the_key_of_a_fair_queue(target: str, key: bytes | None) -> None:
    sent: list[Any] = []

    async def send(queue: str, data: bytes, **options: Any) -> None:
        sent.append((queue, data, options.get("ordering_key"), dict(options["headers"])))

    queues = SimpleNamespace(definitions=SimpleNamespace(settings=SETTINGS.__getitem__))
    sender = DeadLetterSender(SimpleNamespace(send=send), queues)  # type: ignore[arg-type]
    token = Token("letters", 7, Source("marq.messages", 0), 12)
    headers = {"sqs-group": b"tenant-1", "sqs-source": b"arn:aws:sqs:us-east-1:000000000000:fair"}

    await sender.move_back(target, SqsDelivery(token, "id", 1, 1_000, b"body", headers))

    assert sent == [(target, b"body", key, {"sqs-group": b"tenant-1"})]
