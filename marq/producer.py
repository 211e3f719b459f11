"""The producer: puts messages into queues; each is confirmed by all in-sync copies before its receipt comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, Unpack, overload

from aiokafka.errors import KafkaError

from marq.cluster import Cluster, Followed, Sender, cluster_of
from marq.codecs import Codec, check_codec
from marq.connection import to_its_end
from marq.content import Content, Header, check_headers, check_queues, encode
from marq.core.errors import BrokerUnavailable, ConfigError, MarqError
from marq.delays import Delays
from marq.durations import Duration
from marq.inquiry import Inquiry
from marq.receipt import Receipt
from marq.rights import refused
from marq.routes import News, Route, Routes
from marq.settings import ClientOptions, ClientSettings
from marq.topics import Topics
from marq.when import At, Delay, When, when, whens
from marq.words import Unknown, missing, refuse

log = logging.getLogger("marq")

Headers = Mapping[str, bytes | None] | Iterable[Header]

#: How long a stop waits for what is on its way.
STOP_LIMIT_S = 5.0
#: Between two attempts to get another producer, when the broker refuses at once.
RETRY_S = 1.0


class SendManyFailed(BrokerUnavailable):
    """``send_many``, or ``send`` to several queues, failed: ``index`` is the first item that is not known to be sent.

    ``receipts`` has, for each item in order, its receipt or None; items are values, or queues.
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
        codec: what makes bytes of values; without it values are bytes.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        codec: Codec | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._begin(ClientSettings.read(bootstrap_servers, options, owner="Producer"), check_codec(codec))

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return one for a client that has its settings already."""
        producer = cls.__new__(cls)
        producer._begin(settings, None)
        return producer

    def _begin(self, settings: ClientSettings, codec: Codec | None) -> None:
        self._codec = codec
        self._settings = settings
        self._cluster: Cluster = cluster_of(self._settings)
        self._limit_s = self._settings.request_timeout_ms / 1000
        self._changing: asyncio.Lock | None = None
        self._topics: Topics | None = None
        self._content: Content
        self._queues: Followed
        self._routes: Routes
        self._delays: Delays
        self._inquiry: Inquiry
        self._kafka: Sender | None = None
        self._open: dict[tuple[str, int], _Parcel] = {}
        self._sending: set[asyncio.Task[Any]] = set()
        self._turns: dict[tuple[str, int], asyncio.Lock] = {}
        self._replacing: asyncio.Task[Any] | None = None
        #: Messages that were confirmed, and that are not known to be sent; those with a delay in neither.
        self.sent = self.failed = 0

    async def start(self) -> None:
        """Connect, and make the topics that are missing; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong.
        """
        async with self._lock():
            if self._topics is None:
                topics = await self._cluster.topics()
                self._content = Content(topics.messages_limit_bytes)
                self._queues = self._cluster.queues()
                try:
                    await self._queues.start()
                    self._kafka = await self._cluster.sender(topics)
                except BaseException:
                    await self._queues.stop()
                    raise
                self._routes = Routes(self._cluster, self._settings.names, topics, self._queues)
                self._delays = Delays(self._cluster, topics, self._limit_s)
                self._inquiry = Inquiry(self._cluster, topics, self._delays, self._limit_s)
                self._topics = topics

    async def stop(self) -> None:
        """Wait some seconds for what is on its way, then close; does nothing when stopped."""
        async with self._lock():
            if self._topics is None:
                return
            # From here on nothing is accepted.
            self._topics = None
            self._submit_all()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_LIMIT_S):
                        # Not once: a call of send_many that is under way goes on until its last item.
                        while self._sending:
                            await asyncio.wait(self._sending)
            finally:
                await to_its_end(self._close())

    async def _close(self) -> None:
        for task in list(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        kafka, self._kafka = self._kafka, None
        self._routes.close()
        await self._inquiry.stop()
        await self._delays.stop(1.0)
        await self._queues.stop()
        if kafka is not None:
            await self._cluster.close(kafka, 1.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @overload
    async def send(
        self,
        queue: str,
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> Receipt: ...

    @overload
    async def send(
        self,
        queue: Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]: ...

    async def send(
        self,
        queue: str | Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> Receipt | list[Receipt]:
        """Send one message; durable on return.

        To a list of queues a copy for each, whose receipts come in the same order; all are checked before the first is
        sent. With ``delay`` (seconds or timedelta) or ``at`` (a datetime with a time zone) it is delivered then, and
        until then the receipt serves to :meth:`cancel` or :meth:`reschedule` it. A delay is counted by the brokers'
        clocks, from the moment at which the message is durable.

        Raises:
            TypeError, ValueError: the value is not bytes, or the codec can't encode it; nothing was sent.
            MessageTooLarge: it does not fit; nothing was sent.
            ConfigError: a queue's name, a header or the time is not allowed; nothing was sent.
            BrokerUnavailable: the broker did not confirm in time: unknown whether the message was sent.
            SendManyFailed: the same, of several queues: its ``receipts`` say to which it was sent.
        """
        if unknown:
            refuse("send", unknown)
        due = None if delay is None and at is None else when("send()", delay, at)
        if not isinstance(queue, str):
            return await self._send_to_each(check_queues(queue), value, headers, due)
        self._started()
        route = self._routes.known.get(queue) or await self._routes.find(queue)
        pairs = check_headers(headers) if headers else []
        if self._codec is not None:
            value = encode(self._codec, queue, value)
        self._content.check(queue, route.key, value, pairs)
        if due is not None:
            return await self._delays.post(queue, value, pairs, due)
        partition, future = self._post(route, value, pairs)
        return Receipt(queue, route.lane.topic, partition, await future)

    async def _send_to_each(
        self, queues: Sequence[str], value: Any, headers: Headers | None, due: When | None
    ) -> list[Receipt]:
        self._started()
        pairs = check_headers(headers) if headers else []
        if self._codec is not None:
            value = encode(self._codec, queues, value)
        for queue in queues:
            await self._routes.find(queue)
        # Once more, and nothing is waited for now: what was found first may be old.
        routes = [await self._routes.find(queue) for queue in queues]
        for queue, route in zip(queues, routes, strict=True):
            self._content.check(queue, route.key, value, pairs)
        if due is not None:
            delayed = [self._delays.post(queue, value, pairs, due) for queue in queues]
            outcomes: list[Any] = await asyncio.gather(*delayed, return_exceptions=True)
            receipts = [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
        else:
            posts = [self._post(route, value, pairs) for route in routes]
            outcomes = await asyncio.gather(*[future for _, future in posts], return_exceptions=True)
            receipts = [
                None if isinstance(outcome, BaseException) else Receipt(queue, route.lane.topic, partition, outcome)
                for queue, route, (partition, _), outcome in zip(queues, routes, posts, outcomes, strict=True)
            ]
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise SendManyFailed(queues[index], index, receipts, outcome) from outcome
        return receipts  # type: ignore[return-value]

    async def send_many(
        self,
        queue: str,
        values: Iterable[Any],
        *,
        headers: Headers | None = None,
        delay: Delay | None = None,
        at: At | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]:
        """Send messages, all with the same headers; return their receipts in the same order when all are durable.

        ``delay`` and ``at`` are as for :meth:`send`, one for all of them or a list with one for each.

        Raises:
            TypeError, ValueError, MessageTooLarge: an item is not allowed (the text says which); nothing was sent.
            ConfigError: the queue's name, a header or a time is not allowed; nothing was sent.
            SendManyFailed: the broker did not confirm an item in time: its ``receipts`` say which were sent.
        """
        if unknown:
            refuse("send_many", unknown)
        if isinstance(queue, list | tuple):
            raise ConfigError(
                f"send_many() sends to one queue, not to {queue!r}: call it for each of them,"
                " or send(queues, value) for each value"
            )
        self._started()
        route = self._routes.known.get(queue) or await self._routes.find(queue)
        pairs = check_headers(headers) if headers else []
        items = list(values)
        if (codec := self._codec) is not None:
            items = [encode(codec, queue, value, item) for item, value in enumerate(items)]
        self._content.check_many(queue, route.key, items, pairs)
        dues = None if delay is None and at is None else whens("send_many()", delay, at, len(items))
        if dues and items:
            return await self._delay_many(queue, items, pairs, dues)
        share = max(1, -(-len(items) // route.lane.partitions))
        receipts: list[Receipt | None] = []
        tasks: list[asyncio.Task[int]] = []
        parcels: list[tuple[str, int, int]] = []
        start, ended = 0, MarqError("the producer was stopped")
        while start < len(items):
            # Each time: of many items the last ones may be sent long after the queue has moved.
            try:
                route = self._routes.known.get(queue) or await self._routes.find(queue)
            except MarqError as error:
                ended = error
                break
            if self._kafka is None:
                break
            lane = route.lane
            partition = lane.take()
            parcel = _Parcel(self._kafka, lane.topic, partition, self._routes.news)
            stop = parcel.fill(route.key, items, start, min(start + share, len(items)), pairs)
            # Accepted only when the partition's former batch went out: that bounds what is held in memory.
            tasks.append(self._track(self._send(parcel)))
            parcels.append((lane.topic, partition, stop - start))
            start = stop
            if len(tasks) % (2 * lane.partitions) == 0:
                await asyncio.wait(tasks[-2 * lane.partitions :], return_when=asyncio.FIRST_COMPLETED)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failure: BaseException | None = None
        first_failed = -1
        for (topic, partition, count), outcome in zip(parcels, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                if failure is None:
                    failure, first_failed = outcome, len(receipts)
                receipts += [None] * count
            else:
                receipts += [Receipt(queue, topic, partition, offset) for offset in range(outcome, outcome + count)]
        if start < len(items) and failure is None:
            failure, first_failed = ended, start
        receipts += [None] * (len(items) - start)
        if failure is not None:
            raise SendManyFailed(queue, first_failed, receipts, failure) from failure
        return receipts  # type: ignore[return-value]

    async def _delay_many(
        self, queue: str, items: Sequence[bytes], pairs: list[Header], dues: Sequence[When]
    ) -> list[Receipt]:
        receipts: list[Receipt] = []
        try:
            await self._delays.send_many(queue, items, pairs, dues, receipts)
        except BrokerUnavailable as error:
            done = len(receipts)
            raise SendManyFailed(queue, done, [*receipts, *[None] * (len(items) - done)], error) from error
        return receipts

    # --- what was delayed ---------------------------------------------------------------------------------------------

    @overload
    async def cancel(self, receipt: Receipt | str) -> bool: ...

    @overload
    async def cancel(self, receipt: Sequence[Receipt] | list[str]) -> list[bool]: ...

    async def cancel(self, receipt: Receipt | str | Sequence[Receipt] | list[str]) -> bool | list[bool]:
        """Cancel a delayed message, or several: True for each that will not be delivered any more.

        Each is known by its receipt or by the receipt's ``id``. False: it was delivered or cancelled before. Needs a
        running tracker, and the right to read the markers topic.

        Raises:
            TypeError: it is no receipt.
            ConfigError: a text is no id of a message.
            BrokerUnavailable: no tracker answered within the request timeout; it may be cancelled or not.
        """
        return await self._ask("cancel", receipt, None)

    @overload
    async def reschedule(
        self, receipt: Receipt | str, *, delay: Duration | None = None, at: datetime | None = None
    ) -> bool: ...

    @overload
    async def reschedule(
        self, receipt: Sequence[Receipt] | list[str], *, delay: Duration | None = None, at: datetime | None = None
    ) -> list[bool]: ...

    async def reschedule(
        self,
        receipt: Receipt | str | Sequence[Receipt] | list[str],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
    ) -> bool | list[bool]:
        """Deliver a delayed message, or several, at another time: ``delay=0`` is at once. Else as :meth:`cancel`.

        Raises:
            ConfigError: no time was given, or one that is not allowed.
        """
        if delay is None and at is None:
            raise ConfigError("reschedule(): say when: delay=… (seconds or timedelta) or at=… (datetime)")
        return await self._ask("reschedule", receipt, when("reschedule()", delay, at) or When(0, relative=True))

    async def _ask(
        self, call: str, receipt: Receipt | str | Sequence[Receipt] | list[str], due: When | None
    ) -> bool | list[bool]:
        self._started()
        if isinstance(receipt, Receipt | str):
            return (await self._inquiry.ask([_receipt(call, receipt)], due))[0]
        return await self._inquiry.ask([_receipt(call, each) for each in receipt], due)

    def __getattr__(self, name: str) -> Any:
        raise missing("Producer", name)

    # --- parcels ------------------------------------------------------------------------------------------------------

    def _post(self, route: Route, value: bytes, pairs: list[Header]) -> tuple[int, asyncio.Future[int]]:
        """Put a message into the next partition's parcel; return the partition, and what will have its offset."""
        partition = route.lane.take()
        return partition, self._append((route.lane.topic, partition), route.key, value, pairs)

    def _append(
        self, place: tuple[str, int], key: bytes | None, value: bytes, pairs: list[Header]
    ) -> asyncio.Future[int]:
        """Put a message into its partition's open parcel, which goes out in the loop's next turn."""
        parcel = self._open.get(place)
        if parcel is None:
            parcel = self._open_parcel(place)
        future = parcel.append(key, value, pairs)
        if future is None:
            self._submit(place)
            future = self._open_parcel(place).append(key, value, pairs)
            assert future is not None, "an empty batch takes every message"
        return future

    def _open_parcel(self, place: tuple[str, int]) -> _Parcel:
        if self._kafka is None:
            raise MarqError("the producer was stopped meanwhile: the message was not sent")
        if not self._open:
            asyncio.get_running_loop().call_soon(self._submit_all)
        parcel = self._open[place] = _Parcel(self._kafka, *place, self._routes.news)
        return parcel

    def _submit_all(self) -> None:
        for place in list(self._open):
            self._submit(place)

    def _submit(self, place: tuple[str, int]) -> None:
        parcel = self._open.pop(place)
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
            parcel.fail(self._unknown(parcel, "the producer was stopped" if stopped else repr(error)))
        else:
            parcel.done(base)

    async def _send(self, parcel: _Parcel) -> int:
        """Send a parcel and return the offset of its first message."""
        try:
            await self._routes.check(self._limit_s)
            base = await self._send_to_kafka(parcel)
            if not await self._routes.still_held(parcel.news, self._limit_s):
                raise self._unknown(parcel, "its queue has moved to other partitions meanwhile")
        except BaseException:
            self.failed += parcel.count
            raise
        self.sent += parcel.count
        return base

    async def _send_to_kafka(self, parcel: _Parcel) -> int:
        kafka = parcel.kafka
        # One at a time waits for its partition: of many that wait aiokafka 0.14 adds up the time, and gives
        # up within a moment.
        turn = self._turns.setdefault((parcel.topic, parcel.partition), asyncio.Lock())
        try:
            async with turn, asyncio.timeout(self._limit_s):
                sent = await kafka.send_batch(parcel.batch, parcel.topic, partition=parcel.partition)
            async with asyncio.timeout(self._limit_s):
                return int((await sent).offset)
        except (TimeoutError, KafkaError, AssertionError) as error:
            # aiokafka asserts that the partition exists: it does not, where the topic was made anew with fewer.
            self._replace(kafka)
            forbidden = refused(self._settings, error, "Write", parcel.topic)
            raise forbidden or self._unknown(parcel, str(error) or type(error).__name__) from error

    def _replace(self, kafka: Any) -> None:
        """Give up a producer that failed: it would go on trying what the caller believes to have failed."""
        if self._kafka is kafka and self._replacing is None and self._topics is not None:
            self._replacing = self._track(self._start_another(kafka, self._topics))

    async def _start_another(self, kafka: Any, topics: Topics) -> None:
        """Until another one is connected, what is sent fails at once with the closed one."""
        await self._cluster.close(kafka, 0)
        try:
            while True:
                try:
                    self._kafka = await self._cluster.sender(topics)
                    return
                except BrokerUnavailable as error:
                    log.warning("no producer, trying again: %s", error)
                    await self._cluster.sleep(RETRY_S)
        finally:
            self._replacing = None

    def _unknown(self, parcel: _Parcel, cause: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"topic {parcel.topic}: the broker at {self._settings.bootstrap_servers} did not confirm within"
            f" {self._limit_s:g} s ({cause}): unknown whether the message was sent; send it again if twice is no harm"
        )

    def _started(self) -> Topics:
        if self._topics is None:
            raise MarqError("the producer is not started: use `async with` or await start()")
        return self._topics

    def _lock(self) -> asyncio.Lock:
        if self._changing is None:
            self._changing = asyncio.Lock()
        return self._changing


def _receipt(call: str, given: object) -> Receipt:
    if isinstance(given, str):
        return Receipt.of(given)
    if not isinstance(given, Receipt):
        raise TypeError(f"{call}() takes the receipt that send() returned, or its id, not {given!r}")
    return given


class _Parcel:
    """A batch of messages for one partition, and who waits for each."""

    __slots__ = ("batch", "count", "futures", "kafka", "news", "partition", "topic")

    def __init__(self, kafka: Any, topic: str, partition: int, news: News) -> None:
        self.kafka = kafka
        self.news = news
        self.topic = topic
        self.partition = partition
        self.batch = kafka.create_batch()
        self.futures: list[asyncio.Future[int]] = []
        self.count = 0

    def append(self, key: bytes | None, value: bytes, headers: list[Header]) -> asyncio.Future[int] | None:
        """Add a message; None when the batch is full."""
        if self.batch.append(timestamp=None, key=key, value=value, headers=headers) is None:
            return None
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        self.count += 1
        return future

    def fill(self, key: bytes | None, values: Sequence[bytes], start: int, stop: int, headers: list[Header]) -> int:
        """Add messages until the batch is full; return where it ended."""
        append, now_ms = self.batch.append, int(time.time() * 1000)
        for index in range(start, stop):
            if append(timestamp=now_ms, key=key, value=values[index], headers=headers) is None:
                self.count = index - start
                return index
        self.count = stop - start
        return stop

    def done(self, base: int) -> None:
        for offset, future in enumerate(self.futures, base):
            if not future.done():
                future.set_result(offset)

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)
