"""The settings of all queues, followed while running, and changed at run time for all clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, Unpack

from marq.client.lifecycle import Lifecycle
from marq.kafka.queue_positions import check_room
from marq.kafka.records import Row
from marq.queues.concurrent_changes import with_changes
from marq.queues.following import DefinitionsFollower, document_of, fold
from marq.queues.subscription_start import overruled
from marq.settings.client import ClientOptions, ClientSettings
from marq.settings.combinations import (
    LEASE_KEYS,
    ORDERING_KEYS,
    TOPIC_KEYS,
    check_lease,
    check_ordering,
    check_start,
    check_topic,
)
from marq.settings.definitions import Definitions, layer_key
from marq.settings.durations import Duration, duration_ms, pause_end, plain
from marq.settings.effective_settings import EffectiveSettings
from marq.settings.hints import refuse
from marq.settings.queue import MAX_SECONDS, check_document
from marq.settings.queue_options import QueueOptions
from marq.wire.errors import MarqError
from marq.wire.names import check_queue_name

log = logging.getLogger("marq")

#: Attempts at a change that conflicts with changes by other clients.
MAX_TRIES = 10


class Queues(Lifecycle[DefinitionsFollower]):
    """Reads the definitions of queues and follows them; changes settings at run time.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def __init__(self, bootstrap_servers: str | Sequence[str] | None = None, **options: Unpack[ClientOptions]) -> None:
        self._begin(ClientSettings.read(bootstrap_servers, options, owner="Queues"), create_topics=True)

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return one for a client that already has its settings and has created the topics."""
        queues = cls.__new__(cls)
        queues._begin(settings, create_topics=False)
        return queues

    def _begin(self, settings: ClientSettings, *, create_topics: bool) -> None:
        super().__init__("the Queues client")
        self._settings = settings
        self._create_topics = create_topics
        self._follower = DefinitionsFollower(settings, self._notify)
        self._listeners: dict[object, Callable[[], None]] = {}
        self._writing: asyncio.Lock

    async def _open(self, opened: AsyncExitStack) -> DefinitionsFollower:
        self._writing = asyncio.Lock()
        await self._follower.start(create_topics=self._create_topics)
        opened.push_async_callback(self._follower.stop)
        return self._follower

    @property
    def definitions(self) -> Definitions:
        """The current definitions, even after a stop."""
        return self._follower.definitions

    @property
    def synced_s(self) -> float:
        """Monotonic time up to which all definitions are known."""
        return self._follower.synced_s

    def __getitem__(self, queue: str) -> EffectiveSettings:
        """Return the settings in effect for a queue, defined or not, with durations in seconds."""
        self._started()
        return EffectiveSettings.of(self.definitions(check_queue_name(queue)))

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` in the event loop after each change; return a function that ends the calls."""
        key = object()
        self._listeners[key] = callback

        def end() -> None:
            self._listeners.pop(key, None)

        return end

    async def change(self, queue: str, **settings: Unpack[QueueOptions]) -> EffectiveSettings:
        """Change settings of a queue for all clients, durably, and return the settings in effect.

        Durations are seconds or timedeltas; None for a key removes an earlier change to it.

        Raises:
            ConfigError: a name or a value is wrong, the group has no room for another queue or already reads its topic,
                an ordered queue has messages that would lose their order, or the permission to write is missing.
            BrokerUnavailable: it is unknown whether the change was made.
            TypeError: unknown setting.
        """
        self._started()
        check_queue_name(queue)
        refuse("change", {name: value for name, value in settings.items() if name not in QueueOptions.__annotations__})
        return await self._merge(queue, {name: plain(value) for name, value in settings.items()}, keep=True)

    async def define(
        self, queue: str, records: Mapping[bytes, Mapping[str, Any]], **settings: Unpack[QueueOptions]
    ) -> None:
        """Change settings as :meth:`change` does, together with other records about the queue.

        Clients read all of it or nothing, even after a crash. If another client writes one of the records at the same
        time, that client wins. Same errors as :meth:`change`.
        """
        self._started()
        former = self.definitions.layer("change", check_queue_name(queue)) or {}
        layer = self._merged(queue, former, {name: plain(value) for name, value in settings.items()})
        documents = {**records, layer_key("change", queue): layer}
        await self._prepare(self.definitions.after(documents))
        await self.replace(documents)

    async def pause(self, queue: str, duration: Duration | None = None) -> EffectiveSettings:
        """Pause the delivery of a queue, and return the settings in effect; same errors as :meth:`change`.

        The pause ends after ``duration`` (seconds or a timedelta, up to a year), or with :meth:`resume`. The end time
        is part of the setting, so no further call is needed. It replaces the end time of an earlier pause. Each
        consumer and tracker uses its own clock, so if clocks differ, some resume earlier than others.

        Consumers and trackers apply the pause within about a second. Messages that are being processed are not
        affected. Messages that are waiting, delayed or due for redelivery wait until the pause ends. Producers may
        continue to send.
        """
        follower = self._started()
        if duration is None:
            return await self.change(queue, paused=True)
        duration_s = duration_ms("duration", duration, least_ms=1, most_ms=MAX_SECONDS * 1000) / 1000
        return await self.change(queue, paused=pause_end(follower.wall_s + duration_s))

    async def resume(self, queue: str) -> EffectiveSettings:
        """Resume the delivery of a queue, and return the settings in effect; same errors as :meth:`change`."""
        settings = await self.change(queue, paused=None)
        # Its definition in a file may pause it.
        return await self.change(queue, paused=False) if settings.paused else settings

    async def reset(self, queue: str) -> EffectiveSettings:
        """Remove all changes made at run time, and return the settings in effect.

        Raises:
            ConfigError: the queue's name is wrong, or the permission to write is missing.
            BrokerUnavailable: it is unknown whether they were removed.
        """
        self._started()
        return await self._merge(check_queue_name(queue), {}, keep=False)

    async def publish(self, documents: Mapping[bytes, Mapping[str, Any] | None]) -> None:
        """Write checked layers by their keys; return when they are read back.

        Raises:
            ConfigError: the permission to write is missing, or an ordered queue with messages would change.
            BrokerUnavailable: it is unknown whether they were written.
        """
        follower = self._started()
        await self._prepare(self.definitions.after(documents))
        async with self._writing:
            if documents:
                await follower.write(documents)

    async def replace(self, documents: Mapping[bytes, Mapping[str, Any] | None]) -> None:
        """Write layers like :meth:`publish`; if another client writes one at the same time, that client wins.

        Raises:
            ConfigError: the permission to write is missing.
            BrokerUnavailable: it is unknown whether they were written.
        """
        follower = self._started()
        async with self._writing:
            for _ in range(MAX_TRIES):
                if not documents:
                    return
                before, after = await follower.write(documents)
                # The client that wrote a record after ours wins anyway.
                later = {entry.key for entry in _readable(after)}
                documents = {
                    entry.key: document_of(entry.value)
                    for entry in _readable(before)
                    if entry.key in documents.keys() - later
                }

    async def sync(self, limit_s: float) -> None:
        """Return when all earlier definitions are known.

        Raises:
            BrokerUnavailable: not within the time limit.
            ConfigError: the permission to read is missing.
        """
        await self._started().sync(limit_s)

    def _notify(self) -> None:
        for callback in list(self._listeners.values()):
            try:
                callback()
            except Exception:
                log.exception("a listener to changes of queues failed")

    # --- changing -----------------------------------------------------------------------------------------------------

    async def _merge(self, queue: str, wanted: Mapping[str, Any], *, keep: bool) -> EffectiveSettings:
        """Write the queue's layer of changes, with or without its former keys."""
        await self.merge(
            f"queue {queue!r}",
            layer_key("change", queue),
            lambda definitions: definitions.layer("change", queue),
            lambda former: self._merged(queue, former if keep else {}, wanted),
        )
        return EffectiveSettings.of(self.definitions(queue))

    async def _prepare(self, after: Definitions) -> None:
        """Check a change, and write the starts of new queues before it."""
        follower, before = self._started(), self.definitions
        for queue in after.names():
            one, other = before.settings(queue), after.settings(queue)
            if (one.topic, before.group(queue)) != (other.topic, after.group(queue)):
                check_topic(after, queue, self._settings.names)
        await follower.check_order(after)
        await self._write_starts(await follower.new_starts(after))

    async def _write_starts(self, documents: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Write starts of queues; write those of earlier writers again, because compaction keeps the last record."""
        follower = self._started()
        async with self._writing:
            for _ in range(MAX_TRIES):
                if not documents:
                    return
                _, after = await follower.write(documents)
                # The writer of a later record writes the deciding one again.
                later = {entry.key for entry in _readable(after)}
                deciding = overruled(self.definitions, documents)
                documents = {key: document for key, document in deciding.items() if key not in later}

    async def merge(
        self,
        what: str,
        key: bytes,
        read: Callable[[Definitions], Mapping[str, Any] | None],
        merged: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> bool:
        """Write one layer, ``merged`` from the former one; retry if another client wrote in between; {} removes it.

        Returns whether it was written: not if the layer was like that before.

        Raises:
            ConfigError: a permission is missing, or ``merged`` finds something wrong.
            BrokerUnavailable: it is unknown whether it was written.
        """
        follower = self._started()
        former = read(self.definitions) or {}
        if (document := merged(former)) == former:
            # Another client may have changed the layer, and this client may not have read that yet.
            await follower.sync(self._settings.request_timeout_ms / 1000)
            document = merged(read(self.definitions) or {})
        await self._prepare(self.definitions.after({key: document or None}))
        async with self._writing:
            former = read(self.definitions) or {}
            known = [*_documents(key, read, follower.recent(key)), former]
            for attempt in range(MAX_TRIES):
                document = merged(former)
                if document == (read(self.definitions) or {}):
                    return attempt > 0
                overheard = await follower.write({key: document or None})
                before, after = [_documents(key, read, entries) for entries in overheard]
                if not before:
                    return True
                former = with_changes(former, known, before)
                known.append(document)
                former = with_changes(former, known, after)
        raise MarqError(
            f"{what}: other clients changed its settings during each of {MAX_TRIES} attempts; look at the current"
            " settings and change them again"
        )

    def _merged(self, queue: str, former: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        document = {name: value for name, value in {**former, **wanted}.items() if value is not None}
        document = check_document(document, f"queue {queue!r}")
        later = self.definitions.after({layer_key("change", queue): document})
        if wanted.keys() & LEASE_KEYS:
            # Other changes, like a pause, are possible even if a race of two writers left such a combination.
            check_lease(later, queue)
        if wanted.keys() & ORDERING_KEYS:
            check_ordering(later, queue)
        if wanted.keys() & TOPIC_KEYS:
            check_topic(later, queue, self._settings.names)
        if "start" in wanted:
            check_start(later, queue)
        group = later.group(queue)
        if group is not None and group != self.definitions.group(queue):
            check_room(group, later.queues_of(group))
        return document


def _readable(entries: Iterable[Row]) -> list[Row]:
    """Return the records that clients do not ignore."""
    return [entry for entry in entries if fold(Definitions(), entry) is None]


def _documents(
    key: bytes, read: Callable[[Definitions], Mapping[str, Any] | None], entries: Iterable[Row]
) -> list[Mapping[str, Any]]:
    """Return the readable documents of one key."""
    definitions = Definitions()
    return [read(definitions) or {} for entry in entries if entry.key == key and fold(definitions, entry) is None]
