"""The queues that SQS clients see: which exist, their attributes and tags.

Every queue that is defined in Marq, also by marq.toml or a handler, exists if SQS allows its name. Attributes that are
settings of Marq are changes to the queue, like those of ``marq queue --set``. The rest is in the record ``sqs:NAME`` of
the queues topic:

``attributes``: attributes without a setting; ``tags``; ``created`` and ``modified``: seconds since 1970;
``generation``: as ``created``, if a queue with this name was deleted before; ``deleted``: when DeleteQueue was called;
replaces all others. Until a deletion is done, it is one of the queue's tasks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from marq.queues.following import SYNC_LIMIT_S
from marq.queues.queues import Queues
from marq.settings.definitions import sqs_key
from marq.settings.queue import ORDERED_BY_KEY, UNLIMITED
from marq.wire.errors import MarqError
from marq_worker.sqs.arns import queue_of_arn
from marq_worker.sqs.attributes import (
    QueueAttributes,
    differing_attribute,
    queue_options,
    read_attributes,
    target_of,
    with_settings,
    without_settings,
)
from marq_worker.sqs.characters import FIFO_SUFFIX, is_fifo, is_queue_name
from marq_worker.sqs.errors import SqsError, invalid
from marq_worker.sqs.limits import check_tag_count
from marq_worker.sqs.tasks import is_being_deleted, is_recent

#: How long the name of a deleted queue can't be used again.
DELETED_S = 60.0
#: Least time between two reads of the definitions that look for a missing queue.
_SYNC_S = 0.1
#: Maximum number of queues whose attributes are cached; beyond that, all are read again.
_MAX_KNOWN = 10_000


class SqsQueue(NamedTuple):
    """A queue as SQS describes it; times are seconds since 1970, 0 if unknown."""

    name: str
    attributes: QueueAttributes
    tags: Mapping[str, str]
    created_s: int
    modified_s: int
    #: Distinguishes a queue from deleted ones with the same name; 0 for the first.
    generation: int


class Directory:
    """Reads and changes queues for SQS clients.

    Args:
        queues: the definitions, started.
        maximum_bytes: the size of the largest message that Kafka accepts.
        clock: returns the time in seconds since 1970.
    """

    def __init__(self, queues: Queues, maximum_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._queues = queues
        self._maximum_bytes = maximum_bytes
        self._clock = clock
        #: The next read of the definitions; calls that arrive before it begins share it.
        self._next_sync: asyncio.Task[None] | None = None
        self._sync_from_s = 0.0
        self._creating = asyncio.Lock()
        #: Queues as they are defined now.
        self._known: dict[str, SqsQueue] = {}
        queues.listen(self._known.clear)

    async def look_for(self, name: str) -> None:
        """Look for an unknown queue that another endpoint may have created a moment ago."""
        if name not in self._known and not self.exists(name):
            if self._next_sync is None:
                self._next_sync = asyncio.create_task(self._sync(), name="marq-sqs-sync")
            await asyncio.shield(self._next_sync)

    async def _sync(self) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._sync_from_s - clock())
        # Later calls need a later read.
        self._next_sync, self._sync_from_s = None, clock() + _SYNC_S
        with suppress(MarqError):
            await self._queues.sync(SYNC_LIMIT_S)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all queues, sorted."""
        definitions = self._queues.definitions
        names = {*definitions.names(), *definitions.sqs_names()}
        return sorted(name for name in names if name.startswith(prefix) and self.exists(name))

    def get(self, name: str) -> SqsQueue:
        """Return a queue. Raises SqsError if there is none."""
        if (queue := self._known.get(name)) is None:
            if not self.exists(name):
                raise SqsError("QueueDoesNotExist", "The specified queue does not exist.")
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            queue = self._known[name] = self._read(name)
        return queue

    def sources_of(self, name: str) -> list[str]:
        """Return the queues whose dead-letter queue this one is. Raises SqsError as :meth:`get`."""
        self.get(name)
        return [source for source in self.names() if self._read(source).attributes.dead_letter_queue == name]

    def why_not_pollable(self, name: str) -> str | None:
        """Return why SQS clients can't receive from a queue: it has other consumers. None if they can."""
        definitions = self._queues.definitions
        if definitions.settings(name).handler is not None:
            return "it has a handler"
        if (group := definitions.group(name)) is not None:
            return f"the consumers of the group {group!r} receive its messages"
        if definitions.settings(name).ordered and not is_fifo(name):
            return f'it has ordering = "key", and its name does not end in {FIFO_SUFFIX}'
        return None

    async def create(self, name: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Create a queue; do nothing if it exists with the same attributes.

        Raises:
            SqsError: the name or an attribute is invalid, or the queue has other attributes.
            MarqError: it is unknown whether the queue was created.
        """
        await self._look_for_target(attributes)
        # Each call sees the queue that an earlier one creates.
        async with self._creating:
            await self._create(name, attributes, tags)

    async def _create(self, name: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> None:
        if self.exists(name):
            self._check_same(name, attributes)
            return
        now_s = self._clock()
        deleted_s = self._queues.definitions.sqs(name).get("deleted", 0)
        if is_recent(deleted_s, now_s, DELETED_S) or is_being_deleted(self._queues.definitions.sqs_tasks(name)):
            raise SqsError("QueueDeletedRecently", f"wait {DELETED_S:g} s after deleting a queue to use its name again")
        checked = self._checked(name, attributes, self._defaults(name))
        # SQS redelivers a message until it is deleted, unless a redrive policy says otherwise.
        options = queue_options(checked, attributes)
        options["max_attempts"] = UNLIMITED
        if checked.fifo:
            options["ordering"] = ORDERED_BY_KEY
        document: dict[str, Any] = {
            "attributes": without_settings(attributes, fifo=is_fifo(name)),
            "tags": dict(tags),
            "created": round(now_s),
            "modified": round(now_s),
        }
        if deleted_s:
            document["generation"] = round(now_s)
        # Together: a queue with only one of the two records would have other attributes than those of this call, and a
        # repeated call would fail.
        await self._queues.define(name, {sqs_key(name): document}, **options)
        # A client of another endpoint may have created it first.
        self._check_same(name, attributes)

    def _check_same(self, name: str, attributes: Mapping[str, str]) -> None:
        """Raise SqsError unless a queue has these attributes."""
        if (other := differing_attribute(attributes, self.get(name).attributes, self._maximum_bytes)) is not None:
            raise SqsError("QueueNameExists", f"the queue {name!r} exists with another {other}")

    async def set_attributes(self, name: str, attributes: Mapping[str, str]) -> None:
        """Change attributes of a queue; same errors as :meth:`create`."""
        await self._look_for_target(attributes)
        options = queue_options(self._checked(name, attributes, self.get(name).attributes), attributes)
        if options:
            await self._queues.change(name, **options)
        await self._merge(
            name,
            lambda document: {
                **document,
                "attributes": {**document.get("attributes", {}), **without_settings(attributes, fifo=is_fifo(name))},
                "modified": round(self._clock()),
            },
        )

    async def tag(self, name: str, tags: Mapping[str, str]) -> None:
        """Add tags. Raises SqsError if the queue does not exist or gets too many, MarqError as :meth:`create`."""
        self.get(name)

        def merged(document: Mapping[str, Any]) -> dict[str, Any]:
            after = {**document.get("tags", {}), **tags}
            check_tag_count(after)
            return {**document, "tags": after}

        await self._merge(name, merged)

    async def untag(self, name: str, keys: list[str]) -> None:
        """Remove tags; same errors as :meth:`tag`."""
        self.get(name)
        await self._merge(
            name,
            lambda document: {
                **document,
                "tags": {key: value for key, value in document.get("tags", {}).items() if key not in keys},
            },
        )

    def check_deletion(self, name: str) -> None:
        """Raise SqsError if a queue does not exist, or if it is defined where only its owner can remove it."""
        self.get(name)
        for layer, place in (("file", "marq.toml"), ("handler", "a handler")):
            if self._queues.definitions.layer(layer, name) is not None:
                raise SqsError("UnsupportedOperation", f"the queue {name!r} is defined by {place}; remove it there")

    async def forget(self, name: str, deleted_s: float) -> None:
        """Forget a queue deleted at this time, whose messages the caller has ended; same errors as above."""
        await self._queues.replace({sqs_key(name): {"deleted": round(deleted_s)}})
        await self._queues.reset(name)

    def exists(self, name: str) -> bool:
        definitions = self._queues.definitions
        if not is_queue_name(name) or is_being_deleted(definitions.sqs_tasks(name)):
            return False
        if is_fifo(name) and not definitions.settings(name).ordered:
            # Clients would rely on an order that the queue does not keep.
            return False
        document = definitions.sqs(name)
        return definitions.defines(name) or ("created" in document and "deleted" not in document)

    def _read(self, name: str) -> SqsQueue:
        document, settings = self._queues.definitions.sqs(name), self._queues.definitions.settings(name)
        defaults = self._defaults(name)
        if "created" not in document:
            # The queue's owner relies on Kafka's retention, so a client's poll must not delete messages earlier.
            defaults = replace(defaults, retention_s=None)
        kept = read_attributes(document.get("attributes", {}), fifo=is_fifo(name), current=defaults)
        attributes = with_settings(kept, settings)
        created_s = document.get("created", 0)
        return SqsQueue(
            name,
            attributes,
            document.get("tags", {}),
            created_s,
            document.get("modified", created_s),
            document.get("generation", 0),
        )

    def _defaults(self, name: str) -> QueueAttributes:
        return QueueAttributes(maximum_message_bytes=self._maximum_bytes, fifo=is_fifo(name))

    def _checked(self, name: str, attributes: Mapping[str, str], current: QueueAttributes) -> QueueAttributes:
        """Return attributes after a change. Raises SqsError."""
        changed = read_attributes(attributes, fifo=current.fifo, current=current)
        if changed.dead_letter_queue is not None and "RedrivePolicy" in attributes:
            self._check_redrive(name, changed.dead_letter_queue)
        return changed

    async def _look_for_target(self, attributes: Mapping[str, str]) -> None:
        """Look for the dead-letter queue that a redrive policy names. Raises SqsError."""
        if (target := target_of(attributes.get("RedrivePolicy", ""))) is not None:
            await self.look_for(target)

    def _check_redrive(self, name: str, target: str) -> None:
        """Raise SqsError if a queue may not be the dead-letter queue of another one."""
        if not self.exists(target):
            raise invalid(f"RedrivePolicy: the dead-letter queue {target!r} does not exist")
        if is_fifo(target) is not is_fifo(name):
            raise invalid(
                "RedrivePolicy: the dead-letter queue of a FIFO queue is a FIFO queue, that of a standard queue a"
                " standard queue"
            )
        if target == name:
            raise invalid("RedrivePolicy: a queue can't be its own dead-letter queue")
        if is_fifo(target) and (topic := self._queues.definitions.settings(target).topic) is not None:
            raise invalid(
                f"RedrivePolicy: messages can't be moved to the FIFO queue {target!r}, because it has its own topic"
                f" {topic!r}"
            )
        policy = json.loads(self._read(target).attributes.redrive_allow_policy or "{}")
        permission, sources = policy.get("redrivePermission", "allowAll"), policy.get("sourceQueueArns", ())
        if permission == "denyAll" or (permission == "byQueue" and name not in map(queue_of_arn, sources)):
            raise invalid(f"RedrivePolicy: the queue {target!r} refuses dead letters of {name!r}")

    async def _merge(self, name: str, merged: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        """Change the record of a queue, even if another client changes it at the same time."""
        await self._queues.merge(f"queue {name!r}", sqs_key(name), lambda definitions: definitions.sqs(name), merged)
