"""Follows the queues topic: reads it to its end at the start, then continues, and occasionally writes to it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marq.kafka.records import Row
from marq.queues.definition_log import DefinitionLog, definition_log
from marq.queues.ordered_changes import check_order
from marq.queues.subscription_start import start_document, starting
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, start_key
from marq.wire.errors import BrokerUnavailable, ConfigError

log = logging.getLogger("marq")

#: Pause before the next read if the broker does not answer.
RETRY_S = 0.5
#: Interval and limit of the check that all definitions are known.
SYNC_S = 10.0
SYNC_LIMIT_S = 5.0
#: Maximum length of a logged error about a foreign record, which may quote the whole record.
_SHOWN_CHARACTERS = 300
#: Longest sleep until the end of a pause: the wall clock may be set, and a suspended machine does not count its sleep.
PAUSE_CHECK_S = 60.0
#: For how long records are kept to resolve conflicting writes, which take less time, and how many of them.
RECENT_S = 5.0
MAX_RECENT = 100


class Overheard(NamedTuple):
    """Records that other clients wrote during a write: for each key, before and after our own record."""

    before: list[Row]
    after: list[Row]


class DefinitionsFollower:
    """Keeps the definitions up to date from its start to its stop; ``notify`` is called after each change."""

    def __init__(self, settings: ClientSettings, notify: Callable[[], None]) -> None:
        self._settings = settings
        self._where = f"topic {settings.names.queues} at {settings.bootstrap_servers}"
        self._notify = notify
        #: The current definitions; a start replaces them.
        self.definitions = Definitions()
        #: A time of the monotonic clock: all definitions from before it are known.
        self.synced_s = 0.0
        self._log: DefinitionLog
        self._position = 0
        self._following: asyncio.Task[None] | None = None
        #: Waits for the end of the next pause, if one has an end.
        self._resuming: asyncio.Task[None] | None = None
        #: Set after each read.
        self._moved: asyncio.Event
        #: The records read since a write began.
        self._overheard: list[Row] | None = None
        #: The last records, with the times of the monotonic clock at which they were read.
        self._recent: deque[tuple[float, Row]] = deque(maxlen=MAX_RECENT)

    async def start(self, *, create_topics: bool) -> None:
        """Read to the end of the log, and keep following it; same errors as :meth:`marq.queues.queues.Queues.start`."""
        self._log = source = definition_log(self._settings)
        self._moved = asyncio.Event()
        if create_topics:
            await source.make()
        try:
            await self._catch_up(source)
        except BaseException:
            await source.stop()
            raise
        self._following = asyncio.create_task(self._follow(source), name="marq-queues")
        self._wait_for_pauses()

    async def stop(self) -> None:
        following, self._following = self._following, None
        assert following is not None
        tasks = [task for task in (following, self._resuming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._moved.set()
        await self._log.stop()

    async def sync(self, limit_s: float) -> None:
        """Return when all earlier definitions are known; same errors as :meth:`marq.queues.queues.Queues.sync`."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await self._read_past(await self._log.end() - 1)
        except TimeoutError:
            raise BrokerUnavailable(
                f"the definitions of queues could not be read within {limit_s:g} s ({self._where})"
            ) from None
        self.synced_s = max(self.synced_s, began_s)

    async def check_order(self, after: Definitions) -> None:
        """Refuse a change to these definitions; same errors as :func:`marq.queues.ordered_changes.check_order`."""
        await check_order(self._log, self.definitions, after)

    async def new_starts(self, after: Definitions) -> dict[bytes, Mapping[str, Any]]:
        """Return the records to write before a change (see :mod:`marq.queues.subscription_start`).

        Raises:
            ConfigError: the permission to describe a topic is missing.
            BrokerUnavailable: the end of a topic is not known.
        """
        return {
            start_key(queue): start_document(
                topic, await self._log.ends_of(topic), self.wall_s, self.definitions.begin(queue)
            )
            for queue, topic in starting(self.definitions, after)
        }

    def recent(self, key: bytes) -> list[Row]:
        """Return the records of a key that were read in the last seconds."""
        since_s = time.monotonic() - RECENT_S
        return [entry for read_s, entry in self._recent if entry.key == key and read_s >= since_s]

    async def write(self, documents: Mapping[bytes, Mapping[str, Any] | None]) -> Overheard:
        """Write, wait until that is read back, and return the records that other clients wrote since the call.

        Only one write may be in progress.
        """
        self._overheard = overheard = list[Row]()
        try:
            offsets = await self._log.write({key: encoded(document) for key, document in documents.items()})
            last = max(offsets.values())
            await self._read_past(last)
        finally:
            self._overheard = None
        before = [entry for entry in overheard if entry.offset < offsets.get(entry.key or b"", last)]
        after = [entry for entry in overheard if entry.offset > offsets.get(entry.key or b"", last)]
        return Overheard(before, after)

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
                f"what was written to {self._where} was not"
                f" read back within {limit_s:g} s: it is durable, but this client may not have applied it"
            )

    async def _catch_up(self, source: DefinitionLog) -> None:
        definitions, self._position = Definitions(), 0
        limit_s = self._settings.connect_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                began_s = time.monotonic()
                end = await source.start()
                while self._position < end:
                    entries, self._position = await source.read()
                    self._fold(definitions, entries)
        except TimeoutError:
            raise BrokerUnavailable(
                f"{self._where} could not be read to its end within {limit_s:g} s: check that the broker runs"
            ) from None
        self.definitions = definitions
        self.synced_s = began_s

    async def _follow(self, source: DefinitionLog) -> None:
        """Continue to read; while that fails, the known definitions stay valid."""
        failing = False
        while True:
            try:
                entries, position = await source.read()
            except Exception as error:  # a reader that ended would leave this client with old settings
                if not failing:
                    log.warning("cannot read the definitions of queues, retrying: %r", error)
                failing = True
                await asyncio.sleep(RETRY_S)
                continue
            changed = self._fold(self.definitions, entries)
            if self._overheard is not None:
                self._overheard.extend(entries)
            read_s = time.monotonic()
            self._recent.extend((read_s, entry) for entry in entries)
            self._position = position
            self._moved.set()
            if changed:
                self._wait_for_pauses()
                self._notify()
            failing = not await self._make_sure(source, failing)

    async def _make_sure(self, source: DefinitionLog, failing: bool) -> bool:
        """Check now and then that all definitions are read; return whether that worked.

        An empty read does not prove it, because reads are also empty while no broker answers.
        """
        began_s = time.monotonic()
        if began_s - self.synced_s < SYNC_S:
            return True
        try:
            async with asyncio.timeout(SYNC_LIMIT_S):
                end = await source.end()
        except Exception as error:  # as above
            if not failing:
                log.warning("cannot look for changed definitions of queues, retrying: %r", error)
            return False
        if self._position >= end:
            self.synced_s = began_s
        return True

    def _fold(self, definitions: Definitions, entries: Sequence[Row]) -> bool:
        """Fold the readable records; return whether there was one."""
        errors = [(entry, error) for entry in entries if (error := fold(definitions, entry)) is not None]
        for entry, error in errors:
            log.warning(
                "%s/0/%s is not a definition of a queue and is skipped: %.*s",
                self._settings.names.queues,
                entry.offset,
                _SHOWN_CHARACTERS,
                error,
            )
        if entries:
            definitions.end_pauses(self._now_ms())
        return len(errors) < len(entries)

    # --- pauses with an end -------------------------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """The seconds since 1970, by the clock that ends pauses."""
        return self._log.wall_s()

    def _now_ms(self) -> int:
        return round(self._log.wall_s() * 1000)

    def _wait_for_pauses(self) -> None:
        """Wait for the end of the next pause, which may have changed; no task runs if no pause has an end."""
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if self.definitions.next_pause_end_ms is not None:
            self._resuming = asyncio.create_task(self._end_pauses(), name="marq-pauses")

    async def _end_pauses(self) -> None:
        definitions = self.definitions
        while (end_ms := definitions.next_pause_end_ms) is not None:
            left_s = max(end_ms - self._now_ms(), 1) / 1000
            await self._log.sleep(min(left_s, PAUSE_CHECK_S))
            if definitions.end_pauses(self._now_ms()):
                self._notify()


def fold(definitions: Definitions, entry: Row) -> ConfigError | None:
    """Fold a record into definitions; return its error."""
    try:
        definitions.fold(entry.key, document_of(entry.value), entry.offset)
    except ConfigError as error:
        return error
    return None


def document_of(value: bytes | None) -> Any:
    """Return the document of a record's value. Raises ConfigError if it is not valid JSON."""
    try:
        return None if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"its value is not valid JSON: {error}") from error


def encoded(document: Mapping[str, Any] | None) -> bytes | None:
    """Return a document as the value of a record."""
    return None if document is None else json.dumps(document, ensure_ascii=False).encode()
