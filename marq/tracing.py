"""OpenTelemetry spans for clients and handlers, following its messaging conventions: the extra ``marq[otel]``.

``marq.tracing.instrument()`` wraps hooks of this process's clients (:mod:`marq.client.hooks`); without it they cost
nothing. The context of a message is in its headers, which every copy of it keeps: a message that is delayed, released
or redelivered is processed in the trace in which it was sent, each attempt in its own span. No span contains any part
of a payload.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import time_ns
from types import TracebackType
from typing import Any

from marq.client import hooks
from marq.client.outcomes import Reject, Retry
from marq.client.receipt import Receipt
from marq.client.send_targets import target_of
from marq.consumer.consumer import Consumer
from marq.leases.message import Message
from marq.producer.producer import Producer
from marq.wire.names import is_synthetic

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
except ImportError as error:
    raise ImportError("marq.tracing needs OpenTelemetry: pip install 'marq[otel]'") from error

#: Limit of the messages of a batch to whose senders a span is linked.
MAX_LINKS = 128

_Attributes = dict[str, str | int | float]
#: The calls that end the wrapping; empty: nothing is instrumented.
_wrapped: list[Callable[[], None]] = []
_tracer: Tracer = trace.NoOpTracer()
#: Open spans of ``async with message``, by the message's identity; None: a handler has it, and a span of its own.
_blocks: dict[int, Any] = {}


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Create spans for all clients of this process from now on; further calls do nothing.

    ``tracer_provider`` defaults to the global one, which OpenTelemetry's SDK sets up.
    """
    global _tracer
    if not _wrapped:
        _tracer = trace.get_tracer("marq", tracer_provider=tracer_provider)
        _wrapped.extend(hooks.wrap(point, around) for point, around in _POINTS.items())


def uninstrument() -> None:
    """Stop creating spans, and restore the clients."""
    while _wrapped:
        _wrapped.pop()()


# --- send -------------------------------------------------------------------------------------------------------------


def _send(original: Any) -> Any:
    async def send(self: Producer, queue: Any, value: Any, *, headers: Any = None, **options: Any) -> Any:
        attributes = _delay(options)
        if isinstance(queue, Sequence) and not isinstance(queue, str):
            attributes["messaging.batch.message_count"] = len(queue)
        with _span("send", "send", _destination(queue, options), SpanKind.PRODUCER, attributes) as span:
            receipt = await original(self, queue, value, headers=_with_context(headers), **options)
            if isinstance(receipt, Receipt):
                span.set_attributes(_place(receipt))
            return receipt

    return send


def _send_many(original: Any) -> Any:
    async def send_many(self: Producer, queue: Any, values: Iterable[Any], *, headers: Any = None, **more: Any) -> Any:
        items = list(values)
        attributes = _delay(more) | {"messaging.batch.message_count": len(items)}
        with _span("send", "send", _destination(queue, more), SpanKind.PRODUCER, attributes):
            return await original(self, queue, items, headers=_with_context(headers), **more)

    return send_many


def _destination(queue: Any, options: Mapping[str, Any]) -> Any:
    return target_of(queue, None, options.get("type")).queue if callable(queue) else queue


def _with_context(headers: Any) -> Any:
    """Return headers with the context of the current span; the producer reports invalid headers."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    # A forwarded message has a trace header from its original sender.
    kept = [pair for pair in pairs if not (isinstance(pair, tuple | list) and pair and pair[0] in carrier)]
    return [*kept, *carrier.items()]


def _delay(options: Mapping[str, Any]) -> _Attributes:
    delay = options.get("delay")
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    return {"marq.delay": delay} if isinstance(delay, int | float) and delay else {}


# --- receive ----------------------------------------------------------------------------------------------------------


def _receive(original: Any) -> Any:
    async def receive(self: Consumer, *arguments: Any, **options: Any) -> list[Message]:
        began_ns = time_ns()
        messages: list[Message] = await original(self, *arguments, **options)
        # An empty wait needs no span.
        if messages:
            span = _tracer.start_span(
                f"receive {self.name}",
                kind=SpanKind.CLIENT,
                links=_links(messages),
                attributes=_attributes("receive", "receive", self.name)
                | {"messaging.batch.message_count": len(messages)},
                start_time=began_ns,
            )
            span.end()
        return messages

    return receive


# --- process ----------------------------------------------------------------------------------------------------------


def _surround(original: Any) -> Any:
    def surround(handler: Any, chain: Sequence[Any]) -> Any:
        return original(handler, [_processed, *chain])

    return surround


async def _processed(work: Message | list[Message], call_next: Callable[[Any], Awaitable[Any]]) -> None:
    """Middleware of all handlers, including those that take lists."""
    if isinstance(work, list):
        with _process(work):
            await call_next(work)
        return
    with _process([work]), _in_handler(work):
        await call_next(work)
        if work._offset not in work._batch.decided:
            # The ack that follows the return of a handler, done a moment earlier so that it has a span.
            with _span("ack", "settle", work.queue, SpanKind.CLIENT, _of(work)):
                work._ack()


@contextmanager
def _in_handler(message: Message) -> Iterator[None]:
    _blocks[id(message)] = None
    try:
        yield
    finally:
        del _blocks[id(message)]


def _enter(original: Any) -> Any:
    async def enter(self: Message) -> Message:
        message: Message = await original(self)
        if id(self) in _blocks:
            return message
        processing = _process([message])
        processing.__enter__()
        _blocks[id(self)] = processing
        return message

    return enter


def _exit(original: Any) -> Any:
    async def leave(
        self: Message, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        done: bool = await original(self, kind, error, traceback)
        processing = _blocks.get(id(self))
        if processing is not None:
            del _blocks[id(self)]
            try:
                processing.__exit__(kind, error, traceback)
            except BaseException as passed:
                if passed is not error:
                    raise
        return done

    return leave


@contextmanager
def _process(messages: Sequence[Message]) -> Iterator[Span]:
    """Open a span for the work on messages; a single one continues its sender's trace unless a span is open already."""
    queues = {message.queue for message in messages}
    attributes: _Attributes = {"messaging.batch.message_count": len(messages)}
    parent = None
    if len(messages) == 1:
        attributes = _of(messages[0])
        if not trace.get_current_span().get_span_context().is_valid:
            parent = _context(messages[0])
    queue = queues.pop() if len(queues) == 1 else ""
    with _span("process", "process", queue, SpanKind.CONSUMER, attributes, _links(messages), parent) as span:
        yield span


# --- settle -----------------------------------------------------------------------------------------------------------


def _settle(name: str) -> Callable[[Any], Any]:
    def around(original: Any) -> Any:
        async def settle(self: Message, *arguments: Any, **options: Any) -> None:
            with _span(name, "settle", self.queue, SpanKind.CLIENT, _of(self)):
                await original(self, *arguments, **options)

        return settle

    return around


def _fail(original: Any) -> Any:
    """Trace what follows an exception: a release, or a reject if the exception or the queue's rules require one."""

    def fail(message: Message, error: BaseException, *more: Any) -> Any:
        held = message._batch
        if message._offset in held.decided:
            return original(message, error, *more)
        # The handler's span is over by then; that of a block is not.
        parent = None if trace.get_current_span().get_span_context().is_valid else _context(message)
        rejected = len(held.rejected)
        with _span("release", "settle", message.queue, SpanKind.CLIENT, _of(message), parent=parent) as span:
            consequence = original(message, error, *more)
            if len(held.rejected) > rejected:
                span.update_name(f"reject {message.queue}")
                span.set_attribute("messaging.operation.name", "reject")
            return consequence

    return fail


def _ack(original: Any) -> Any:
    async def ack(self: Consumer, messages: Any) -> None:
        given = [messages] if isinstance(messages, Message | str) else list(messages)
        with _span("ack", "settle", self.name, SpanKind.CLIENT, {"messaging.batch.message_count": len(given)}):
            await original(self, given)

    return ack


# --- spans ------------------------------------------------------------------------------------------------------------


@contextmanager
def _span(
    operation: str,
    kind: str,
    queue: Any,
    span_kind: SpanKind,
    attributes: _Attributes,
    links: Sequence[Link] = (),
    parent: contexts.Context | None = None,
) -> Iterator[Span]:
    """Open a span that is current until its end and records the class of an error, but not the text."""
    destination = queue if isinstance(queue, str) else ""
    with _tracer.start_as_current_span(
        f"{operation} {destination}".rstrip(),
        context=parent,
        kind=span_kind,
        attributes=_attributes(operation, kind, destination) | attributes,
        links=links,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except (Retry, Reject) as outcome:
            span.set_attribute("marq.outcome", type(outcome).__name__.lower())
            raise
        except BaseException as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR))
            raise


def _attributes(operation: str, kind: str, queue: str) -> _Attributes:
    found: _Attributes = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    return found | {"messaging.destination.name": queue} if queue else found


def _of(message: Message) -> _Attributes:
    return {
        "messaging.message.id": message.id,
        "messaging.destination.partition.id": str(message.partition),
        "messaging.kafka.offset": message.offset,
        "marq.attempt": message.attempt,
    }


def _place(receipt: Receipt) -> _Attributes:
    found: _Attributes = {"messaging.message.id": receipt.id}
    if is_synthetic(receipt.topic):
        # A delayed message, or one with a deduplication id, has no record yet.
        return found
    return found | {
        "messaging.destination.partition.id": str(receipt.partition),
        "messaging.kafka.offset": receipt.offset,
    }


def _links(messages: Sequence[Message]) -> list[Link]:
    found = [trace.get_current_span(_context(message)).get_span_context() for message in messages[:MAX_LINKS]]
    return [Link(context) for context in found if context.is_valid]


def _context(message: Message) -> contexts.Context:
    """Return the context in which a message was sent, an empty one if it is unknown."""
    carrier = {name: value.decode("utf-8", "replace") for name, value in message.headers.items() if value is not None}
    return propagate.extract(carrier, context=contexts.Context())


#: By hook point, the function that wraps its method.
_POINTS: dict[str, Callable[[Any], Any]] = {
    "send": _send,
    "send_many": _send_many,
    "receive": _receive,
    "ack_many": _ack,
    "surround": _surround,
    "enter": _enter,
    "exit": _exit,
    "fail": _fail,
    **{name: _settle(name) for name in ("ack", "release", "reject", "renew")},
}
