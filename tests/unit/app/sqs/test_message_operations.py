"""What the endpoint sends for SendMessage and SendMessageBatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from marq.client.receipt import Receipt
from marq.settings.definitions import Definitions
from marq_worker.sqs.attributes import QueueAttributes
from marq_worker.sqs.aws_json import Call, add_trace
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.message_operations import MessageOperations

MAXIMUM_BYTES = 1_024


class Producer:
    """Accepts messages."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.headers: list[Any] = []

    async def send(self, queue: str, data: bytes, **options: Any) -> Any:
        self.sent.append(data)
        self.headers.append(options["headers"])
        return Receipt(queue, "marq.messages", 0, 1)

    async def send_each(self, queue: str, messages: Sequence[tuple[bytes, Any]]) -> list[Any]:
        return [await self.send(queue, data, headers=headers) for data, headers in messages]


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
def operations(producer: Producer) -> MessageOperations:
    found = SimpleNamespace(attributes=QueueAttributes(maximum_message_bytes=MAXIMUM_BYTES), generation=0)
    unused: Any = dict.fromkeys(("receivers", "outcomes", "limits", "visibility", "handles"))
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


async def test_a_message_has_the_trace_of_its_call_unless_it_has_its_own(
    producer: Producer, operations: MessageOperations
) -> None:
    own = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=own"}}
    entry = {"MessageBody": "x"}
    single = Call("SendMessage", {**entry})
    several = Call("SendMessageBatch", {"Entries": [{**entry}, {**entry, "MessageSystemAttributes": own}]})
    for call in single, several:
        add_trace(call, "Root=call")

    alone = await operations.send("emails", single.parameters)
    [first, second] = await operations.send_batch("emails", several.parameters["Entries"])

    assert producer.headers == [[("sqs-trace", trace)] for trace in (b"Root=call", b"Root=call", b"Root=own")]
    # The checksum covers what the client sent as attributes.
    assert ["MD5OfMessageSystemAttributes" in message for message in (alone, first, second)] == [False, False, True]


@pytest.mark.parametrize("trace", [None, "", "Root=\udcff", "Root=\x01"])
async def test_a_trace_that_no_message_can_have_is_left_out(
    producer: Producer, operations: MessageOperations, trace: str | None
) -> None:
    call = Call("SendMessage", {"MessageBody": "x"})
    add_trace(call, trace)

    await operations.send("emails", call.parameters)

    assert producer.headers == [[]]
