"""The producer: sends messages; all in-sync replicas confirm each one before its receipt is returned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, NamedTuple, TypeVar, Unpack, overload

from marq.backend.cluster import Cluster, cluster_of
from marq.client.codecs import Codec
from marq.client.content import Content, Headers, check_headers, check_queues, encode
from marq.client.current_producer import note_started, note_stopped
from marq.client.hooks import point
from marq.client.lifecycle import CodecClient, Lifecycle
from marq.client.receipt import Receipt
from marq.client.send_options import SendManyOptions, SendOptions, TimeOptions
from marq.client.when import At, Delay, When, when, whens
from marq.consumer.decorated import Target
from marq.consumer.handlers import target_of
from marq.producer.batches import Batcher, Counts
from marq.producer.delay_control import DelayControl
from marq.producer.delays import Delays
from marq.producer.routes import Routes
from marq.settings.client import ClientSettings
from marq.settings.durations import Duration
from marq.settings.hints import Unknown, refuse
from marq.wire.errors import BrokerUnavailable, ConfigError

T = TypeVar("T")
#: Delayed messages, one or several: receipts, or ids.
One = Receipt | str
Several = Sequence[Receipt] | list[str]

_DELAYS_STOP_S = 1.0


class SendManyFailed(BrokerUnavailable):
    """``send_many``, or ``send`` to several queues, failed.

    Items are values, or queues. ``index`` is the first unconfirmed item; ``receipts`` has the receipt
    of each item, or None, in order.
    """

    def __init__(self, queue: str, index: int, receipts: Sequence[Receipt | None], cause: BaseException) -> None:
        self.index = index
        self.receipts = list(receipts)
        sent = sum(receipt is not None for receipt in self.receipts)
        super().__init__(
            f"queue {queue!r}: item {index} of {len(self.receipts)} is not known to be sent ({cause}); {sent} items"
            " were, see .receipts: send those without one again"
        )


class _Running(NamedTuple):
    """The parts of a started producer."""

    content: Content
    routes: Routes
    batches: Batcher
    delays: Delays
    delay_control: DelayControl


class Producer(CodecClient[_Running]):
    """Sends messages: idempotent, confirmed by all in-sync replicas, batched.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas (default MARQ_BOOTSTRAP_SERVERS).
        codec: encodes values (default: values are bytes).
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def _begin(self, settings: ClientSettings, codec: Codec | None) -> None:
        Lifecycle.__init__(self, "the producer")
        self._codec = codec
        self._settings = settings
        self._cluster: Cluster = cluster_of(settings)
        self._counts = Counts()

    @property
    def sent(self) -> int:
        """The number of confirmed messages, without delayed ones."""
        return self._counts.sent

    @property
    def failed(self) -> int:
        """The number of unconfirmed messages, without delayed ones."""
        return self._counts.failed

    async def _open(self, opened: AsyncExitStack) -> _Running:
        cluster, settings = self._cluster, self._settings
        limit_s = settings.request_timeout_ms / 1000
        topics = await cluster.topics()
        queues = cluster.queues()
        await queues.start()
        opened.push_async_callback(queues.stop)
        routes = Routes(cluster, settings.names, topics, queues)
        opened.callback(routes.close)
        batches = Batcher(cluster, settings, topics, routes, await cluster.sender(topics), self._counts)
        opened.push_async_callback(batches.close)
        delays = Delays(cluster, topics, limit_s)
        opened.push_async_callback(delays.stop, _DELAYS_STOP_S)
        delay_control = DelayControl(cluster, topics, delays, limit_s)
        opened.push_async_callback(delay_control.stop)
        opened.push_async_callback(batches.drain)
        if not self._internal:
            note_started(self)
            opened.callback(note_stopped, self)
        return _Running(Content(topics.messages_limit_bytes), routes, batches, delays, delay_control)

    def _hurry(self, running: _Running) -> None:
        running.batches.give_up()

    @overload
    async def send(self, queue: Target[T], value: T, **options: Unpack[SendOptions]) -> Receipt: ...

    @overload
    async def send(self, queue: str, value: Any, **options: Unpack[SendOptions]) -> Receipt: ...

    @overload
    async def send(self, queue: Sequence[str], value: Any, **options: Unpack[SendOptions]) -> list[Receipt]: ...

    @point("send")
    async def send(
        self,
        queue: Target[Any] | str | Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> Receipt | list[Receipt]:
        """Send one message; durable on return.

        If ``queue`` is a function with ``@marq.handler``, its queue gets the message, encoded for the function. If it
        is a list, each queue gets it, and the receipts come in the same order; all queues are checked before the first
        send. With ``delay`` (seconds or timedelta) or ``at`` (a datetime with a time zone) the
        message is delivered later; until then pass its receipt to :meth:`cancel` or :meth:`reschedule`. Delays count by
        the brokers' clocks, from the moment the message is durable. ``headers`` are a dict or pairs; text is sent as
        UTF-8, and consumers receive bytes.

        Raises:
            TypeError, ValueError: the value is not bytes, or the codec can't encode it; nothing was sent.
            MessageTooLarge: it does not fit; nothing was sent.
            ConfigError: a queue's name, a header or the time is not allowed; nothing was sent.
            BrokerUnavailable: the broker did not confirm in time: unknown whether the message was sent.
            SendManyFailed: the same for several queues; its ``receipts`` show which were sent.
        """
        if unknown:
            refuse("send", unknown)
        due = None if delay is None and at is None else when("send()", delay, at)
        codec = self._codec
        if not isinstance(queue, str):
            if isinstance(queue, Sequence):
                return await self._send_to_each(check_queues(queue), value, headers, due)
            queue, codec = target_of(queue, codec)
        running = self._running or self._started()
        route = running.routes.known.get(queue) or await running.routes.find(queue)
        pairs = check_headers(headers) if headers else []
        if codec is not None:
            value = encode(codec, queue, value)
        running.content.check(queue, route.key, value, pairs)
        if due is not None:
            return await running.delays.post(queue, value, pairs, due)
        partition, future = running.batches.post(route, value, pairs)
        return Receipt(queue, route.cursor.topic, partition, await future)

    async def _send_to_each(
        self, queues: Sequence[str], value: Any, headers: Headers | None, due: When | None
    ) -> list[Receipt]:
        running = self._started()
        pairs = check_headers(headers) if headers else []
        if self._codec is not None:
            value = encode(self._codec, queues, value)
        for queue in queues:
            await running.routes.find(queue)
        # Again, and now without waiting: the first routes may be outdated by now.
        routes = [await running.routes.find(queue) for queue in queues]
        for queue, route in zip(queues, routes, strict=True):
            running.content.check(queue, route.key, value, pairs)
        if due is not None:
            delayed = [running.delays.post(queue, value, pairs, due) for queue in queues]
            outcomes: list[Any] = await asyncio.gather(*delayed, return_exceptions=True)
            receipts = [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
        else:
            posts = [running.batches.post(route, value, pairs) for route in routes]
            outcomes = await asyncio.gather(*[future for _, future in posts], return_exceptions=True)
            receipts = [
                None if isinstance(outcome, BaseException) else Receipt(queue, route.cursor.topic, partition, outcome)
                for queue, route, (partition, _), outcome in zip(queues, routes, posts, outcomes, strict=True)
            ]
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise SendManyFailed(queues[index], index, receipts, outcome) from outcome
        return receipts  # type: ignore[return-value]

    @overload
    async def send_many(
        self, queue: Target[T], values: Iterable[T], **options: Unpack[SendManyOptions]
    ) -> list[Receipt]: ...

    @overload
    async def send_many(
        self, queue: str, values: Iterable[Any], **options: Unpack[SendManyOptions]
    ) -> list[Receipt]: ...

    @point("send_many")
    async def send_many(
        self,
        queue: Target[Any] | str,
        values: Iterable[Any],
        *,
        headers: Headers | None = None,
        delay: Delay | None = None,
        at: At | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]:
        """Send messages with the same headers; return their receipts in order when all are durable.

        ``delay`` and ``at`` are as for :meth:`send`, one for all messages or a list with one for each.

        Raises:
            TypeError, ValueError, MessageTooLarge: an item is not allowed (the text names it); nothing was sent.
            ConfigError: the queue's name, a header or a time is not allowed; nothing was sent.
            SendManyFailed: the broker did not confirm an item in time; its ``receipts`` show which were sent.
        """
        if unknown:
            refuse("send_many", unknown)
        if isinstance(queue, list | tuple):
            raise ConfigError(
                f"send_many() sends to one queue, not to {queue!r}: call it for each of them,"
                " or send(queues, value) for each value"
            )
        codec = self._codec
        if not isinstance(queue, str):
            queue, codec = target_of(queue, codec)
        running = self._started()
        route = running.routes.known.get(queue) or await running.routes.find(queue)
        pairs = check_headers(headers) if headers else []
        items = list(values)
        if codec is not None:
            items = [encode(codec, queue, value, item) for item, value in enumerate(items)]
        running.content.check_many(queue, route.key, items, pairs)
        dues = None if delay is None and at is None else whens("send_many()", delay, at, len(items))
        failure: BaseException | None
        if dues and items:
            receipts, failure = await running.delays.send_many(queue, items, pairs, dues)
        else:
            receipts, failure = await running.batches.send_many(queue, route, items, pairs)
        if failure is not None:
            raise SendManyFailed(queue, receipts.index(None), receipts, failure) from failure
        return receipts  # type: ignore[return-value]

    # --- delayed messages ---------------------------------------------------------------------------------------------

    @overload
    async def cancel(self, receipt: One) -> bool: ...

    @overload
    async def cancel(self, receipt: Several) -> list[bool]: ...

    async def cancel(self, receipt: One | Several) -> bool | list[bool]:
        """Cancel delayed messages, named by receipt or id; return True for each that will not be delivered.

        False means that it was delivered or cancelled before. Needs a running tracker, and the permission to read the
        markers topic.

        Raises:
            TypeError: an argument is not a receipt.
            ConfigError: a text is not the id of a message.
            BrokerUnavailable: no tracker answered within the request timeout: unknown whether it is cancelled.
        """
        return await self._ask("cancel", receipt, None)

    @overload
    async def reschedule(self, receipt: One, **time: Unpack[TimeOptions]) -> bool: ...

    @overload
    async def reschedule(self, receipt: Several, **time: Unpack[TimeOptions]) -> list[bool]: ...

    async def reschedule(
        self, receipt: One | Several, *, delay: Duration | None = None, at: datetime | None = None
    ) -> bool | list[bool]:
        """Deliver delayed messages at another time (``delay=0``: at once); otherwise as :meth:`cancel`.

        Raises:
            ConfigError: the time is missing or not allowed.
        """
        if delay is None and at is None:
            raise ConfigError("reschedule(): say when: delay=… (seconds or timedelta) or at=… (datetime)")
        return await self._ask("reschedule", receipt, when("reschedule()", delay, at) or When(0, relative=True))

    async def _ask(self, call: str, receipt: One | Several, due: When | None) -> bool | list[bool]:
        control = self._started().delay_control
        if isinstance(receipt, Receipt | str):
            return (await control.ask([_receipt(call, receipt)], due))[0]
        return await control.ask([_receipt(call, each) for each in receipt], due)


def _receipt(call: str, receipt: object) -> Receipt:
    if isinstance(receipt, str):
        return Receipt.of(receipt)
    if not isinstance(receipt, Receipt):
        raise TypeError(f"{call}() takes the receipt that send() returned, or its id, not {receipt!r}")
    return receipt
