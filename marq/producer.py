"""The producer: puts messages into queues; each is confirmed by all in-sync copies before its receipt comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from marq.connection import abandon_producer, client_options, started, stop_producer
from marq.content import Content, Header, check_headers
from marq.core.errors import BrokerUnavailable, MarqError
from marq.core.names import check_queue_name
from marq.receipt import Receipt
from marq.settings import ClientOptions, ClientSettings
from marq.topics import Topics, ensure_topics
from marq.words import Unknown, missing, refuse

log = logging.getLogger("marq")

#: One batch of records at the most: large enough that the broker is asked rarely, small enough to be built quickly.
MAX_BATCH_BYTES = 512 * 1024
#: How long a stop waits for what is on its way.
STOP_LIMIT_S = 5.0
#: Names of queues that were checked before.
_MAX_KNOWN_QUEUES = 10_000


class SendManyFailed(BrokerUnavailable):
    """``send_many`` failed: ``index`` is the first item that is not known to be sent.

    ``receipts`` has, for each item in order, its receipt or None.
    """

    def __init__(self, queue: str, index: int, receipts: Sequence[Receipt | None], cause: BaseException) -> None:
        self.index = index
        self.receipts = list(receipts)
        sent = sum(receipt is not None for receipt in self.receipts)
        super().__init__(
            f"queue {queue!r}: item {index} of {len(self.receipts)} is not known to be sent ({cause}); {sent} items"
            " were, see .receipts: send those without one again"
        )


class Producer:
    """Sends messages: idempotent, confirmed by all in-sync replicas, batched.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(self, bootstrap_servers: str | Sequence[str] | None = None, **options: Unpack[ClientOptions]) -> None:
        self._settings = ClientSettings.read(bootstrap_servers, options, owner="Producer")
        self._topic = self._settings.names.messages
        self._limit_s = self._settings.request_timeout_ms / 1000
        self._keys: dict[str, bytes] = {}
        self._changing: asyncio.Lock | None = None
        self._topics: Topics | None = None
        self._content: Content
        self._kafka: AIOKafkaProducer | None = None
        self._open: dict[int, _Parcel] = {}
        self._sending: set[asyncio.Task[Any]] = set()
        self._turns: dict[int, asyncio.Lock] = {}
        self._replacing: asyncio.Task[Any] | None = None
        self._next = 0

    async def start(self) -> None:
        """Connect, and make the topics that are missing; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong.
        """
        async with self._lock():
            if self._topics is None:
                topics = await ensure_topics(self._settings)
                self._content = Content(topics.messages_limit_bytes)
                self._kafka = await started(lambda: self._make(topics), self._settings, abandon_producer)
                self._topics = topics

    async def stop(self) -> None:
        """Wait some seconds for what is on its way, then close; does nothing when stopped."""
        async with self._lock():
            if self._topics is None:
                return
            for partition in list(self._open):
                self._submit(partition)
            if self._sending:
                await asyncio.wait(self._sending, timeout=STOP_LIMIT_S)
            for task in list(self._sending):
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)
            self._topics = None
            kafka, self._kafka = self._kafka, None
            if kafka is not None:
                await stop_producer(kafka, 1.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def send(
        self,
        queue: str,
        value: bytes,
        *,
        headers: Mapping[str, bytes | None] | Iterable[Header] | None = None,
        **unknown: Unknown,
    ) -> Receipt:
        """Send one message; durable on return.

        Raises:
            TypeError: the value is not bytes.
            MessageTooLarge: it does not fit; nothing was sent.
            ConfigError: the queue's name or a header is not allowed; nothing was sent.
            BrokerUnavailable: the broker did not confirm in time: unknown whether the message was sent.
        """
        if unknown:
            refuse("send", unknown)
        topics = self._started()
        key = self._keys.get(queue) or self._key(queue)
        pairs = check_headers(headers) if headers else []
        self._content.check(queue, key, value, pairs)
        partition = self._next
        self._next = (partition + 1) % topics.messages_partitions
        future = self._append(partition, key, value, pairs)
        offset = await future
        return Receipt(queue, self._topic, partition, offset)

    async def send_many(
        self,
        queue: str,
        values: Iterable[bytes],
        *,
        headers: Mapping[str, bytes | None] | Iterable[Header] | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]:
        """Send messages, all with the same headers; return their receipts in the same order when all are durable.

        Raises:
            TypeError, MessageTooLarge, ConfigError: an item is not allowed (the text says which); nothing was sent.
            SendManyFailed: the broker did not confirm an item in time: its ``receipts`` say which were sent.
        """
        if unknown:
            refuse("send_many", unknown)
        topics = self._started()
        key = self._keys.get(queue) or self._key(queue)
        pairs = check_headers(headers) if headers else []
        items = list(values)
        self._content.check_many(queue, key, items, pairs)
        share = max(1, -(-len(items) // topics.messages_partitions))
        receipts: list[Receipt | None] = []
        tasks: list[asyncio.Task[int]] = []
        parcels: list[tuple[int, int]] = []
        start = 0
        while start < len(items):
            partition = self._next
            self._next = (partition + 1) % topics.messages_partitions
            parcel = _Parcel(self._kafka, self._topic, partition)
            stop = parcel.fill(key, items, start, min(start + share, len(items)), pairs)
            # Accepted only when the partition's former batch went out: that bounds what is held in memory.
            tasks.append(self._track(self._send(parcel)))
            parcels.append((partition, stop - start))
            start = stop
            if len(tasks) % (2 * topics.messages_partitions) == 0:
                await asyncio.wait(tasks[-2 * topics.messages_partitions :], return_when=asyncio.FIRST_COMPLETED)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failure: BaseException | None = None
        first_failed = -1
        for (partition, count), outcome in zip(parcels, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                if failure is None:
                    failure, first_failed = outcome, len(receipts)
                receipts += [None] * count
            else:
                topic = self._topic
                receipts += [Receipt(queue, topic, partition, offset) for offset in range(outcome, outcome + count)]
        if failure is not None:
            raise SendManyFailed(queue, first_failed, receipts, failure) from failure
        return receipts  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        raise missing("Producer", name)

    # --- parcels ------------------------------------------------------------------------------------------------------

    def _append(self, partition: int, key: bytes, value: bytes, pairs: list[Header]) -> asyncio.Future[int]:
        """Put a message into its partition's open parcel, which goes out in the loop's next turn."""
        parcel = self._open.get(partition)
        if parcel is None:
            parcel = self._open_parcel(partition)
        future = parcel.append(key, value, pairs)
        if future is None:
            self._submit(partition)
            future = self._open_parcel(partition).append(key, value, pairs)
            assert future is not None, "an empty batch takes every message"
        return future

    def _open_parcel(self, partition: int) -> _Parcel:
        if not self._open:
            asyncio.get_running_loop().call_soon(self._submit_all)
        parcel = self._open[partition] = _Parcel(self._kafka, self._topic, partition)
        return parcel

    def _submit_all(self) -> None:
        for partition in list(self._open):
            self._submit(partition)

    def _submit(self, partition: int) -> None:
        parcel = self._open.pop(partition)
        self._track(self._deliver(parcel))

    def _track(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    async def _deliver(self, parcel: _Parcel) -> None:
        try:
            base = await self._send(parcel)
        except BrokerUnavailable as error:
            parcel.fail(error)
        except BaseException as error:
            # Whatever it is: who waits for a receipt must not wait for ever.
            stopped = isinstance(error, asyncio.CancelledError)
            parcel.fail(self._unknown("the producer was stopped" if stopped else repr(error)))
        else:
            parcel.done(base)

    async def _send(self, parcel: _Parcel) -> int:
        """Send a parcel and return the offset of its first message."""
        kafka = parcel.kafka
        # One at a time waits for its partition: of many that wait aiokafka 0.14 adds up the time, and gives
        # up within a moment.
        turn = self._turns.setdefault(parcel.partition, asyncio.Lock())
        try:
            async with turn, asyncio.timeout(self._limit_s):
                sent = await kafka.send_batch(parcel.batch, self._topic, partition=parcel.partition)
            async with asyncio.timeout(self._limit_s):
                return int((await sent).offset)
        except (TimeoutError, KafkaError, AssertionError) as error:
            # aiokafka asserts that the partition exists: it does not, where the topic was made anew with fewer.
            self._replace(kafka)
            raise self._unknown(str(error) or type(error).__name__) from error

    def _replace(self, kafka: Any) -> None:
        """Give up a producer that failed: it would go on trying what the caller believes to have failed."""
        if self._kafka is kafka and self._replacing is None and self._topics is not None:
            self._replacing = self._track(self._start_another(kafka, self._topics))

    async def _start_another(self, kafka: Any, topics: Topics) -> None:
        """Until another one is connected, what is sent fails at once with the closed one."""
        await abandon_producer(kafka)
        try:
            while True:
                try:
                    self._kafka = await started(lambda: self._make(topics), self._settings, abandon_producer)
                    return
                except BrokerUnavailable as error:
                    log.warning("no producer, trying again: %s", error)
        finally:
            self._replacing = None

    def _unknown(self, cause: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"topic {self._topic}: the broker at {self._settings.bootstrap_servers} did not confirm within"
            f" {self._limit_s:g} s ({cause}): unknown whether the message was sent; send it again if twice is no harm"
        )

    def _make(self, topics: Topics) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            **client_options(self._settings),
            enable_idempotence=True,
            linger_ms=0,
            max_batch_size=min(MAX_BATCH_BYTES, topics.messages_limit_bytes),
            max_request_size=topics.messages_limit_bytes,
        )

    def _key(self, queue: str) -> bytes:
        if len(self._keys) >= _MAX_KNOWN_QUEUES:
            self._keys.clear()
        key = self._keys[check_queue_name(queue)] = queue.encode()
        return key

    def _started(self) -> Topics:
        if self._topics is None:
            raise MarqError("the producer is not started: use `async with` or await start()")
        return self._topics

    def _lock(self) -> asyncio.Lock:
        if self._changing is None:
            self._changing = asyncio.Lock()
        return self._changing


class _Parcel:
    """A batch of messages for one partition, and who waits for each."""

    __slots__ = ("batch", "futures", "kafka", "partition")

    def __init__(self, kafka: Any, topic: str, partition: int) -> None:
        self.kafka = kafka
        self.partition = partition
        self.batch = kafka.create_batch()
        self.futures: list[asyncio.Future[int]] = []

    def append(self, key: bytes, value: bytes, headers: list[Header]) -> asyncio.Future[int] | None:
        """Add a message; None when the batch is full."""
        if self.batch.append(timestamp=None, key=key, value=value, headers=headers) is None:
            return None
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        return future

    def fill(self, key: bytes, values: Sequence[bytes], start: int, stop: int, headers: list[Header]) -> int:
        """Add messages until the batch is full; return where it ended."""
        append, now_ms = self.batch.append, int(time.time() * 1000)
        for index in range(start, stop):
            if append(timestamp=now_ms, key=key, value=values[index], headers=headers) is None:
                return index
        return stop

    def done(self, base: int) -> None:
        for offset, future in enumerate(self.futures, base):
            if not future.done():
                future.set_result(offset)

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)
