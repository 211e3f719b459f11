"""The operations on moves of dead letters: start, cancel, list."""

from __future__ import annotations

import json
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from marq_worker.sqs.arns import arn_of, queue_of_arn
from marq_worker.sqs.characters import is_fifo
from marq_worker.sqs.counts import MessageCounts
from marq_worker.sqs.errors import SqsError, invalid
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.task_runner import TaskRunner
from marq_worker.sqs.tasks import RUNNING, MoveTask, QueueTasks

Parameters = Mapping[str, Any]


def queue_of_task(parameters: Parameters) -> str | None:
    """Return the dead-letter queue of an operation on moves, None for any other operation. Raises SqsError."""
    if (arn := parameters.get("SourceArn")) is not None:
        return queue_of_arn(arn)
    handle = parameters.get("TaskHandle")
    return None if handle is None else _read_handle(handle)[0]


class MoveOperations:
    """Each operation takes the dead-letter queue and its parameters, and returns the members of its answer."""

    def __init__(
        self,
        directory: Directory,
        tasks: QueueTasks,
        runner: TaskRunner,
        count: Callable[[str], Awaitable[MessageCounts]],
    ) -> None:
        self._directory = directory
        self._tasks = tasks
        self._runner = runner
        self._count = count

    def permissions(self, operation: str, queue: str, parameters: Parameters) -> Iterator[tuple[str, str]]:
        """Yield the actions and queues that an operation needs besides its own. Raises SqsError."""
        # The endpoint will receive and send for the client.
        if operation == "StartMessageMoveTask":
            yield "receive", queue
            yield from (("send", target) for target in self._targets(queue, parameters))

    async def start(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._check_exists("SourceArn", queue)
        sources = self._directory.sources_of(queue)
        if not sources:
            raise invalid("Source queue must be configured as a Dead Letter Queue.")
        if (why := self._directory.why_not_pollable(queue)) is not None:
            raise SqsError("UnsupportedOperation", f"the messages of {queue!r} can't be moved: {why}")
        targets = self._targets(queue, parameters)
        destination = targets[0] if "DestinationArn" in parameters else None
        if destination is not None:
            await self._directory.look_for(destination)
            self._check_exists("DestinationArn", destination)
            if destination == queue:
                raise invalid("Source queue arn and destination queue arn cannot be the same.")
            if is_fifo(destination) is not is_fifo(queue):
                raise invalid("a FIFO queue and a standard queue can't exchange messages")
        counts = await self._count(queue)
        task = MoveTask(
            id=secrets.token_hex(16),
            started_ms=round(time.time() * 1000),
            destination=destination,
            allowed=targets,
            rate=parameters.get("MaxNumberOfMessagesPerSecond"),
            to_move=counts.waiting if counts.known else None,
        )
        await self._tasks.start_move(queue, task)
        self._runner.wake()
        return {"TaskHandle": _handle(queue, task)}

    async def cancel(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        task = await self._tasks.cancel_move(queue, _read_handle(parameters["TaskHandle"])[1])
        return {"ApproximateNumberOfMessagesMoved": task.moved}

    async def list_tasks(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._check_exists("SourceArn", queue)
        moves = self._tasks.moves(queue)[: parameters.get("MaxResults", 1)]
        return {"Results": [_described(queue, task) for task in moves]}

    def _targets(self, queue: str, parameters: Parameters) -> list[str]:
        """Return the queues that messages of a dead-letter queue may be moved to."""
        destination = parameters.get("DestinationArn")
        if destination is not None:
            return [queue_of_arn(destination)]
        return self._directory.sources_of(queue) if self._directory.exists(queue) else []

    def _check_exists(self, parameter: str, queue: str) -> None:
        if not self._directory.exists(queue):
            raise SqsError(
                "ResourceNotFoundException",
                f"The resource that you specified for the {parameter} parameter doesn't exist.",
            )


def _handle(queue: str, task: MoveTask) -> str:
    return b64encode(json.dumps({"taskId": task.id, "sourceArn": arn_of(queue)}).encode()).decode()


def _read_handle(text: str) -> tuple[str, str]:
    """Return the queue and the id in the handle of a task. Raises SqsError."""
    try:
        document = json.loads(b64decode(text, validate=True))
        return queue_of_arn(document["sourceArn"]), str(document["taskId"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise invalid("Value for parameter TaskHandle is invalid.") from None


def _described(queue: str, task: MoveTask) -> dict[str, Any]:
    """Return a task as ListMessageMoveTasks does."""
    members = {
        "TaskHandle": _handle(queue, task) if task.state == RUNNING else None,
        "Status": task.state,
        "SourceArn": arn_of(queue),
        "DestinationArn": None if task.destination is None else arn_of(task.destination),
        "MaxNumberOfMessagesPerSecond": task.rate,
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.to_move,
        "FailureReason": task.reason,
        "StartedTimestamp": task.started_ms,
    }
    return {name: value for name, value in members.items() if value is not None}
