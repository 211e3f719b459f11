"""The in-memory broker for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Self, Unpack

from marq.client.codecs import Codec, check_codec
from marq.client.dead_letter import time_of
from marq.client.send_options import SentHeader, header_value
from marq.consumer.consumer import Consumer
from marq.core.storage.rows import HELD, State
from marq.dead_letters.log import Stored
from marq.handlers.lifespan import Lifespan, is_lifespan
from marq.kafka.records import Row
from marq.producer.producer import Producer
from marq.queues.following import encoded
from marq.queues.ordered_changes import order_changes, refusal
from marq.queues.queues import Queues
from marq.queues.schedules import Schedules
from marq.settings.client import ClientSettings
from marq.settings.combinations import check_combinations, check_queue, check_topic
from marq.settings.definitions import DEFAULTS_KEY, layer_key
from marq.settings.durations import Duration, duration_ms, plain
from marq.settings.queue import check_defaults, check_document
from marq.settings.queue_options import QueueOptions
from marq.settings.schedule_definitions import LAYERS as SCHEDULE_LAYERS
from marq.settings.schedule_definitions import check_schedule, check_schedule_name
from marq.testing.memory import Memory, forget_memory, memory_at
from marq.testing.namespace import Namespace
from marq.testing.views import DeadLetter, SeenMessage, dead_letter, seen
from marq.testing.worker import Handled, MemoryWorker
from marq.wire.dead_letter_notes import is_note
from marq.wire.errors import ConfigError
from marq.wire.markers import Payload, Source
from marq.wire.names import check_queue_name, check_topic_name, is_scheduled
from marq.wire.record_headers import record_id

#: How long calls wait, in real seconds, for running handlers; enough for many messages on a slow machine.
DEFAULT_LIMIT_S = 60.0
#: The maximum time for one call of advance().
_MAX_ADVANCE_MS = 10 * 365 * 24 * 3600 * 1000

_numbers = itertools.count(1)


class Broker:
    """Topics, trackers and virtual time in memory; clients connect to its :attr:`address`.

    Time passes only in calls of this class, and in clients that wait for messages with a limit. The ``limit`` of a call
    is how long it waits for running handlers, in real seconds.

    Args:
        name: the address is ``memory://NAME`` (default: a new name). prefix: like MARQ_PREFIX. queues: settings of
        queues by name, as in the tables of marq.toml. schedules: schedules by name, likewise; their messages are sent
        as virtual time advances. defaults: settings of all queues, as [defaults] of marq.toml. settings: [settings] of
        marq.toml, of which ``handlers`` has an effect: the modules whose handlers :meth:`run` and :meth:`worker` run
        if they are called without arguments.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        prefix: str | None = None,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        schedules: Mapping[str, Mapping[str, Any]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._memory: Memory = memory_at(f"memory://{name or f'broker-{next(_numbers)}'}")
        self._prefix = {} if prefix is None else {"prefix": prefix}
        self._overrides: dict[Lifespan, Any] = {}
        self._modules = _module_names(settings or {})
        #: Reads and changes the settings of queues; started within ``async with``.
        self.queues = Queues(self.address, **self._prefix)  # type: ignore[arg-type]
        #: Reads and changes schedules; started with :attr:`queues`.
        self.schedules = Schedules.of(self.queues)
        if defaults is not None:
            for_all = check_defaults(defaults, "[defaults]")
            check_combinations(self._namespace.definitions.after({DEFAULTS_KEY: for_all}))
            self._namespace.define(DEFAULTS_KEY, encoded(for_all))
        for queue, table in (queues or {}).items():
            self._define(queue, table)
        for schedule, document in (schedules or {}).items():
            checked = check_schedule(document, f"schedule {check_schedule_name(schedule)!r}", whole=True)
            self._namespace.define(layer_key(SCHEDULE_LAYERS[0], schedule), encoded(checked))

    @property
    def address(self) -> str:
        """The clients' ``bootstrap_servers`` or MARQ_BOOTSTRAP_SERVERS."""
        return self._memory.address

    @property
    def now(self) -> datetime:
        """The virtual time (UTC)."""
        return time_of(self._memory.clock.wall_ms)

    async def __aenter__(self) -> Self:
        self._memory.enter()
        await self.queues.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.queues.stop()
        self.close()

    def close(self) -> None:
        """Free the address; warn about clients that were left running."""
        forget_memory(self._memory)
        self._memory.warn_of_running()

    # --- clients and settings -----------------------------------------------------------------------------------------

    def producer(self, **options: Any) -> Producer:
        """Create a producer; the arguments are those of :class:`marq.Producer`."""
        return Producer(self.address, **{**self._prefix, **options})

    def consumer(self, queue: str | None = None, **options: Any) -> Consumer:
        """Create a consumer; the arguments are those of :class:`marq.Consumer`."""
        return Consumer(queue, self.address, **{**self._prefix, **options})

    def define(self, queue: str, **settings: Unpack[QueueOptions]) -> None:
        """Replace a queue's settings, as its table in marq.toml does; needs no event loop.

        Raises:
            ConfigError: a name or a value is wrong.
        """
        self._define(queue, settings)

    def _define(self, queue: str, settings: Mapping[str, Any]) -> None:
        check_queue_name(queue)
        document = check_document({name: plain(value) for name, value in settings.items()}, f"queue {queue!r}")
        key = layer_key("file", queue)
        after = self._namespace.definitions.after({key: document})
        check_queue(after, queue)
        check_topic(after, queue, self._namespace.names)
        for changed, setting in order_changes(self._namespace.definitions, after):
            if messages := self._namespace.messages_of(changed):
                raise ConfigError(refusal(changed, setting, messages))
        self._namespace.define(key, encoded(document))

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic, for example as a queue's own topic.

        Raises:
            ConfigError: it already exists, or the name is not allowed.
        """
        self._memory.make_topic(check_topic_name(name), partitions)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records; it may be created again.

        Raises:
            ConfigError: :meth:`create_topic` has not created it.
        """
        self._memory.delete_topic(name)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[SentHeader] = (),
        partition: int | None = None,
    ) -> str:
        """Append a record as a plain Kafka producer does, and return its id."""
        log = self._memory.topics.get(topic)
        if log is None:
            raise ConfigError(f"topic {topic!r} does not exist: there are {', '.join(sorted(self._memory.topics))}")
        if partition is None:
            partition = log.next_partition(key)
        encoded = [(name, header_value(name, text)) for name, text in headers]
        offset = log.append(partition, self._memory.clock.wall_ms, key, value, encoded)
        return record_id(Source(topic, partition), offset)

    # --- time ---------------------------------------------------------------------------------------------------------

    async def settle(self, *, limit: float = DEFAULT_LIMIT_S) -> None:
        """Return when everything has settled: handlers have returned, and outcomes are written.

        Raises:
            Unfinished: a handler is still running.
        """
        self._memory.enter()
        await self._memory.passage.settle(limit)

    async def advance(self, time: Duration, *, settle: bool = True, limit: float = DEFAULT_LIMIT_S) -> None:
        """Advance virtual time (seconds or timedelta) step by step, and run all events on the way.

        Each step waits for running handlers. With ``settle=False`` it does not, to test what happens while a handler
        hangs.

        Raises:
            Unfinished: a handler is still running.
        """
        by_ms = duration_ms("time", time, most_ms=_MAX_ADVANCE_MS)
        self._memory.enter()
        await self._memory.passage.advance(by_ms, limit, settle=settle)

    async def drain(self, *queues: str, later: bool = False, limit: float = DEFAULT_LIMIT_S) -> None:
        """Return when these queues, or all, have no waiting messages and none in flight.

        With ``later`` time passes until delayed messages have been processed, too.

        Raises:
            Unfinished: messages are left, for example because they have no consumer; the text names them.
        """
        names = [check_queue_name(queue) for queue in queues]
        await self._until(
            lambda: self._left(names or sorted(self._namespace.known_queues()), later=later), limit, later=later
        )

    async def _until(self, left: Callable[[], str], limit: float, *, later: bool) -> None:
        self._memory.enter()
        await self._memory.passage.until(left, limit, later=later)

    # --- handlers -----------------------------------------------------------------------------------------------------

    def override(self, lifespan: Lifespan, state: Any) -> None:
        """Make a function with ``@marq.lifespan`` yield ``state`` in workers that start from now on.

        The function does not run.

        Raises:
            ConfigError: the function is not a lifespan.
        """
        if not is_lifespan(lifespan):
            raise ConfigError(f"override({lifespan!r}): expected a function with @marq.lifespan")
        self._overrides[lifespan] = state

    def worker(self, *handlers: Handled) -> MemoryWorker:
        """Return a worker that runs handlers within ``async with``.

        Args:
            handlers: functions with ``@marq.handler``, or modules that contain some (default: the modules in
                ``handlers`` of [settings]). Handlers named by the settings of queues run, too, as in every worker. So
                do the lifespans and middleware of these modules, and of the modules of the functions.
        """
        return MemoryWorker(self._settings, self._namespace, handlers, self._overrides, self._modules)

    async def run(self, *handlers: Handled, raise_errors: bool = False, limit: float = DEFAULT_LIMIT_S) -> None:
        """Run handlers until their queues are empty, letting time pass for retries, backoff and dead letters.

        With ``raise_errors`` the run stops at the first exception other than ``Retry`` and ``Reject``, and raises it:
        no further message is handled, and the failed one is not retried.

        Raises:
            Unfinished: a handler is still running, or messages are left.
            MarqError: the worker can no longer receive.
        """
        worker = self.worker(*handlers)
        worker.raises = raise_errors
        async with worker:

            def left() -> str:
                worker.check()
                return self._left(worker.queues, later=True)

            await self._until(left, limit, later=True)

    def _left(self, queues: Iterable[str], *, later: bool) -> str:
        texts = []
        for queue in queues:
            counts = {
                "waiting": sum(1 for _ in self._namespace.waiting(queue)),
                "in flight": len(self.in_flight(queue)),
                # A schedule always has a delayed message.
                "delayed": sum(not is_scheduled(message.id) for message in self.delayed(queue)) if later else 0,
            }
            if any(counts.values()):
                left = [f"{count} {name}" for name, count in counts.items() if count]
                texts.append(f"queue {queue!r}: {', '.join(left)}")
        return "; ".join(texts)

    # --- messages -----------------------------------------------------------------------------------------------------

    def sent(self, queue: str, *, codec: Codec | None = None) -> list[SeenMessage]:
        """Return all messages ever sent to a queue, except by schedules, in the order of each partition.

        Messages sent with a time or a deduplication id come last; duplicates and cancelled ones are included.
        """
        namespace, view = self._namespace, self._view(queue, codec)
        records = [
            message
            for source in namespace.sources(queue)
            for record in namespace.records(queue, source)
            if (message := view(source, record)).id == record_id(source.log, record.offset)
        ]
        markers = namespace.sent_as_markers(queue)
        return records + [view(source, _record(offset, payload)) for source, offset, payload in markers]

    def messages(self, queue: str, *, codec: Codec | None = None) -> list[SeenMessage]:
        """Return the waiting messages."""
        view = self._view(queue, codec)
        return [view(source, record) for source, record in self._namespace.waiting(queue)]

    def in_flight(self, queue: str, *, codec: Codec | None = None) -> list[SeenMessage]:
        """Return the messages in flight."""
        return self._open(queue, lambda state: state in HELD, codec)

    def delayed(self, queue: str, *, codec: Codec | None = None) -> list[SeenMessage]:
        """Return the messages that will be delivered later."""
        return self._open(queue, lambda state: state not in HELD, codec)

    def acked(self, queue: str, *, codec: Codec | None = None) -> list[SeenMessage]:
        """Return the acked messages, in the order of their acks."""
        view = self._view(queue, codec)
        return [
            view(ack.source, _record(ack.offset, ack.payload), ack.payload.attempt)
            for ack in self._namespace.acked
            if ack.queue == queue
        ]

    def dead_letters(self, queue: str | None = None, *, codec: Codec | None = None) -> list[DeadLetter]:
        """Return the dead letters of a queue, or of all, oldest first, except redriven and deleted ones."""
        topic, settled = self._namespace.dead_letters, self._namespace.settled()
        letters = [
            dead_letter(topic.name, Stored(partition, *record), check_codec(codec))
            for partition, log in enumerate(topic.logs)
            for record in log
            if not is_note(record) and (partition, record.offset) not in settled
            if queue is None or record.key == queue.encode()
        ]
        return sorted(letters, key=lambda letter: letter.dead_lettered_at)

    @property
    def _settings(self) -> ClientSettings:
        return ClientSettings.read(self.address, self._prefix)

    @property
    def _namespace(self) -> Namespace:
        return self._memory.namespace(self._settings)

    def _open(self, queue: str, fits: Callable[[State], bool], codec: Codec | None) -> list[SeenMessage]:
        view = self._view(queue, codec)
        return [
            view(source, _record(offset, payload), lease.attempt)
            for source, offset, lease, payload in self._namespace.open_messages(queue)
            if fits(lease.state)
        ]

    def _view(self, queue: str, codec: Codec | None) -> Callable[..., SeenMessage]:
        """Return what makes a message of a source and a record."""
        return partial(seen, self._namespace.names, queue, check_codec(codec))


def _module_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the modules in ``handlers`` of [settings], a list or a text with commas. Raises ConfigError."""
    modules = settings.get("handlers", ())
    names = modules.split(",") if isinstance(modules, str) else modules
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"[settings]: handlers: expected a list of names of modules, not {modules!r}")
    return [name.strip() for name in names if name.strip()]


def _record(offset: int, payload: Payload) -> Row:
    return Row(offset, payload.timestamp_ms, payload.key, payload.value, payload.headers)
