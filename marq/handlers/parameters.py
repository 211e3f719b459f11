"""What a handler takes: the message, the decoded value, or both.

The annotations of its first two parameters decide. They are read once, when the function is decorated or a consumer
starts. A handler that takes only a message is called directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from marq.client.codecs import Codec, codec_for
from marq.client.send_targets import Handler
from marq.leases.message import Message
from marq.wire.errors import ConfigError

EXPECTED = (
    "expected a function that takes a message, its value, or both, such as (message: marq.Message), (order: Order) or"
    " (order: Order, message: marq.Message[Order])"
)

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
#: Annotations that carry no information.
_OPEN = (inspect.Parameter.empty, Any, object)
#: Attribute of a decorated function: its string annotations, resolved, by parameter. Later, they may not be resolvable,
#: because they may name classes that are local to the enclosing function.
_ANNOTATIONS = "__marq_annotations__"


class Parameters(NamedTuple):
    """``arguments`` turns a message into the handler's arguments; None if it only takes the message."""

    arguments: Callable[[Message], tuple[Any, ...]] | None
    #: The type of the value; Any if no annotation states it.
    kind: Any
    annotations: Mapping[str, Any]


def bound(function: Handler) -> Callable[[Message], Any]:
    """Return a handler that takes a message: the function itself, or a wrapper that passes it what it takes."""
    arguments, kind, _ = parameters(function)
    if arguments is None:
        return function  # type: ignore[return-value]
    if is_coroutine_function(function):

        @functools.wraps(function)
        async def call(message: Message) -> Any:
            return await function(*arguments(message))
    else:

        @functools.wraps(function)
        def call(message: Message) -> Any:
            return function(*arguments(message))

    # Not the signature of the wrapped function.
    parameter = inspect.Parameter("message", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Message[kind])  # type: ignore[valid-type]
    call.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return call


def payload_codec(function: Handler, read: Parameters | None = None) -> Codec | None:
    """Return the codec for the annotated type of a handler's value, or None if no annotation states it.

    Raises:
        ConfigError: values of this type can't be decoded.
    """
    kind = (read or parameters(function)).kind
    try:
        return None if kind in _OPEN else codec_for(kind)
    except ConfigError as error:
        raise ConfigError(
            f"handler {name_of(function)}: its value can't be decoded into {_text(kind)}: {error}. Expected a pydantic"
            " model, a dataclass, dict, list, str, bytes or marq.Message; or pass @marq.handler a codec"
        ) from error


def parameters(function: Any, *, method: bool = False, names: Mapping[str, Any] | None = None) -> Parameters:
    """Read what a handler takes.

    Args:
        function: the handler.
        method: whether it may be a function of a class, whose first parameter is the instance.
        names: local names where it is decorated, to resolve string annotations.

    Raises:
        ConfigError: it takes something else.
    """
    try:
        declared = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Written in C, without a signature.
        return Parameters(None, Any, {})
    positional = [parameter for parameter in declared if parameter.kind in _POSITIONAL]
    if method and len(positional) > 1 and (positional[0].annotation is inspect.Parameter.empty):
        declared.remove(positional.pop(0))
    annotations = {parameter.name: _annotation(function, parameter, names or {}) for parameter in positional[:2]}
    kinds = [
        annotations[parameter.name]
        for index, parameter in enumerate(positional[:2])
        # A second parameter with a default is the function's own, unless it is a message.
        if index == 0 or parameter.default is parameter.empty or _is_message(annotations[parameter.name])
    ]
    others = [parameter for parameter in declared if parameter not in positional[: len(kinds)]]
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in others)
    unfilled = any(parameter.default is parameter.empty and parameter.kind not in _VARIADIC for parameter in others)
    if unfilled or not (kinds or variadic):
        raise _unexpected(function)
    texts = [parameter.name for parameter in positional[:2] if isinstance(parameter.annotation, str)]
    kept = {name: annotations[name] for name in texts}
    return Parameters(*_chosen(function, kinds), kept)


def _chosen(function: Any, kinds: list[Any]) -> tuple[Callable[[Message], tuple[Any, ...]] | None, Any]:
    """Return what to pass for the annotations of one or two parameters, and the type of the value."""
    messages = [index for index, kind in enumerate(kinds) if _is_message(kind)]
    if len(kinds) < 2:
        if not kinds or messages or _says_nothing(kinds[0]):
            return None, _value_kind(kinds[0]) if messages else Any
        return (lambda message: (message.value,)), kinds[0]
    if not messages:
        # The annotated parameter has the type of the value.
        messages = [index for index, kind in enumerate(kinds) if _says_nothing(kind)]
    if len(messages) != 1:
        raise _unexpected(function)
    [place] = messages
    value, inner = kinds[1 - place], _value_kind(kinds[place])
    if _says_nothing(value):
        value = inner
    elif not (_says_nothing(inner) or value == inner):
        raise ConfigError(
            f"handler {name_of(function)}: it takes a value of type {_text(value)} and Message[{_text(inner)}];"
            " expected the same type twice"
        )
    if place == 0:
        return (lambda message: (message, message.value)), value
    return (lambda message: (message.value, message)), value


def keep(function: Any, annotations: Mapping[str, Any]) -> None:
    """Resolve string annotations and keep the result, while the names around the decorator are known."""
    if annotations:
        setattr(function, _ANNOTATIONS, annotations)


def _annotation(function: Any, parameter: inspect.Parameter, names: Mapping[str, Any]) -> Any:
    """Return a parameter's annotation, resolved if it is a string or contains one."""
    annotation = parameter.annotation
    if annotation in _OPEN:
        return Any
    inner = _inner(function)
    kept = getattr(inner, _ANNOTATIONS, {})
    if isinstance(annotation, str) and parameter.name in kept:
        return kept[parameter.name]
    holder = SimpleNamespace(__annotations__={parameter.name: annotation})
    scope = getattr(inspect.unwrap(inner), "__globals__", {})
    try:
        return get_type_hints(holder, scope, dict(names), include_extras=True)[parameter.name]
    except Exception as error:  # an annotation is any expression
        raise ConfigError(
            f"handler {name_of(function)}: the annotation {annotation!r} of {parameter.name} can't be read ({error});"
            " define or import the type above the handler, at the top of the module and not only for type checking"
        ) from error


def _inner(function: Any) -> Any:
    """Return the function that a partial, a method or a callable object calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__globals__") or hasattr(function, "__wrapped__") else type(function).__call__


def _is_message(kind: Any) -> bool:
    return _message(kind) is not None


def _message(kind: Any) -> Any:
    """Return Message or Message[T] if an annotation is one, also within Optional and Annotated."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _message(get_args(kind)[0])
    if origin in (Union, UnionType):
        return next((message_kind for message_kind in map(_message, get_args(kind)) if message_kind is not None), None)
    base = origin or kind
    return kind if isinstance(base, type) and issubclass(base, Message) else None


def _value_kind(kind: Any) -> Any:
    """Return T of Message[T], or Any."""
    inner = next(iter(get_args(_message(kind))), Any)
    return Any if _says_nothing(inner) else inner


def _says_nothing(kind: Any) -> bool:
    return kind in _OPEN or isinstance(kind, TypeVar)


def _unexpected(function: Any) -> ConfigError:
    return ConfigError(f"handler {name_of(function)}{inspect.signature(function)}: {EXPECTED}")


def _text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def is_coroutine_function(handler: object) -> bool:
    """Whether a call returns a coroutine, also for objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(handler) or (callable(handler) and inspect.iscoroutinefunction(handler.__call__))


def name_of(function: object) -> str:
    """Return ``module:qualname``, with <> in it if that name can't be imported."""
    inner = function.func if isinstance(function, functools.partial) else function
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    name = f"{named.__module__}:{named.__qualname__}"
    return name if named is function else f"{name}.<{type(function).__name__}>"
