"""The settings of all queues, followed: what was defined so far is known at the start, what changes is seen by all."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from marq.connection import to_its_end
from marq.core.definitions import Definitions, layer_key
from marq.core.errors import BrokerUnavailable, ConfigError, MarqError
from marq.core.names import check_queue_name
from marq.core.queue import check_document
from marq.definition_log import DefinitionLog, Entry, definition_log
from marq.durations import Duration
from marq.effective_settings import EffectiveSettings
from marq.rosters import check_room
from marq.settings import ClientOptions, ClientSettings
from marq.words import missing, refuse

log = logging.getLogger("marq")

#: Between two attempts to read from a broker that does not answer.
RETRY_S = 0.5
#: How often to make sure that what is known is all that there is, and how long that may take.
HEAR_S = 10.0
HEAR_LIMIT_S = 5.0
#: How often a change is made anew because somebody else changed the same queue at the same moment.
MAX_TRIES = 10
#: Of an error about a foreign record, which may be as long as its sender likes.
_SHOWN_CHARACTERS = 300


class QueueOptions(TypedDict, total=False):
    """What can be said of a queue; None takes what was changed back, so that the other layers count again."""

    lease: Duration | None
    max_attempts: int | str | None
    backoff: Mapping[str, Any] | Sequence[Duration] | None
    errors: Mapping[str, Any] | None
    breaker: Mapping[str, Any] | bool | None
    dead_letter: bool | None
    group: str | None
    topic: str | None
    handler: str | None
    concurrency: int | None
    delay: Duration | None
    delivery: str | None
    spread: int | str | None
    paused: bool | None


class Queues:
    """Reads the definitions of queues and follows them; changes settings at run time.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        options: see :class:`marq.settings.ClientOptions`.
    """

    #: What is known now; replaced by a new one at each start.
    definitions: Definitions

    def __init__(self, bootstrap_servers: str | Sequence[str] | None = None, **options: Unpack[ClientOptions]) -> None:
        self._begin(ClientSettings.read(bootstrap_servers, options, owner="Queues"), makes_topics=True)

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return one for a client that has its settings, and has made the topics, already."""
        queues = cls.__new__(cls)
        queues._begin(settings, makes_topics=False)
        return queues

    def _begin(self, settings: ClientSettings, *, makes_topics: bool) -> None:
        self.definitions = Definitions()
        self._settings = settings
        self._makes_topics = makes_topics
        self._log: DefinitionLog | None = None
        self._following: asyncio.Task[None] | None = None
        self._listeners: dict[object, Callable[[], None]] = {}
        self._position = 0
        #: A moment, of the monotonic clock, at which everything was known that was defined before.
        self.heard_s = 0.0
        self._moved: asyncio.Event
        self._overheard: list[Entry] | None = None
        self._lock: asyncio.Lock | None = None
        self._turn: asyncio.Lock

    async def start(self) -> None:
        """Read all that is defined, to its end, and go on reading; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong, or the right to read is missing.
        """
        async with self._changing():
            if self._following is not None:
                return
            source = definition_log(self._settings)
            if self._makes_topics:
                await source.make()
            self._moved, self._turn = asyncio.Event(), asyncio.Lock()
            try:
                await self._catch_up(source)
            except BaseException:
                await source.stop()
                raise
            self._log = source
            self._following = asyncio.create_task(self._follow(source), name="marq-queues")

    async def stop(self) -> None:
        """Stop following; does nothing when stopped. What was known stays."""
        async with self._changing():
            following, self._following = self._following, None
            source, self._log = self._log, None
            if following is None or source is None:
                return
            await to_its_end(self._end(following, source))

    async def _end(self, following: asyncio.Task[None], source: DefinitionLog) -> None:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        self._moved.set()
        await source.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __getitem__(self, queue: str) -> EffectiveSettings:
        """Return the settings in effect for a queue, defined or not, with durations in seconds."""
        self._started()
        return EffectiveSettings.of(self.definitions(check_queue_name(queue)))

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, in the event loop, after each change; return the call that ends it."""
        key = object()
        self._listeners[key] = callback

        def end() -> None:
            self._listeners.pop(key, None)

        return end

    async def change(self, queue: str, **settings: Unpack[QueueOptions]) -> EffectiveSettings:
        """Change settings of a queue for everybody, durably, and return what holds for it now.

        Durations are seconds or timedeltas; None for a key takes a former change of it back.

        Raises:
            ConfigError: a name or a value is wrong, a topic belongs to another queue, the group has no room for one
                queue more, or the right to write is missing.
            BrokerUnavailable: the change is not known to be made.
            TypeError: there is no such setting.
        """
        self._started()
        check_queue_name(queue)
        refuse("change", {name: value for name, value in settings.items() if name not in QueueOptions.__annotations__})
        return await self._merge(queue, {name: plain(value) for name, value in settings.items()}, keep=True)

    async def pause(self, queue: str) -> EffectiveSettings:
        """Let nothing of a queue be delivered from now on, and return what holds for it; raises as :meth:`change`.

        Consumers and trackers follow within a second or so. What is being worked on ends as ever, what nobody has begun
        waits, and so do delayed messages and those to be redelivered; messages may be sent.
        """
        return await self.change(queue, paused=True)

    async def resume(self, queue: str) -> EffectiveSettings:
        """Deliver messages of a queue again, and return what holds for it; raises as :meth:`change`."""
        settings = await self.change(queue, paused=None)
        # Its definition in a file may say that it is paused.
        return await self.change(queue, paused=False) if settings.paused else settings

    async def reset(self, queue: str) -> EffectiveSettings:
        """Take back all that was changed at run time, and return what holds for the queue now.

        Raises:
            ConfigError: the queue's name is wrong, or the right to write is missing.
            BrokerUnavailable: that is not known to be done.
        """
        self._started()
        return await self._merge(check_queue_name(queue), {}, keep=False)

    async def publish(self, documents: Mapping[bytes, Mapping[str, Any] | None]) -> None:
        """Write layers as they are given, checked, by their keys; return when they are read back.

        Raises:
            ConfigError: the right to write is missing.
            BrokerUnavailable: they are not known to be written.
        """
        source = self._started()
        async with self._turn:
            if documents:
                await self._write(source, documents)

    async def replace(self, documents: Mapping[bytes, Mapping[str, Any] | None]) -> None:
        """Write layers as :meth:`publish`; where somebody else does so at the same moment, what that one says holds.

        Raises:
            ConfigError: the right to write is missing.
            BrokerUnavailable: they are not known to be written.
        """
        source = self._started()
        async with self._turn:
            for _ in range(MAX_TRIES):
                if not documents:
                    return
                between = await self._write(source, documents)
                documents = {
                    entry.key: _document(entry.value)
                    for entry in between
                    if entry.key is not None and entry.key in documents and _fold(Definitions(), entry) is None
                }

    async def hear(self, limit_s: float) -> None:
        """Return when everything is known that was defined before this call.

        Raises:
            BrokerUnavailable: that is not so after the limit.
            ConfigError: the right to read is missing.
        """
        source, heard_s = self._started(), time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await self._read_past(await source.end() - 1)
        except TimeoutError:
            raise BrokerUnavailable(
                f"the definitions of queues could not be read within {limit_s:g} s (topic {self._settings.names.queues}"
                f" at {self._settings.bootstrap_servers})"
            ) from None
        self.heard_s = max(self.heard_s, heard_s)

    def __getattr__(self, name: str) -> Any:
        raise missing("Queues", name)

    # --- following ----------------------------------------------------------------------------------------------------

    async def _catch_up(self, source: DefinitionLog) -> None:
        definitions, self._position = Definitions(), 0
        limit_s = self._settings.connect_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                heard_s = time.monotonic()
                end = await source.start()
                while self._position < end:
                    entries, self._position = await source.read()
                    self._fold(definitions, entries)
        except TimeoutError:
            raise BrokerUnavailable(
                f"topic {self._settings.names.queues} at {self._settings.bootstrap_servers} could not be read to its"
                f" end within {limit_s:g} s: check that the broker runs"
            ) from None
        self.definitions = definitions
        self.heard_s = heard_s

    async def _follow(self, source: DefinitionLog) -> None:
        """Go on reading for ever: while that fails, what is known counts."""
        failing = False
        while True:
            try:
                entries, position = await source.read()
            except Exception as error:  # a reader that ended would leave us with old settings, and nobody would know
                if not failing:
                    log.warning("definitions of queues can't be read, trying again: %r", error)
                failing = True
                await asyncio.sleep(RETRY_S)
                continue
            changed = self._fold(self.definitions, entries)
            if self._overheard is not None:
                self._overheard.extend(entries)
            self._position = position
            self._moved.set()
            if changed:
                self._tell()
            failing = not await self._make_sure(source, failing)

    async def _make_sure(self, source: DefinitionLog, failing: bool) -> bool:
        """Find out now and then whether something was defined that has not been read; return whether that is known.

        A read that brings nothing tells nothing: it does so, too, while no broker answers.
        """
        began_s = time.monotonic()
        if began_s - self.heard_s < HEAR_S:
            return True
        try:
            async with asyncio.timeout(HEAR_LIMIT_S):
                end = await source.end()
        except Exception as error:  # as above
            if not failing:
                log.warning("whether definitions of queues have changed is not known, trying again: %r", error)
            return False
        if self._position >= end:
            self.heard_s = began_s
        return True

    def _fold(self, definitions: Definitions, entries: Sequence[Entry]) -> bool:
        """Fold what can be read, and return whether there was such a record."""
        errors = [(entry, error) for entry in entries if (error := _fold(definitions, entry)) is not None]
        for entry, error in errors:
            log.warning(
                "%s/0/%s is no definition of a queue and is passed over: %.*s",
                self._settings.names.queues,
                entry.offset,
                _SHOWN_CHARACTERS,
                error,
            )
        return len(errors) < len(entries)

    def _tell(self) -> None:
        for callback in list(self._listeners.values()):
            try:
                callback()
            except Exception:
                log.exception("a listener to changes of queues failed")

    # --- changing -----------------------------------------------------------------------------------------------------

    async def _merge(self, queue: str, wanted: Mapping[str, Any], *, keep: bool) -> EffectiveSettings:
        """Write the queue's layer of changes, with its former keys or without.

        Who writes second has not seen what the first one said: so it takes that up and writes once more.
        """
        await self.merge(
            f"queue {queue!r}",
            layer_key("change", queue),
            lambda definitions: definitions.layer("change", queue),
            lambda former: self._merged(queue, former if keep else {}, wanted),
        )
        return EffectiveSettings.of(self.definitions(queue))

    async def merge(
        self,
        what: str,
        key: bytes,
        read: Callable[[Definitions], Mapping[str, Any] | None],
        merged: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        """Write one layer, ``merged`` from what it was, until nobody else wrote in between; empty takes it away.

        Raises:
            ConfigError: the right to write is missing, or ``merged`` finds something wrong.
            BrokerUnavailable: it is not known to be written.
        """
        source = self._started()
        async with self._turn:
            former = read(self.definitions) or {}
            for _ in range(MAX_TRIES):
                document = merged(former)
                if document == (read(self.definitions) or {}):
                    return
                others = Definitions()
                between = await self._write(source, {key: document or None})
                folded = [_fold(others, entry) is None for entry in between if entry.key == key]
                if not any(folded):
                    return
                former = read(others) or {}
        raise MarqError(
            f"{what}: somebody else changed its settings each time of {MAX_TRIES}; look at what they are now"
            " and change them again"
        )

    def _merged(self, queue: str, former: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        document = {name: value for name, value in {**former, **wanted}.items() if value is not None}
        document = check_document(document, f"queue {queue!r}")
        later = self.definitions.after({layer_key("change", queue): document})
        self._check_topic(queue, later.settings(queue).topic)
        group = later.group(queue)
        if group is not None and group != self.definitions.group(queue):
            check_room(group, later.queues_of(group))
        return document

    def _check_topic(self, queue: str, topic: str | None) -> None:
        if topic is None:
            return
        names = self._settings.names
        if names.is_own_topic(topic):
            raise ConfigError(
                f"queue {queue!r}: topic {topic!r} is marq's own; a queue without a topic gets its messages from"
                f" {names.messages}"
            )
        owner = self.definitions.queue_of_topic(topic)
        if owner not in (None, queue):
            raise ConfigError(
                f"queue {queue!r}: topic {topic!r} belongs to queue {owner!r}; give each queue another topic, or take"
                f" it from {owner!r} first"
            )

    async def _write(self, source: DefinitionLog, documents: Mapping[bytes, Mapping[str, Any] | None]) -> list[Entry]:
        """Write, wait until that is read back, and return the records since the call that stand before ours.

        Of each key: before our record with that key.
        """
        self._overheard = overheard = list[Entry]()
        try:
            offsets = await source.write({key: _encoded(document) for key, document in documents.items()})
            last = max(offsets.values())
            await self._read_past(last)
        finally:
            self._overheard = None
        return [entry for entry in overheard if entry.offset < offsets.get(entry.key or b"", last)]

    async def _read_past(self, offset: int) -> None:
        limit_s = self._settings.request_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                while self._position <= offset and self._following is not None:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            pass
        if self._position <= offset:
            raise BrokerUnavailable(
                f"what was written to topic {self._settings.names.queues} at {self._settings.bootstrap_servers} was not"
                f" read back within {limit_s:g} s: it holds, but whether this client knows it is unknown"
            )

    def _started(self) -> DefinitionLog:
        if self._log is None:
            raise MarqError("the queues are not started: use `async with` or await start()")
        return self._log

    def _changing(self) -> asyncio.Lock:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock


def _fold(definitions: Definitions, entry: Entry) -> ConfigError | None:
    try:
        definitions.fold(entry.key, _document(entry.value))
    except ConfigError as error:
        return error
    return None


def _document(value: bytes | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"its value is no JSON: {error}") from error


def _encoded(document: Mapping[str, Any] | None) -> bytes | None:
    return None if document is None else json.dumps(document, ensure_ascii=False).encode()


def plain(value: object) -> Any:
    """Return a setting as it stands in a document: durations in seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
