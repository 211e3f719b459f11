"""What handlers take, by their signatures and annotations, and what they are called with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pytest
from pydantic import BaseModel

import marq
from marq.client.send_targets import definitions_of, target_of
from marq.handlers.decorator import check_handler, codec_of
from marq.handlers.parameters import bound, parameters, payload_codec
from marq.testing import Broker

if TYPE_CHECKING:
    from decimal import Decimal

T = TypeVar("T")


@dataclass
class Order:
    number: int


class Email(BaseModel):
    to: str


#: In place of a message.
MESSAGE: Any = SimpleNamespace(value="the value")


def called(handler: Any) -> Any:
    """Call what a consumer would call; return what the handler returned."""
    result = bound(handler)(MESSAGE)
    return asyncio.run(result) if inspect.isawaitable(result) else result


class Handlers:
    def message(self, message: marq.Message) -> object:
        return message

    def value(self, order: Order) -> object:
        return order

    async def both(self, order: Order, message: marq.Message[Order]) -> object:
        return order, message

    @staticmethod
    def static(order, message: marq.Message) -> object:  # type: ignore[no-untyped-def]
        return order, message

    def __call__(self, order: Order) -> object:
        return order


def both(order: Order, message: marq.Message[Order]) -> object:
    return order, message


async def value_only(order: Order) -> object:
    return order


def with_pool(pool: str, order: Order, message: marq.Message) -> object:
    return pool, order, message


@functools.wraps(both)
def wrapped(*arguments: Any) -> object:
    return both(*arguments)


# --- what they are called with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (both, ("the value", MESSAGE)),
        (value_only, "the value"),
        (wrapped, ("the value", MESSAGE)),
        (functools.partial(with_pool, "pool"), ("pool", "the value", MESSAGE)),
        (Handlers().message, MESSAGE),
        (Handlers().value, "the value"),
        (Handlers().both, ("the value", MESSAGE)),
        (Handlers.static, ("the value", MESSAGE)),
        (Handlers(), "the value"),
        (lambda message: message, MESSAGE),
        (lambda *arguments: arguments, (MESSAGE,)),
    ],
)
def test_a_handler_gets_what_its_parameters_say(handler, expected) -> None:
    assert called(handler) == expected


def signatures() -> list[Any]:
    def optional_message(message: marq.Message[Order] | None = None): ...
    def union(message: marq.Message | None): ...
    def annotated(message: Annotated[marq.Message, "note"]): ...
    def anything(message: Any): ...
    def an_object(message: object): ...
    def variable(message: T): ...
    def with_default(message, verbose=False): ...
    def with_typed_default(message: marq.Message, order: Order | None = None): ...
    def keyword(message, *, verbose=False): ...

    return [
        optional_message, union, annotated, anything, an_object, variable, with_default, with_typed_default, keyword,
        print,
    ]  # fmt: skip


@pytest.mark.parametrize("handler", signatures(), ids=lambda handler: handler.__name__)
def test_a_handler_of_messages_is_called_as_it_is(handler) -> None:
    assert bound(handler) is handler


def test_the_order_of_the_parameters_does_not_matter() -> None:
    def turned(message: marq.Message, order: Order):
        return message, order

    def first_unnamed(order, message: marq.Message[Order]):
        return message, order

    def second_unnamed(order: Order, message):
        return message, order

    def default(order: Order, message: marq.Message | None = None):
        return message, order

    for handler in (turned, first_unnamed, second_unnamed, default):
        assert called(handler) == (MESSAGE, "the value")
        assert parameters(handler).kind is Order


def test_a_bound_handler_takes_a_message_of_the_same_type_and_keeps_name_and_kind() -> None:
    handler = bound(value_only)

    assert bound(handler) is handler
    assert parameters(handler).kind is Order
    assert handler.__name__ == "value_only"
    assert inspect.iscoroutinefunction(handler)
    assert not inspect.iscoroutinefunction(bound(both))


# --- the codec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "codec"),
    [
        (Email, "marq.Model(Email)"),
        (Order, "marq.Model(Order)"),
        ("list[Order]", "marq.Model(list[tests.unit.client.test_handler_parameters.Order])"),
        ("Email | None", "marq.Model(tests.unit.client.test_handler_parameters.Email | None)"),
        (int, "marq.Model(int)"),
        (dict, "JSON of type dict"),
        ("dict[str, Any]", "JSON of type dict"),
        (list, "JSON of type list"),
        (str, "marq.TEXT"),
        (bytes, "marq.BYTES"),
        ("marq.Message[Order]", "marq.Model(Order)"),
        (marq.Message["Order"], "marq.Model(Order)"),
        (marq.Message[str], "marq.TEXT"),
        (marq.Message, "None"),
        (marq.Message[Any], "None"),
        (Any, "None"),
    ],
)
def test_the_annotation_decides_on_the_codec(annotation, codec: str) -> None:
    def handle(value): ...

    handle.__annotations__ = {"value": annotation, "return": "NotDefined"}

    assert repr(payload_codec(handle)) == codec
    (definition,) = definitions_of(marq.handler("q")(handle))
    assert repr(definition.codec) == codec


def test_a_codec_of_the_decorator_wins_over_the_annotation() -> None:
    @marq.handler("q", codec=marq.JSON)
    def handle(value: SimpleNamespace) -> None: ...

    assert codec_of(handle, "q") is marq.JSON
    assert target_of(handle, marq.TEXT) == ("q", marq.JSON, None)


def test_without_a_codec_of_the_handler_that_of_the_client_counts() -> None:
    @marq.handler("q")
    def handle(message: marq.Message) -> None: ...

    assert codec_of(handle, "q") is None
    assert target_of(handle, marq.TEXT) == ("q", marq.TEXT, None)


async def test_a_decorated_handler_can_be_called_and_keeps_local_types() -> None:
    @dataclass
    class Local:
        number: int

    class Billing:
        @marq.handler("methods")
        async def bill(self, order: Local, message: marq.Message[Local]) -> object:
            return order, message

    @marq.handler("functions")
    async def bill(order: Local) -> object:
        return order

    assert await bill(Local(1)) == Local(1)
    assert await Billing().bill(Local(1), MESSAGE) == (Local(1), MESSAGE)
    # Another decorator, a method and a partial are read later, where the local type is unknown.
    for handler in (bill, functools.wraps(bill)(lambda order: None), functools.partial(bill), Billing().bill):
        assert parameters(handler).kind is Local
    assert repr(codec_of(Billing().bill, "methods")) == "marq.Model(Local)"


# --- what is refused --------------------------------------------------------------------------------------------------


def unsuitable() -> list[Any]:
    def two_values(order: Order, email: Email): ...
    def two_messages(message: marq.Message, other: marq.Message): ...
    def nothing(): ...
    def three(order: Order, message: marq.Message, other): ...
    def unannotated(order, message): ...
    def keyword(order: Order, *, message: marq.Message): ...

    return [two_values, two_messages, nothing, three, unannotated, keyword]


@pytest.mark.parametrize("handler", unsuitable(), ids=lambda handler: handler.__name__)
def test_other_signatures_are_refused_with_the_expected_ones(handler) -> None:
    said = rf"{handler.__name__}\(.*takes a message, its value, or both, such as \(message: marq.Message\), \(order"

    with pytest.raises(marq.ConfigError, match=said):
        check_handler(handler)
    with pytest.raises(marq.ConfigError, match=said):
        marq.handler("q")(handler)


def test_two_types_for_one_value_are_refused() -> None:
    def handle(order: Order, message: marq.Message[Email]) -> None: ...

    with pytest.raises(marq.ConfigError, match=r"a value of type Order and Message\[Email\]; expected the same"):
        check_handler(handle)


def test_an_annotation_that_can_not_be_read_says_which_and_why() -> None:
    def handle(amount: Decimal) -> None: ...

    with pytest.raises(marq.ConfigError, match=r"the annotation 'Decimal' of amount .*'Decimal' is not defined"):
        marq.handler("q")(handle)


def test_a_type_that_can_not_be_decoded_is_refused_when_decorating() -> None:
    with pytest.raises(marq.ConfigError, match=r"handle: its value can't be decoded into SimpleNamespace.*Expected"):

        @marq.handler("q")
        def handle(value: SimpleNamespace) -> None: ...


def test_without_pydantic_a_dataclass_needs_a_codec(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)

    with pytest.raises(marq.ConfigError, match=r"Order.*needs pydantic 2.*or pass @marq.handler a codec"):
        marq.handler("q")(value_only)


# --- send -------------------------------------------------------------------------------------------------------------


async def test_a_target_must_be_decorated_for_one_queue() -> None:
    @marq.handler("a")
    @marq.handler("b")
    async def several(order: Order) -> None: ...

    with pytest.raises(marq.ConfigError, match=r"several handles several queues \('b', 'a'\).*producer\.send\('b'"):
        target_of(several, None)
    with pytest.raises(marq.ConfigError, match=r"\('b', 'a'\)"):
        await several.send(Order(1))
    with pytest.raises(marq.ConfigError, match=r"or a function with @marq\.handler, not <function"):
        target_of(both, None)


async def test_send_without_a_producer_says_what_to_do() -> None:
    @marq.handler("orders")
    async def bill(order: Order) -> None: ...

    with pytest.raises(marq.MarqError, match=r"bill\.send\(\): no producer is started .*producer\.send\(handler"):
        await bill.send(Order(1))


async def test_send_uses_the_one_producer_that_is_started() -> None:
    @marq.handler("orders")
    async def bill(order: Order) -> None: ...

    async with Broker() as broker, broker.producer():
        receipt = await bill.send(Order(1), headers={"tenant": b"acme"})
        async with broker.producer(codec=marq.TEXT) as other:
            with pytest.raises(marq.MarqError, match="2 producers are started in this event loop"):
                await bill.send(Order(2))
            await other.send_many(bill, [Order(3), Order(4)])

    sent = broker.sent("orders", codec=marq.Model(Order))
    assert sorted(each.value.number for each in sent) == [1, 3, 4]
    assert next(each.headers for each in sent if each.id == receipt.id) == {"tenant": b"acme"}
    with pytest.raises(marq.MarqError, match="no producer is started"):
        await bill.send(Order(5))


def test_a_synchronous_producer_encodes_for_a_handler() -> None:
    @marq.handler("orders")
    async def bill(order: Order) -> None: ...

    with contextlib.closing(Broker()) as broker, marq.SyncProducer(broker.address) as producer:
        producer.send(bill, Order(1))
        producer.send_many(bill, [Order(2)])
        with pytest.raises(TypeError, match=r"queue 'orders'.*expected an instance of Order, not str"):
            producer.send(bill, "x")  # type: ignore[arg-type]

    assert [each.body for each in broker.sent("orders")] == [b'{"number":1}', b'{"number":2}']


def test_an_object_with_a_method_send_keeps_it() -> None:
    class Mailer:
        def send(self) -> str:
            return "sent"

        def __call__(self, message: marq.Message) -> str:
            return self.send()

    assert marq.handler("emails")(Mailer())(MESSAGE) == "sent"


async def test_a_workers_producer_opens_at_first_use_and_not_after_the_stop() -> None:
    from marq.client.current_producer import HandlersProducer

    events: list[str] = []

    class Producer:
        async def start(self) -> None:
            events.append("start")

        async def stop(self) -> None:
            events.append("stop")

    shared = HandlersProducer(Producer)  # type: ignore[arg-type]
    await shared.stop()
    assert events == []
    shared = HandlersProducer(Producer)  # type: ignore[arg-type]
    assert await shared.started("shop:bill") is await shared.started("shop:bill")
    await shared.stop()
    with pytest.raises(marq.MarqError, match=r"shop:bill\.send\(\): nothing was sent, because the worker is stopping"):
        await shared.started("shop:bill")
    assert events[-1] == "stop"


async def test_a_plain_function_does_not_open_the_workers_producer_in_an_event_loop_of_its_own() -> None:
    @marq.handler("orders")
    async def bill(order: Order) -> None: ...

    @marq.handler("customers")
    def own_loop(number: str) -> None:
        with pytest.raises(
            marq.MarqError, match=r"bill\.send\(\) was called outside the worker's event loop: .*marq\.SyncProducer"
        ):
            asyncio.run(bill.send(Order(int(number))))

    @marq.handler("others")
    async def others(number: str) -> None:
        await bill.send(Order(int(number)))

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(own_loop, "1")
        await broker.run(own_loop, others)
        await producer.send(others, "2")
        await broker.run(own_loop, others)

    assert [each.body for each in broker.sent("orders")] == [b'{"number":2}']
