"""The operations on queues: create, describe, change, purge, delete."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from marq_worker.sqs.access_keys import DESCRIBE
from marq_worker.sqs.arns import arn_of, url_of
from marq_worker.sqs.counts import MessageCounts
from marq_worker.sqs.limits import MAX_NAMES
from marq_worker.sqs.message_attributes import AttributeNames
from marq_worker.sqs.sqs_queues import Directory
from marq_worker.sqs.task_runner import TaskRunner
from marq_worker.sqs.tasks import PurgeTask, QueueTasks

_COUNTS = {
    "ApproximateNumberOfMessages": "waiting",
    "ApproximateNumberOfMessagesNotVisible": "in_flight",
    "ApproximateNumberOfMessagesDelayed": "delayed",
}

Parameters = Mapping[str, Any]


class QueueOperations:
    """Each operation takes the queue's name and its parameters, and returns the members of its answer.

    Two more parameters are the client's ``key``, None if the endpoint has no keys, and the ``base_url`` of queues.

    Args:
        extent: returns which messages a queue has now, for a later purge.
        count: returns how many messages a queue has.
    """

    def __init__(
        self,
        directory: Directory,
        tasks: QueueTasks,
        runner: TaskRunner,
        extent: Callable[[str], Awaitable[str]],
        count: Callable[[str], Awaitable[MessageCounts]],
    ) -> None:
        self._directory = directory
        self._tasks = tasks
        self._runner = runner
        self._extent = extent
        self._count = count

    async def list_queues(self, queue: None, parameters: Parameters) -> dict[str, Any]:
        return _page("QueueUrls", self._directory.names(parameters.get("QueueNamePrefix", "")), parameters)

    async def create_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.create(queue, parameters.get("Attributes", {}), parameters.get("tags", {}))
        return {"QueueUrl": url_of(parameters["base_url"], queue)}

    async def get_queue_url(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        return {"QueueUrl": url_of(parameters["base_url"], self._directory.get(queue).name)}

    async def delete_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.check_deletion(queue)
        task = PurgeTask(requested_s=time.time(), deletes=True)
        await self._tasks.start_purge(queue, task)
        self._runner.wake()
        return {}

    async def purge_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        # Messages that the client sends after the answer stay.
        extent = await self._extent(queue)
        await self._tasks.start_purge(queue, PurgeTask(requested_s=time.time(), extent=extent))
        self._runner.wake()
        return {}

    async def get_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        found = self._directory.get(queue)
        names = AttributeNames(parameters.get("AttributeNames", ()))
        attributes = found.attributes.to_attributes() | {
            "QueueArn": arn_of(queue),
            "CreatedTimestamp": str(found.created_s),
            "LastModifiedTimestamp": str(found.modified_s),
        }
        if any(name in names for name in _COUNTS):
            # An error here ends some clients, such as Celery's worker, so unknown numbers are 0.
            counts = await self._count(queue)
            attributes |= {name: str(getattr(counts, member)) for name, member in _COUNTS.items()}
        chosen = names.selected(attributes)
        return {"Attributes": chosen} if chosen else {}

    async def set_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.set_attributes(queue, parameters["Attributes"])
        return {}

    async def list_dead_letter_sources(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        return _page("queueUrls", self._directory.sources_of(queue), parameters)

    async def list_tags(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        tags = self._directory.get(queue).tags
        return {"Tags": dict(tags)} if tags else {}

    async def tag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.tag(queue, parameters["Tags"])
        return {}

    async def untag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.untag(queue, parameters["TagKeys"])
        return {}


def _page(member: str, names: Iterable[str], parameters: Parameters) -> dict[str, Any]:
    """Return the URLs of the next sorted names, of queues that the client may know of; all if it has no key."""
    key, token, most = parameters["key"], parameters.get("NextToken"), parameters.get("MaxResults")
    names = [name for name in names if (key is None or key.allows(DESCRIBE, name)) and (token is None or name > token)]
    page = names[: most or MAX_NAMES]
    answer: dict[str, Any] = {}
    if page or member == "queueUrls":
        answer[member] = [url_of(parameters["base_url"], name) for name in page]
    if most is not None and len(names) > most:
        answer["NextToken"] = page[-1]
    return answer
