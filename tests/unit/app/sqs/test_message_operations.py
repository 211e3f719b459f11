"""What the endpoint sends for SendMessage and SendMessageBatch."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from marq.settings.definitions import Definitions
from marq_worker.app.sqs.attributes import QueueAttributes
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.message_operations import MessageOperations

MAXIMUM_BYTES = 1_024


class Producer:
    """Accepts messages."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, queue: str, data: bytes, **options: Any) -> Any:
        self.sent.append(data)
        return SimpleNamespace(id="marq.messages/0/1", sequence=None)


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def operations(producer: Producer) -> MessageOperations:
    found = SimpleNamespace(attributes=QueueAttributes(maximum_message_bytes=MAXIMUM_BYTES), generation=0)
    unused: Any = dict.fromkeys(("receivers", "settlers", "limits", "visibility", "handles"))
    return MessageOperations(
        producer=producer, queues=SimpleNamespace(definitions=Definitions()),
        directory=SimpleNamespace(get=lambda name: found), ids=SimpleNamespace(of=str), **unused,
    )  # type: ignore[arg-type]  # fmt: skip


def message(size: int) -> Mapping[str, Any]:
    """Return a message of this size; all but 6 bytes are an attribute."""
    name, data_type = "a", "Binary"
    value = b"x" * (size - 6 - len(name) - len(data_type))
    return {
        "Id": str(size),
        "MessageBody": "body-6",
        "MessageAttributes": {name: {"DataType": data_type, "BinaryValue": value}},
    }


async def test_attributes_count_against_the_maximum_size_of_a_queue(
    producer: Producer, operations: MessageOperations
) -> None:
    await operations.send("emails", message(MAXIMUM_BYTES))
    with pytest.raises(SqsError, match="has 1025 bytes with its attributes; at most 1024") as caught:
        await operations.send("emails", message(MAXIMUM_BYTES + 1))

    assert caught.value.shape == "InvalidParameterValue"
    assert producer.sent == [b"body-6"]


async def test_an_entry_that_is_too_large_for_its_queue_fails_alone(
    producer: Producer, operations: MessageOperations
) -> None:
    first, second = await operations.send_batch("emails", [message(MAXIMUM_BYTES), message(MAXIMUM_BYTES + 1)])

    assert isinstance(first, dict)
    assert isinstance(second, SqsError)
    assert producer.sent == [b"body-6"]
