"""Random scripts of SQS calls on FIFO queues: what a receiver must get, and in which order in each message group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.sqs.script import Call, Drain, Script

GROUPS = ("a", "b", "c")
#: Marq's values for all FIFO queues; by default, other services compare deduplication ids across the whole queue.
ATTRIBUTES = {
    "FifoQueue": "true",
    "DeduplicationScope": "messageGroup",
    "FifoThroughputLimit": "perMessageGroupId",
}


class FifoScript(Script):
    """Makes the steps of a seed, with FIFO queues.

    Each receive gets one message, the first in a group that has none in flight. Duplicates are sent only while the
    message with their id is in the queue, because moto forgets the ids of deleted messages.
    """

    kind = "fifo"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        #: The group and the deduplication id of each message, by body.
        self._groups: dict[str, str] = {}
        self._ids: dict[str, str | None] = {}
        self._content_based: set[str] = set()

    def _create(self, **attributes: Any) -> Call:
        content_based = {"ContentBasedDeduplication": "true"} if self._random.random() < 0.5 else {}
        call = super()._create(**ATTRIBUTES, **content_based, **attributes)
        name = call.parameters["QueueName"]
        fifo = f"{name}.fifo"
        self._queues[fifo] = self._queues.pop(name)
        if content_based:
            self._content_based.add(fifo)
        return call._replace(parameters={**call.parameters, "QueueName": fifo})

    def _create_again(self, queue: str) -> Iterator[Call]:
        for call in super()._create_again(queue):
            attributes = {"FifoQueue": "true", **call.parameters.get("Attributes", {})}
            yield call._replace(parameters={**call.parameters, "Attributes": attributes})

    def _delete_queue(self, queue: str) -> Iterator[Call]:
        for call in super()._delete_queue(queue):
            # Services differ in what they check first.
            group = {"MessageGroupId": "a", "MessageDeduplicationId": "x"} if "send" in call.name else {}
            yield call._replace(parameters={**call.parameters, **group})

    def _message(self, queue: str) -> dict[str, Any]:
        state = self._queues[queue]
        known = [body for body in (*state.visible, *state.in_flight) if body in self._ids]
        if known and self._random.random() < 0.25:
            return self._duplicate(self._random.choice(sorted(known)))
        message = super()._message(queue)
        message.pop("DelaySeconds", None)
        body = message["MessageBody"]
        self._groups[body] = message["MessageGroupId"] = self._random.choice(GROUPS)
        self._ids[body] = None
        if queue not in self._content_based or self._random.random() < 0.5:
            self._ids[body] = message["MessageDeduplicationId"] = f"id-{self._bodies}"
        return message

    def _duplicate(self, body: str) -> dict[str, Any]:
        """Return a message that must not be delivered: it has the deduplication id of an earlier one in its group."""
        own_id = self._ids[body]
        if own_id is None:
            return {"MessageBody": body, "MessageGroupId": self._groups[body]}
        return {"MessageBody": "duplicate", "MessageGroupId": self._groups[body], "MessageDeduplicationId": own_id}

    def _send_batch(self, queue: str) -> Iterator[Call]:
        entries = [{"Id": f"e_{n}", **self._message(queue)} for n in range(self._random.randint(1, 10))]
        yield Call("send batch", "send_message_batch", queue, {"Entries": entries})

    def _drain(self, queue: str, *, last: bool = False) -> Iterator[Any]:
        yield self._drain_heads(queue, last=last)
        # Behind the heads are other messages, and none must be lost.
        while last and self._queues[queue].in_flight:
            for body in list(self._queues[queue].in_flight):
                yield self._delete_one(queue, body)
            yield self._drain_heads(queue, last=True)

    def _drain_heads(self, queue: str, *, last: bool) -> Drain:
        state = self._queues[queue]
        heads: dict[str, str] = {}
        locked = {self._groups[body] for body in state.in_flight}
        for body in sorted(state.visible, key=_number):
            if self._groups[body] not in locked:
                heads.setdefault(self._groups[body], body)
        others, state.visible = state.visible, {body: state.visible[body] for body in heads.values()}
        (drain,) = super()._drain(queue, last=last)
        state.visible = {body: count for body, count in others.items() if body not in heads.values()}
        return drain._replace(parameters={**drain.parameters, "MaxNumberOfMessages": 1})


def _number(body: str) -> int:
    return int(body.split()[0])
