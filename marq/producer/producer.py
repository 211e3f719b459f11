"""The producer: sends messages; all in-sync replicas confirm each one before its receipt is returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, Unpack, overload

from marq.backend.cluster import Cluster, cluster_of
from marq.client.codecs import Codec, V
from marq.client.current_producer import note_started, note_stopped
from marq.client.hooks import point
from marq.client.lifecycle import CodecClient, Lifecycle
from marq.client.receipt import Receipt
from marq.client.send_options import (
    AT_ONCE,
    At,
    Delay,
    Expiry,
    Header,
    Headers,
    SendManyOptions,
    SendOptions,
    TimeOptions,
    When,
    check_id,
    check_ids,
    check_queues,
    expiry,
    when,
    whens,
    with_expiry,
    with_id,
    with_type,
)
from marq.client.send_targets import Target, target_of
from marq.producer.delay_control import DelayControl
from marq.producer.delays import Delays
from marq.producer.sending import Batcher, Content, Route, Routes, SendCounts, encode
from marq.settings.client import ClientSettings
from marq.settings.durations import Duration
from marq.settings.hints import Unknown, refuse
from marq.settings.ordering_keys import check_ordering_key
from marq.wire.errors import BrokerUnavailable, ConfigError

T = TypeVar("T")
#: Delayed messages, one or several: receipts, or ids.
One = Receipt | str
Several = Sequence[Receipt] | list[str]

_DELAYS_STOP_S = 1.0


class SendManyFailed(BrokerUnavailable):
    """Some messages of ``send_many``, or of ``send`` to several queues, were not confirmed.

    ``receipts`` has one entry for each value (``send_many``) or queue (``send``), in order: its receipt, or None if it
    was not confirmed. ``index`` is the position of the first None.
    """

    def __init__(self, queue: str, index: int, receipts: Sequence[Receipt | None], cause: BaseException) -> None:
        self.index = index
        self.receipts = list(receipts)
        sent = sum(receipt is not None for receipt in self.receipts)
        super().__init__(
            f"queue {queue!r}: item {index} of {len(self.receipts)} was not confirmed ({cause}); {sent} items were;"
            " send the items without a receipt in .receipts again"
        )


class MessageOptions(NamedTuple):
    """The delivery time, ordering key, deduplication id and expiry of a message."""

    due: When | None
    key: bytes | None
    own_id: bytes | None
    expires: Expiry | None

    @property
    def place(self) -> bytes | None:
        """Decides which tracker looks for duplicates; None for a message without an id."""
        return None if self.own_id is None else self.key or self.own_id


class ProducerParts(NamedTuple):
    """The parts of a started producer."""

    content: Content
    routes: Routes
    batches: Batcher
    delays: Delays
    delay_control: DelayControl

    async def find(
        self, queue: str, key: bytes | None, headers: list[Header], called_s: float, *, delayed: bool
    ) -> tuple[Route, list[Header]]:
        """Return the route of a message, and its headers, in the turn of a call."""
        if key is None:
            return self.routes.known.get(queue) or await self.routes.find(queue), headers
        return await self.routes.find_by_key(queue, key, headers, called_s, delayed=delayed)

    def post(
        self, queue: str, route: Route, value: bytes, headers: list[Header], options: MessageOptions
    ) -> Awaitable[Receipt]:
        """Accept a message now; await the result for its receipt."""
        if options.due is not None:
            return self.delays.post(queue, value, headers, options.due, options.place)
        return _confirmed(queue, route, *self.batches.post(route, value, headers))


async def _confirmed(queue: str, route: Route, partition: int, offset: asyncio.Future[int]) -> Receipt:
    return Receipt(queue, route.cursor.topic, partition, await offset)


class Producer(CodecClient[ProducerParts, V], Generic[V]):
    """Sends messages in batches. Sends are idempotent and confirmed by all in-sync replicas.

    Args:
        bootstrap_servers: one ``host:port``, or several separated by commas (default MARQ_BOOTSTRAP_SERVERS).
        codec: encodes values (default: values are bytes).
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    #: How long a message waits for others while batches are on their way.
    _linger_s = 0.0

    def _begin(self, settings: ClientSettings, codec: Codec[V] | None) -> None:
        Lifecycle.__init__(self, "the producer")
        self._codec = codec
        self._settings = settings
        self._cluster: Cluster = cluster_of(settings)
        self._counts = SendCounts()

    @property
    def sent(self) -> int:
        """The number of confirmed messages, not counting delayed ones."""
        return self._counts.sent

    @property
    def failed(self) -> int:
        """The number of messages that were not confirmed, not counting delayed ones."""
        return self._counts.failed

    async def _open(self, opened: AsyncExitStack) -> ProducerParts:
        cluster, settings = self._cluster, self._settings
        limit_s = settings.request_timeout_ms / 1000
        topics = await cluster.topics()
        queues = cluster.queues()
        await queues.start()
        opened.push_async_callback(queues.stop)
        routes = Routes(cluster, settings, topics, queues)
        opened.callback(routes.close)
        batches = Batcher(cluster, settings, topics, routes, await cluster.sender(topics), self._counts, self._linger_s)
        opened.push_async_callback(batches.close)
        delays = Delays(cluster, topics, limit_s, self._counts)
        opened.push_async_callback(delays.stop, _DELAYS_STOP_S)
        delay_control = DelayControl(cluster, settings.names, topics, delays, limit_s)
        opened.push_async_callback(delay_control.stop)
        opened.push_async_callback(batches.drain)
        if not self._internal:
            note_started(self)
            opened.callback(note_stopped, self)
        return ProducerParts(Content(topics.messages_limit_bytes), routes, batches, delays, delay_control)

    def _hurry(self, running: ProducerParts) -> None:
        running.batches.give_up()

    @overload
    async def send(self, queue: Target[T], value: T, **options: Unpack[SendOptions]) -> Receipt: ...

    # A str is a sequence of str, too.
    @overload
    async def send(  # type: ignore[overload-overlap]
        self, queue: str, value: V, **options: Unpack[SendOptions]
    ) -> Receipt: ...

    @overload
    async def send(self, queue: Sequence[str], value: V, **options: Unpack[SendOptions]) -> list[Receipt]: ...

    @point("send")
    async def send(
        self,
        queue: Target[Any] | str | Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        type: str | None = None,  # noqa: A002
        ordering_key: str | bytes | None = None,
        deduplication_id: str | None = None,
        expires_in: Duration | None = None,
        **unknown: Unknown,
    ) -> Receipt | list[Receipt]:
        """Send one message; durable on return.

        If ``queue`` is a function decorated with ``@marq.handler``, the message goes to its queue, encoded for the
        function. If ``queue`` is a list, the message goes to each queue, and the receipts have the same order; the
        producer checks all queues before it sends anything. ``headers`` are a dict or pairs; text is sent as UTF-8, and
        consumers receive bytes.

        In a queue with several handlers, ``type`` chooses the handler. A decorated function has its own type.

        With ``delay`` (seconds or timedelta) or ``at`` (a datetime with a time zone) the message is delivered later.
        Until then you can pass its receipt to :meth:`cancel` or :meth:`reschedule`. A delay starts when the message is
        durable, and is measured by the brokers' clocks.

        A message with ``expires_in`` (seconds or timedelta) is not delivered, the first time or again, after that time.
        It counts from now by this machine's clock, or from the due time of a delayed message. The queue's settings say
        whether an expired message is dropped or dead-lettered. Messages of a queue with ordering can't expire.

        In a queue with ``ordering = "key"``, messages with the same ``ordering_key`` (text or bytes, up to 1,024 bytes)
        are delivered one at a time, in the order in which this producer sent them. A delayed message takes its place
        when it is due. Messages without a key are unordered.

        Of several messages with the same ``deduplication_id`` (up to 1,024 bytes in UTF-8), only the first is delivered
        within the queue's ``deduplication_window``, no matter which producers send them. With an ordering key, ids are
        compared only within that key. The producer does not learn about duplicates; :meth:`cancel` returns False for
        them.

        Raises:
            TypeError, ValueError: the value is not bytes, or the codec can't encode it; nothing was sent.
            MessageTooLarge: the topic does not accept a message of this size; nothing was sent.
            ConfigError: a queue's name or an option is invalid; nothing was sent.
            BrokerUnavailable: the broker did not confirm in time; the message may or may not have been sent.
            SendManyFailed: the same for several queues; its ``receipts`` show which messages were sent.
        """
        if unknown:
            refuse("send", unknown)
        due = None if delay is None and at is None else when("send()", delay, at)
        key = None if ordering_key is None else check_ordering_key(ordering_key)
        own_id = None if deduplication_id is None else check_id(deduplication_id)
        expires = None if expires_in is None else expiry(expires_in, self._cluster.wall_s())
        options = MessageOptions(due if own_id is None else due or AT_ONCE, key, own_id, expires)
        codec: Codec | None = self._codec
        if not isinstance(queue, str):
            if isinstance(queue, Sequence):
                return await self._send_to_each(check_queues(queue), value, with_type(headers, type), options)
            queue, codec, type = target_of(queue, codec, type)  # noqa: A001
        running = self._running or self._started()
        if expires is not None:
            running.routes.check_may_expire([queue], key)
        if key is not None:
            if codec is not None:
                value = encode(codec, queue, value)
            pairs = with_id(with_type(headers, type), own_id)
            async with running.routes.turn([queue], key) as called_s:
                delayed = options.due is not None
                route, pairs = await running.routes.find_by_key(queue, key, pairs, called_s, delayed=delayed)
                running.content.check(queue, route.key, value, pairs)
                receipt = running.post(queue, route, value, pairs, options)
            # The next call may post before this message is confirmed, because batches keep their order.
            return await receipt
        route = running.routes.known.get(queue) or await running.routes.find(queue)
        pairs = with_type(headers, type) if headers or type is not None else []
        if codec is not None:
            value = encode(codec, queue, value)
        if own_id is not None:
            pairs = with_id(pairs, own_id)
        if expires is not None:
            pairs = with_expiry(pairs, expires, options.due)
        running.content.check(queue, route.key, value, pairs)
        if options.due is not None:
            return await running.delays.post(queue, value, pairs, options.due, own_id)
        partition, future = running.batches.post(route, value, pairs)
        return Receipt(queue, route.cursor.topic, partition, await future)

    async def _send_to_each(
        self, queues: Sequence[str], value: Any, headers: list[Header], options: MessageOptions
    ) -> list[Receipt]:
        running = self._started()
        due, key, own_id, expires = options
        if expires is not None:
            running.routes.check_may_expire(queues, key)
        pairs = with_expiry(with_id(headers, own_id), expires, due)
        if self._codec is not None:
            value = encode(self._codec, queues, value)
        async with running.routes.turn(queues if key is not None else (), key or b"") as called_s:
            find = partial(running.find, key=key, headers=pairs, called_s=called_s, delayed=due is not None)
            for queue in queues:
                await find(queue)
            # Again, and now without waiting: the first routes may be outdated by now.
            routes = [await find(queue) for queue in queues]
            for queue, (route, own) in zip(queues, routes, strict=True):
                running.content.check(queue, route.key, value, own)
            sends = [
                running.post(queue, route, value, own, options)
                for queue, (route, own) in zip(queues, routes, strict=True)
            ]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        receipts = [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise SendManyFailed(queues[index], index, receipts, outcome) from outcome
        return receipts  # type: ignore[return-value]

    @overload
    async def send_many(
        self, queue: Target[T], values: Iterable[T], **options: Unpack[SendManyOptions]
    ) -> list[Receipt]: ...

    @overload
    async def send_many(self, queue: str, values: Iterable[V], **options: Unpack[SendManyOptions]) -> list[Receipt]: ...

    @point("send_many")
    async def send_many(
        self,
        queue: Target[Any] | str,
        values: Iterable[Any],
        *,
        headers: Headers | None = None,
        type: str | None = None,  # noqa: A002
        delay: Delay | None = None,
        at: At | None = None,
        ordering_key: str | bytes | None = None,
        deduplication_ids: Sequence[str] | None = None,
        expires_in: Duration | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]:
        """Send messages with the same headers and ``type``; return their receipts in order when all are durable.

        ``delay`` and ``at`` work as in :meth:`send`; pass one value for all messages, or a list with one per message.
        ``ordering_key`` applies to all messages. If it is set and a message fails, no later one is sent.
        ``deduplication_ids`` has the id of each message. ``expires_in`` works as in :meth:`send`, for all messages.

        Raises:
            TypeError, ValueError, MessageTooLarge: an item is invalid (the error names it); nothing was sent.
            ConfigError: the queue's name or an option is invalid; nothing was sent.
            SendManyFailed: the broker did not confirm an item in time; its ``receipts`` show which were sent.
        """
        if unknown:
            refuse("send_many", unknown)
        if isinstance(queue, list | tuple):
            raise ConfigError(
                f"send_many() sends to one queue, not to {queue!r}: call it for each of them,"
                " or send(queues, value) for each value"
            )
        key = None if ordering_key is None else check_ordering_key(ordering_key)
        codec: Codec | None = self._codec
        if not isinstance(queue, str):
            queue, codec, type = target_of(queue, codec, type)  # noqa: A001
        running = self._started()
        pairs = with_type(headers, type) if headers or type is not None else []
        expires = None if expires_in is None else expiry(expires_in, self._cluster.wall_s())
        if expires is not None:
            running.routes.check_may_expire([queue], key)
        items = list(values)
        if codec is not None:
            items = [encode(codec, queue, value, item) for item, value in enumerate(items)]
        dues = None if delay is None and at is None else whens("send_many()", delay, at, len(items))
        ids = None if deduplication_ids is None else check_ids(deduplication_ids, len(items))
        async with running.routes.turn([] if key is None else [queue], key or b"") as called_s:
            delayed = ids is not None or bool(dues)
            # The others count from when they are due.
            pairs = pairs if delayed else with_expiry(pairs, expires, None)
            find = partial(running.find, queue, key, pairs, called_s, delayed=delayed)
            route, pairs = await find()
            largest_id = max(ids or (), key=len, default=None)
            largest = with_expiry(with_id(pairs, largest_id), expires if delayed else None, None)
            running.content.check_many(queue, route.key, items, largest)
            if ids is not None:
                sends = zip(items, ids, dues or [AT_ONCE] * len(ids), strict=True)
                receipts, failure = await running.delays.send_each(
                    queue,
                    [
                        (item, with_expiry(with_id(pairs, own), expires, due), due, key or own)
                        for item, own, due in sends
                    ],
                )
            elif dues:
                receipts, failure = await running.delays.send_many(queue, items, pairs, dues, expires)
            else:
                receipts, failure = await running.batches.send_many(
                    queue, items, route, pairs, find, in_order=key is not None
                )
        if failure is not None:
            raise SendManyFailed(queue, receipts.index(None), receipts, failure) from failure
        return receipts  # type: ignore[return-value]

    # --- delayed messages ---------------------------------------------------------------------------------------------

    @overload
    async def cancel(self, receipt: One) -> bool: ...

    @overload
    async def cancel(self, receipt: Several) -> list[bool]: ...

    async def cancel(self, receipt: One | Several) -> bool | list[bool]:
        """Cancel one or several delayed messages, given as receipts or ids.

        Return True for each message that this call cancelled, and False if it was no longer delayed. Needs a running
        tracker, and permission to read the markers topic.

        Raises:
            TypeError: an argument is neither a receipt nor an id.
            ConfigError: a string is not the id of a message.
            BrokerUnavailable: no tracker answered within the request timeout; the outcome is unknown. You can safely
                retry.
        """
        return await self._ask("cancel", receipt, None)

    @overload
    async def reschedule(self, receipt: One, **time: Unpack[TimeOptions]) -> bool: ...

    @overload
    async def reschedule(self, receipt: Several, **time: Unpack[TimeOptions]) -> list[bool]: ...

    async def reschedule(
        self, receipt: One | Several, *, delay: Duration | None = None, at: datetime | None = None
    ) -> bool | list[bool]:
        """Deliver delayed messages at another time (``delay=0``: at once).

        The argument, the result and the other errors are those of :meth:`cancel`.

        Raises:
            ConfigError: the time is missing or invalid.
        """
        if delay is None and at is None:
            raise ConfigError("reschedule(): say when: delay=… (seconds or timedelta) or at=… (datetime)")
        return await self._ask("reschedule", receipt, when("reschedule()", delay, at) or AT_ONCE)

    async def _ask(self, call: str, receipt: One | Several, due: When | None) -> bool | list[bool]:
        control = self._started().delay_control
        if isinstance(receipt, Receipt | str):
            return (await control.ask([_receipt(call, receipt)], due))[0]
        return await control.ask([_receipt(call, item) for item in receipt], due)


def _receipt(call: str, receipt: object) -> Receipt:
    if isinstance(receipt, str):
        return Receipt.of(receipt)
    if not isinstance(receipt, Receipt):
        raise TypeError(f"{call}() takes the receipt that send() returned, or its id, not {receipt!r}")
    return receipt
