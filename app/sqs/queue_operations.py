"""The operations on queues: create, describe, change, purge, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marq_worker.app.sqs.arns import arn_of, url_of
from marq_worker.app.sqs.directory import Directory
from marq_worker.app.sqs.errors import SqsError
from marq_worker.app.sqs.keys import DESCRIBE, Key
from marq_worker.app.sqs.receiving import Receivers

#: How many names ListQueues returns at most.
_MAX_NAMES = 1_000

Parameters = Mapping[str, Any]
#: Returns how many messages of a queue wait, are in flight and are delayed; None if that is not known.
Counts = Callable[[str], Awaitable[tuple[int, int, int] | None]]
#: Ends all waiting messages of a queue.
Purge = Callable[[str], Awaitable[None]]


class QueueOperations:
    """Each operation takes the queue's name and its parameters, and returns the members of its answer."""

    def __init__(self, directory: Directory, receivers: Receivers, counts: Counts, purge: Purge) -> None:
        self._directory = directory
        self._receivers = receivers
        self._counts = counts
        self._purge = purge
        self._purging: set[str] = set()

    def list_queues(self, parameters: Parameters, key: Key | None, base_url: str) -> dict[str, Any]:
        names = [
            name
            for name in self._directory.names(parameters.get("QueueNamePrefix", ""))
            if key is None or key.allows(DESCRIBE, name)
        ]
        return _page("QueueUrls", names, parameters, base_url)

    async def create_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.create(queue, parameters.get("Attributes", {}), parameters.get("tags", {}))
        return {"QueueUrl": url_of(parameters["base_url"], queue)}

    async def get_queue_url(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        return {"QueueUrl": url_of(parameters["base_url"], self._directory.get(queue).name)}

    async def delete_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.check_deletion(queue)
        await self._receivers.drop(queue)
        await self._end_messages(queue)
        await self._directory.delete(queue)
        return {}

    async def purge_queue(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        self._directory.get(queue)
        await self._end_messages(queue)
        return {}

    async def _end_messages(self, queue: str) -> None:
        if queue in self._purging:
            raise SqsError("PurgeQueueInProgress", f"the queue {queue!r} is being purged")
        self._purging.add(queue)
        try:
            await self._purge(queue)
        finally:
            self._purging.discard(queue)

    async def get_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        found = self._directory.get(queue)
        names = set(parameters.get("AttributeNames", ()))
        attributes = found.attributes.to_attributes(arn_of) | {
            "QueueArn": arn_of(queue),
            "CreatedTimestamp": str(found.created_s),
            "LastModifiedTimestamp": str(found.modified_s),
        }
        if "All" in names or any(name.startswith("Approximate") for name in names):
            counts = await self._counts(queue)
            if counts is None:
                raise SqsError("ServiceUnavailable", "no worker has counted the messages of queues yet; try again")
            waiting, in_flight, delayed = counts
            attributes["ApproximateNumberOfMessages"] = str(waiting)
            attributes["ApproximateNumberOfMessagesNotVisible"] = str(in_flight)
            attributes["ApproximateNumberOfMessagesDelayed"] = str(delayed)
        chosen = {name: value for name, value in attributes.items() if "All" in names or name in names}
        return {"Attributes": chosen} if chosen else {}

    async def set_queue_attributes(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.set_attributes(queue, parameters["Attributes"])
        return {}

    async def list_dead_letter_sources(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        names = self._directory.sources_of(queue)
        return _page("queueUrls", names, parameters, parameters["base_url"])

    async def list_tags(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        tags = self._directory.get(queue).tags
        return {"Tags": dict(tags)} if tags else {}

    async def tag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.tag(queue, parameters["Tags"])
        return {}

    async def untag(self, queue: str, parameters: Parameters) -> dict[str, Any]:
        await self._directory.untag(queue, parameters["TagKeys"])
        return {}


def _page(member: str, names: list[str], parameters: Parameters, base_url: str) -> dict[str, Any]:
    """Return the next page of sorted names as URLs."""
    token, most = parameters.get("NextToken"), parameters.get("MaxResults")
    if token is not None:
        names = [name for name in names if name > token]
    page = names[: most or _MAX_NAMES]
    answer: dict[str, Any] = (
        {member: [url_of(base_url, name) for name in page]} if page or member == "queueUrls" else {}
    )
    if most is not None and len(names) > most:
        answer["NextToken"] = page[-1]
    return answer
