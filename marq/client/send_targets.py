"""What a decorated function says about the queues that it handles, and which of them ``send`` means.

:class:`Decorated` is such a function as type checkers see it: its own signature, and ``send`` for the values that it
handles. At run time it is the function itself, with an attribute ``send``. That class and its parts are never
instantiated; their methods only declare types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from marq.client.codecs import Codec
from marq.client.receipt import Receipt
from marq.client.send_options import SendOptions
from marq.wire.errors import ConfigError

if TYPE_CHECKING:
    from marq.leases.message import Message

#: The attribute of a decorated function with its definitions.
ATTRIBUTE = "__marq_handlers__"

#: A handler as users write it.
Handler = Callable[[Any], Any] | Callable[[Any, Any], Any]

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
Target: TypeAlias = (
    "Decorated[[Message[T]], Any] | Decorated[[T, Message[T]], Any] | Decorated[[Message[T], T], Any]"
    " | Decorated[[T], Any]"
)


class Decorate(Protocol):
    """A decorator with its arguments."""

    def __call__(self, function: Callable[P, R], /) -> Decorated[P, R]: ...


# --- definitions ---


@dataclass(frozen=True, slots=True)
class HandlerDefinition:
    """A function that handles a queue; ``name`` is ``module:qualname``, as in ``handler`` of marq.toml.

    Without a ``codec`` in the decorator, the annotated type determines it, if there is one. ``settings`` are the other
    settings of the queue in the decorator, as in its table of marq.toml. ``type``: the type of the messages that it
    handles; None: those that no other handler is for.
    """

    queue: str
    function: Handler
    name: str
    codec: Codec | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    type: str | None = None

    @property
    def what(self) -> str:
        """What it handles, for errors."""
        return f"queue {self.queue!r}" if self.type is None else f"queue {self.queue!r}, type {self.type!r}"


def definitions_of(function: object) -> tuple[HandlerDefinition, ...]:
    """Return the definitions of a decorated function or bound method, even if another decorator wraps it."""
    try:
        definitions = getattr(function, ATTRIBUTE, ())
    except Exception:  # a proxy of another library may raise anything
        return ()
    if not isinstance(definitions, tuple) or not callable(function):
        return ()
    # Other decorators copy attributes to their wrappers, and methods show those of their function.
    handlers = [definition for definition in definitions if isinstance(definition, HandlerDefinition)]
    return tuple(replace(handler, function=function) for handler in handlers)


class SendTarget(NamedTuple):
    """Where ``send`` sends, the codec of the values, and their type."""

    queue: str
    codec: Codec | None
    type: str | None


def target_of(function: object, codec: Codec | None, kind: str | None = None) -> SendTarget:
    """Return the queue of a decorated function, the codec of its values, else ``codec``, and the type of its messages.

    ``kind`` is the type that the caller has named.

    Raises:
        ConfigError: it is not decorated, is decorated for several queues or types, or not for this type.
    """
    definitions = definitions_of(function)
    if not definitions:
        raise ConfigError(
            "a queue's name is text (str), or several a list of names, or a function with @marq.handler, not"
            f" {function!r}"
        )
    first, *others = definitions
    if any(definition.queue != first.queue for definition in others):
        queues = ", ".join(dict.fromkeys(repr(definition.queue) for definition in definitions))
        raise ConfigError(
            f"{first.name} handles several queues ({queues}), so its queue is ambiguous: name one, as in"
            f" producer.send({first.queue!r}, value)"
        )
    by_type = {definition.type: definition for definition in definitions}
    definition = by_type.get(kind) if kind is not None or None in by_type or others else first
    if definition is None:
        types = ", ".join(repr(type_) for type_ in by_type if type_ is not None) or "none"
        problem = (
            "handles several types, so the type is ambiguous" if kind is None else f"does not handle type {kind!r}"
        )
        raise ConfigError(
            f"{first.name} {problem} (its types: {types}): name one of them, or the queue and a type, as in"
            f" producer.send({first.queue!r}, value, type=…)"
        )
    return SendTarget(definition.queue, definition.codec or codec, definition.type)
