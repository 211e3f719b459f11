"""A decorated function as type checkers see it: its own signature, and ``send`` for the values that it handles.

At run time it is the function itself, with an attribute ``send``. These classes are never instantiated; their methods
only declare types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from marq.client.receipt import Receipt
from marq.client.send_options import SendOptions
from marq.consumer.message import Message

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
P = ParamSpec("P")
#: The parameters of a method without its instance.
Rest = ParamSpec("Rest")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Send(Protocol[T_contra]):
    """``send`` of a decorated function."""

    async def __call__(self, value: T_contra, **options: Unpack[SendOptions]) -> Receipt: ...


class Sending:
    """The attribute ``send``: the type of the values follows from the function's parameters."""

    # One for each form of Target, because mypy does not infer T from the union.
    @overload
    def __get__(self, instance: Callable[[Message[T]], Any], owner: type) -> Send[T]: ...

    @overload
    def __get__(self, instance: Callable[[T, Message[T]], Any], owner: type) -> Send[T]: ...

    @overload
    def __get__(self, instance: Callable[[Message[T], T], Any], owner: type) -> Send[T]: ...

    @overload
    def __get__(self, instance: Callable[[T], Any], owner: type) -> Send[T]: ...

    def __get__(self, instance: object, owner: type) -> Any:
        raise NotImplementedError


class Decorated(Generic[P, R_co]):
    """A decorated function."""

    send = Sending()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        raise NotImplementedError

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self: Decorated[Concatenate[Any, Rest], R], instance: object, owner: type) -> Decorated[Rest, R]: ...

    def __get__(self, instance: object, owner: type) -> Any:
        raise NotImplementedError


#: A decorated function that handles values of type T.
Target = (
    Decorated[[Message[T]], Any]
    | Decorated[[T, Message[T]], Any]
    | Decorated[[Message[T], T], Any]
    | Decorated[[T], Any]
)


class Decorate(Protocol):
    """A decorator with its arguments."""

    def __call__(self, function: Callable[P, R], /) -> Decorated[P, R]: ...
