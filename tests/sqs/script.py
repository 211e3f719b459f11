"""Random scripts of SQS calls whose outcome does not depend on time.

A script follows which messages of a queue are visible and which are in flight, so that it can say what a receiver must
get. A visibility timeout is either 0 or longer than the test. Messages have different bodies, which name them: a
service chooses ids and order itself.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LONG_S = 3_000
QUEUES, STEPS = 4, 80


class Call(NamedTuple):
    """A call, whose answers are compared."""

    name: str
    operation: str
    queue: str | None = None
    parameters: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Drain(NamedTuple):
    """Receive all visible messages of a queue. ``receives`` has them, and how often each was received then, by body.

    A ``last`` one also waits for messages that should not come. The queue ``source`` is polled meanwhile, and must
    return nothing: its messages move here when they would be received too often.
    """

    queue: str
    receives: dict[str, int]
    parameters: dict[str, Any]
    last: bool = False
    source: str | None = None


class HandleOf(NamedTuple):
    """Stands for the last receipt handle of a message."""

    queue: str
    body: str


class PolicyTo(NamedTuple):
    """Stands for a redrive policy with the ARN of a queue."""

    queue: str
    receives: int


def text(value: str, data_type: str = "String") -> dict[str, Any]:
    return {"DataType": data_type, "StringValue": value}


def binary(value: bytes, data_type: str = "Binary") -> dict[str, Any]:
    return {"DataType": data_type, "BinaryValue": value}


@dataclass
class Queue:
    """What the script knows of a queue; receives are counted by body."""

    visible: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)


class Script:
    """Makes the steps of a seed, with standard queues; :meth:`_drain` takes all visible messages to be deliverable."""

    kind = "script"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._prefix = f"{self.kind}-{seed}-"
        self._queues: dict[str, Queue] = {}
        self._names = 0
        self._bodies = 0

    def steps(self) -> Iterator[Call | Drain]:
        for _ in range(QUEUES):
            yield self._create()
        actions = list(_WEIGHTS)
        for action in self._random.choices(actions, list(_WEIGHTS.values()), k=STEPS):
            yield from getattr(self, f"_{action}")(self._random.choice(list(self._queues)))
        yield from self._redrive()
        for queue in list(self._queues):
            yield from self._drain(queue, last=True)
        queue = self._random.choice(list(self._queues))
        yield from self._purge(queue)
        yield from self._delete_queue(queue)

    # --- queues -------------------------------------------------------------------------------------------------------

    def _create(self, **attributes: Any) -> Call:
        """Create a queue, with a name that was not used before: a service may refuse one that was just deleted."""
        self._names += 1
        name = f"{self._prefix}{self._names}"
        self._queues[name] = Queue()
        # The default of MaximumMessageSize follows from what Kafka accepts.
        own = {"VisibilityTimeout": str(LONG_S), "MaximumMessageSize": "500000"}
        attributes = {**own, **self._attributes(), **attributes}
        tags = {"tags": {"made": name}} if self._random.random() < 0.5 else {}
        return Call("create", "create_queue", None, {"QueueName": name, "Attributes": attributes, **tags})

    def _attributes(self) -> dict[str, str]:
        values = {
            "MessageRetentionPeriod": str(self._random.randint(600, 1_209_600)),
            "ReceiveMessageWaitTimeSeconds": "0",
            "MaximumMessageSize": str(self._random.randint(200_000, 1_000_000)),
            "SqsManagedSseEnabled": "true",
        }
        return {name: value for name, value in values.items() if self._random.random() < 0.4}

    def _create_again(self, queue: str) -> Iterator[Call]:
        yield Call("create again", "create_queue", None, {"QueueName": queue})
        other = {"VisibilityTimeout": str(LONG_S + 1)}
        yield Call("create with other attributes", "create_queue", None, {"QueueName": queue, "Attributes": other})

    def _describe(self, queue: str) -> Iterator[Call]:
        yield Call("url", "get_queue_url", None, {"QueueName": queue})
        yield Call("attributes", "get_queue_attributes", queue, {"AttributeNames": ["All"]})
        yield Call("attributes", "get_queue_attributes", queue, {"AttributeNames": ["QueueArn", "DelaySeconds"]})
        yield Call("no attributes", "get_queue_attributes", queue)
        yield Call("list", "list_queues", None, {"QueueNamePrefix": self._prefix})

    def _set(self, queue: str) -> Iterator[Call]:
        if attributes := self._attributes():
            yield Call("set", "set_queue_attributes", queue, {"Attributes": attributes})
        yield Call("attributes", "get_queue_attributes", queue, {"AttributeNames": ["All"]})

    def _tags(self, queue: str) -> Iterator[Call]:
        tags = {self._random.choice("abc"): self._text() for _ in range(2)}
        yield Call("tag", "tag_queue", queue, {"Tags": tags})
        yield Call("untag", "untag_queue", queue, {"TagKeys": [self._random.choice("abcd")]})
        yield Call("tags", "list_queue_tags", queue)

    def _purge(self, queue: str) -> Iterator[Call | Drain]:
        yield from self._send(queue)
        yield Call("purge", "purge_queue", queue)
        # Marq leaves messages in flight alone and moto ends them, so they are not looked at again.
        self._queues[queue] = Queue()
        yield from self._drain(queue, last=True)

    def _delete_queue(self, queue: str) -> Iterator[Call]:
        del self._queues[queue]
        yield Call("delete queue", "delete_queue", queue)
        yield Call("send to a deleted queue", "send_message", queue, {"MessageBody": "x"})
        yield Call("list", "list_queues", None, {"QueueNamePrefix": self._prefix})

    def _redrive(self) -> Iterator[Call | Drain]:
        """A message moves to the dead-letter queue at the receive after ``maxReceiveCount``."""
        target = self._create()
        source = self._create(RedrivePolicy=PolicyTo(target.parameters["QueueName"], 2))
        yield from (target, source)
        to, queue = target.parameters["QueueName"], source.parameters["QueueName"]
        yield Call("sources", "list_dead_letter_source_queues", to)
        yield from self._send(queue)
        for _ in range(2):
            yield from self._drain(queue)
            for body in list(self._queues[queue].in_flight):
                yield from self._change_visibility(queue, [body], 0)
        self._queues[to].visible = dict.fromkeys(self._queues[queue].visible, 0)
        self._queues[queue] = Queue()
        yield from self._drain(queue, last=True)
        # A dead letter of Marq is a new message, so its receives are counted from 1; moto continues to count.
        for drain in self._drain(to):
            yield drain._replace(parameters={"MessageSystemAttributeNames": ["SentTimestamp"]}, source=queue)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, queue: str) -> Iterator[Call]:
        message = self._message(queue)
        if self._random.random() < 0.3:
            # Not in batches, from which moto drops it.
            message["MessageSystemAttributes"] = {"AWSTraceHeader": text("Root=1-5759e988")}
        yield Call("send", "send_message", queue, message)

    def _send_batch(self, queue: str) -> Iterator[Call]:
        count = self._random.randint(1, 10)
        entries: list[dict[str, Any]] = [{"Id": f"e_{n}", **self._message(queue)} for n in range(count)]
        if count < 10 and self._random.random() < 0.5:
            entries.insert(self._random.randint(0, count), {"Id": "bad", "MessageBody": "x", "DelaySeconds": 901})
        yield Call("send batch", "send_message_batch", queue, {"Entries": entries})

    def _message(self, queue: str) -> dict[str, Any]:
        """Return the parameters of a message to send."""
        self._bodies += 1
        body = f"{self._bodies} {self._text()}"
        self._queues[queue].visible[body] = 0
        message: dict[str, Any] = {"MessageBody": body}
        choices = {
            "text": text(self._text()),
            "label": text(self._text(), "String.label"),
            "number": text(self._random.choice(["0", "-1.5", "12e10", "0.00001"]), "Number"),
            "number.integer": text("7", "Number.int"),
            "bytes": binary(self._random.randbytes(9)),
            "bytes.image": binary(b"\0\xff", "Binary.png"),
        }
        if chosen := self._random.sample(sorted(choices), self._random.randint(0, 4)):
            message["MessageAttributes"] = {name: choices[name] for name in chosen}
        if self._random.random() < 0.2:
            message["DelaySeconds"] = 0
        return message

    def _text(self) -> str:
        return "".join(self._random.choices(string.printable[:95] + "\t\n\ré€\ud7ff\ue000\ufffd🚀", k=12))

    def _drain(self, queue: str, *, last: bool = False) -> Iterator[Drain]:
        state = self._queues[queue]
        received = {body: count + 1 for body, count in state.visible.items()}
        state.in_flight |= received
        state.visible = {}
        names = self._random.choice([["All"], [".*"], ["bytes.*", "text"], ["number"], ["missing"], []])
        parameters: dict[str, Any] = {"MessageAttributeNames": names}
        if self._random.random() < 0.5:
            parameters["VisibilityTimeout"] = LONG_S
        yield Drain(queue, received, parameters, last)

    def _delete(self, queue: str) -> Iterator[Call]:
        for body in self._some(self._queues[queue].in_flight, 1):
            yield self._delete_one(queue, body)

    def _delete_one(self, queue: str, body: str) -> Call:
        self._forget(queue, body)
        return Call("delete", "delete_message", queue, {"ReceiptHandle": HandleOf(queue, body)})

    def _delete_batch(self, queue: str) -> Iterator[Call]:
        if bodies := self._some(self._queues[queue].in_flight, 9):
            entries = [{"Id": f"{n}", "ReceiptHandle": HandleOf(queue, body)} for n, body in enumerate(bodies)]
            entries.append({"Id": "bad", "ReceiptHandle": "nonsense"})
            for body in bodies:
                self._forget(queue, body)
            yield Call("delete batch", "delete_message_batch", queue, {"Entries": entries})

    def _delete_again(self, queue: str) -> Iterator[Call]:
        for body in self._some(self._queues[queue].deleted, 1):
            yield Call("delete again", "delete_message", queue, {"ReceiptHandle": HandleOf(queue, body)})

    def _hide(self, queue: str) -> Iterator[Call]:
        yield from self._change_visibility(queue, self._some(self._queues[queue].in_flight, 3), LONG_S + 1)

    def _show(self, queue: str) -> Iterator[Call]:
        yield from self._change_visibility(queue, self._some(self._queues[queue].in_flight, 3), 0)

    def _change_visibility(self, queue: str, bodies: list[str], seconds: int) -> Iterator[Call]:
        state = self._queues[queue]
        if seconds == 0:
            state.visible |= {body: state.in_flight.pop(body) for body in bodies}
        changes = [{"ReceiptHandle": HandleOf(queue, body), "VisibilityTimeout": seconds} for body in bodies]
        if len(changes) == 1:
            yield Call("change visibility", "change_message_visibility", queue, changes[0])
        elif changes:
            entries = [{"Id": f"{n}", **change} for n, change in enumerate(changes)]
            entries.append({"Id": "bad", "ReceiptHandle": "nonsense", "VisibilityTimeout": seconds})
            yield Call("change visibility batch", "change_message_visibility_batch", queue, {"Entries": entries})

    def _forget(self, queue: str, body: str) -> None:
        del self._queues[queue].in_flight[body]
        self._queues[queue].deleted.append(body)

    def _some(self, bodies: Any, most: int) -> list[str]:
        return self._random.sample(sorted(bodies), self._random.randint(min(1, len(bodies)), min(most, len(bodies))))


#: How often a script takes each action.
_WEIGHTS = {
    "send": 8, "send_batch": 6, "drain": 10, "delete": 8, "delete_batch": 6, "delete_again": 3, "hide": 4, "show": 8,
    "describe": 2, "create_again": 2, "set": 3, "tags": 3,
}  # fmt: skip


def policy(arn: str, receives: int) -> str:
    """Return a redrive policy as JSON."""
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": receives})
