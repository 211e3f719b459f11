"""The decorator that assigns a function to a queue, and the search for decorated functions in modules.

The definition is an attribute of the function and not an entry in a registry, so importing a handler has no side
effects. Programs that run handlers name the modules to search.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType, ModuleType
from typing import Any, Unpack, cast

from marq.client.codecs import Codec, check_codec
from marq.client.current_producer import current_producer
from marq.client.receipt import Receipt
from marq.client.send_targets import ATTRIBUTE, Decorate, Handler, HandlerDefinition, definitions_of, target_of
from marq.handlers.parameters import EXPECTED, keep, name_of, parameters, payload_codec
from marq.settings.durations import plain
from marq.settings.hints import OURS, UnknownOption, refuse
from marq.settings.queue import QueueSettings, check_document, queue_settings, settings_document
from marq.settings.queue_options import HandlerOptions
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name, check_type_name

log = logging.getLogger("marq")

DEFAULT_CONCURRENCY = 64

_KEYWORDS = ("type", "codec", *HandlerOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class QueueHandlers:
    """All decorated handlers of one queue: by type, None for the one without; and the settings in their decorators."""

    by_type: Mapping[str | None, HandlerDefinition]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str | None:
        """The name of the handler without a type."""
        untyped = self.by_type.get(None)
        return None if untyped is None else untyped.name

    @property
    def types(self) -> dict[str, str]:
        """The names of the other handlers by type."""
        return {kind: handler.name for kind, handler in self.by_type.items() if kind is not None}

    @property
    def document(self) -> dict[str, Any]:
        """Their definitions as a layer of the queue's settings, which can name only one of the handlers."""
        return {"handler": self.name or min(self.types.values()), **self.settings}


def by_queue(definitions: Iterable[HandlerDefinition]) -> dict[str, QueueHandlers]:
    """Return the handlers of each queue.

    Raises:
        ConfigError: two functions handle the same messages, or two decorators have different values of a setting.
    """
    queues: dict[str, dict[str | None, HandlerDefinition]] = {}
    for definition in definitions:
        other = queues.setdefault(definition.queue, {}).setdefault(definition.type, definition)
        if other.function is not definition.function:
            raise two_handlers(other, definition)
    return {queue: QueueHandlers(by_type, _settings_of(by_type.values())) for queue, by_type in queues.items()}


def _settings_of(definitions: Collection[HandlerDefinition]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for definition in definitions:
        for key, value in definition.settings.items():
            if settings.setdefault(key, value) != value:
                other = next(one for one in definitions if key in one.settings)
                raise ConfigError(
                    f"queue {definition.queue!r}: {key} = {settings[key]} of @marq.handler ({other.name}) and {key} ="
                    f" {value} of @marq.handler ({definition.name}), but a setting is for the whole queue: keep one of"
                    " them"
                )
    return settings


def handler(
    queue: str,
    *,
    type: str | None = None,  # noqa: A002
    codec: Codec | None = None,
    **settings: Unpack[HandlerOptions],
) -> Decorate:
    """Decorate a function that handles the messages of ``queue``; you can still call it.

    It takes the message, its value, or both, as annotated: ``(message: marq.Message)``, ``(order: Order)``, or
    ``(order: Order, message: marq.Message[Order])``. Other parameters need defaults. The value is decoded to the
    annotated type: ``bytes``, ``str`` (UTF-8), or JSON as ``dict`` or ``list``. With pydantic it may also be a model, a
    dataclass or another type that pydantic validates.

    ``marq worker`` runs it if MARQ_HANDLERS names its module; so does :meth:`Consumer.run`. Stack several
    decorators to handle several queues.

    ``await function.send(value)`` sends to its queue and takes the options of :meth:`Producer.send`. In a worker's
    handler it uses the worker's producer, elsewhere the producer that is started in the event loop.
    ``producer.send(function, value)`` does the same with any producer.

    A queue can have a handler for each ``type`` of messages, and one without a type for all others. Messages of a type
    that has no handler wait, and become dead letters after about an hour and a half.

    Args:
        queue: the queue's name.
        type: handle only messages that are sent with this type: ``producer.send("mail", value, type="welcome")``.
        codec: decodes the value (default: the annotated type, else the consumer's codec, else bytes).
        settings: settings of the queue, such as ``max_attempts=3``: the keys of its table in marq.toml, except
            ``handler``. Workers publish them. Settings of the queue in marq.toml and at run time override them, and
            they override [defaults]. With :meth:`Consumer.run` only ``concurrency`` has an effect.

    Raises:
        ConfigError: a name or a setting is invalid, or the function has other parameters.
        TypeError: the decorator is used without parentheses or with an unknown keyword.
    """
    if callable(queue):
        raise TypeError('@marq.handler needs the name of a queue: write @marq.handler("emails"), for example')
    check_queue_name(queue)
    if type is not None:
        check_type_name(type)
    _refuse(settings)
    if codec is not None:
        check_codec(codec)
    given = {key: plain(value) for key, value in settings.items() if value is not None}
    document = check_document(given, f"@marq.handler({queue!r})")

    def decorate(function: Handler) -> Handler:
        _check_decorated(queue, function)
        in_class = _is_in_class(function)
        taken = parameters(function, method=in_class, names=_local_names(sys._getframe(1), in_class))
        values = payload_codec(function, taken) if codec is None else codec
        _attach(HandlerDefinition(queue, function, name_of(function), values, document, type))
        keep(function, taken.annotations)
        return function

    return cast("Decorate", decorate)


def codec_of(function: Handler, queue: str, kind: str | None = None) -> Codec | None:
    """Return the codec of a handler's values: of its definition for the queue and type, else of its annotation.

    Raises:
        ConfigError: values of the annotated type can't be decoded.
    """
    for definition in definitions_of(function):
        if (definition.queue, definition.type) == (queue, kind):
            return definition.codec
    return payload_codec(function)


def handlers_in(*modules: ModuleType) -> list[HandlerDefinition]:
    """Return the decorated functions in the namespaces of modules, imported ones included.

    So the ``__init__`` of a package can collect its handlers. A function that occurs twice counts once. A decorated
    method counts if the module has a name for the method bound to an instance.

    Raises:
        ConfigError: two functions handle the same messages, or a decorated method has no instance.
    """
    found: dict[tuple[str, str | None], HandlerDefinition] = {}
    seen: set[int] = set()
    for module in modules:
        for variable, value in list(vars(module).items()):
            if isinstance(value, type) or id(value) in seen:
                continue
            seen.add(id(value))
            for definition in definitions_of(value):
                name = f"{module.__name__}:{variable}"
                named = definition if _imported(definition.name) is value else replace(definition, name=name)
                other = found.setdefault((named.queue, named.type), named)
                if other is not named:
                    raise two_handlers(other, named)
    for module in modules:
        for definition in _methods(module):
            if (definition.queue, definition.type) not in found:
                owner, _, method = definition.name.partition(":")[2].rpartition(".")
                raise ConfigError(
                    f"{definition.what}: its handler {definition.name} is a method, and the module names no"
                    f" instance to call it on: write, for example, {method} = {owner}().{method}"
                )
    return list(found.values())


def definitions_for(function: object, queues: Collection[str]) -> dict[str, HandlerDefinition]:
    """Return the definition of a function for each of these queues, or {} if it is not decorated.

    Raises:
        ConfigError: it is decorated, but not for all of them, or for one type of their messages only.
    """
    # The last definition of a queue is kept: the one without a type, if there is one.
    untyped_last = sorted(definitions_of(function), key=lambda definition: definition.type is None)
    definitions = {definition.queue: definition for definition in untyped_last}
    for definition in definitions.values():
        if definition.queue in queues and definition.type is not None:
            raise ConfigError(
                f"{definition.name} handles only messages of type {definition.type!r} of queue {definition.queue!r},"
                " and a consumer would call it with all of them: run it in a worker, or pass a function that looks at"
                " message.type"
            )
    others = [queue for queue in queues if queue not in definitions]
    if definitions and others:
        raise ConfigError(
            f"{name_of(function)} is the handler of queue {', '.join(map(repr, sorted(definitions)))}, and would be"
            f" called with messages of queue {', '.join(map(repr, others))}: decorate it for that queue, too"
        )
    return {queue: definitions[queue] for queue in queues} if definitions else {}


def warn_of_unpublished(definition: HandlerDefinition, current: QueueSettings) -> None:
    """Warn if a decorator's settings have no effect, because no worker publishes them: a consumer runs its handler."""
    decorated, now = settings_document(queue_settings(definition.settings)), settings_document(current)
    # A consumer takes the concurrency from the decorator itself.
    keys = [key for key in definition.settings if key != "concurrency" and now[key] != decorated[key]]
    if keys:
        ours, theirs = [", ".join(f"{key} = {settings[key]}" for key in keys) for settings in (decorated, now)]
        log.warning(
            "queue %r: %s of @marq.handler (%s) has no effect, because only workers publish it; the queue has %s: set"
            " it in marq.toml, or run the handler in a worker",
            definition.queue,
            ours,
            definition.name,
            theirs,
        )


def check_handler(function: Any, takes: str = "a message") -> None:
    """Check that a handler can be called with a message, its value or both, or a list; raise ConfigError if not."""
    expected = EXPECTED if takes == "a message" else f"expected a function that takes {takes}"
    _check_callable(function, expected)
    if takes == "a message":
        parameters(function)
    elif not accepts(function, 1):
        raise ConfigError(f"handler {name_of(function)}{inspect.signature(function)}: {expected}, and nothing more")


def _check_callable(function: object, expected: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{function!r} can't be a handler: {expected}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"handler {name_of(function)}: {expected}; it has a yield, so a call would run nothing of it")


# --- other decorators -------------------------------------------------------------------------------------------------


def mark(function: object, attribute: str) -> None:
    """Mark a function for :func:`marked_in`.

    Raises:
        ConfigError: attributes can't be set on it.
    """
    try:
        setattr(function, attribute, True)
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{function!r} can't be decorated; write a function that calls it") from error


def marked_in(modules: Iterable[ModuleType], attribute: str) -> list[Any]:
    """Return the functions in the namespaces of modules that :func:`mark` has marked, in order, each once."""
    marked = {}
    for module in modules:
        for value in list(vars(module).values()):
            # A proxy of another library may raise anything, and a mock has every attribute.
            with contextlib.suppress(Exception):
                if getattr(value, attribute, None) is True:
                    marked[id(value)] = value
    return list(marked.values())


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_decorated(queue: str, function: object) -> None:
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise ConfigError(f"queue {queue!r}: write @{kind} above @marq.handler, not below it")
    if isinstance(function, type):
        raise ConfigError(f"queue {queue!r}: {name_of(function)} is a class; decorate its method that takes a message")
    _check_callable(function, EXPECTED)


def _attach(definition: HandlerDefinition) -> None:
    function = definition.function
    before = getattr(function, ATTRIBUTE, ())
    if any((other.queue, other.type) == (definition.queue, definition.type) for other in before):
        raise ConfigError(f"{definition.what}: {definition.name} is decorated twice for it")
    try:
        setattr(function, ATTRIBUTE, (*before, definition))
        # A callable object may have a method of that name.
        if not hasattr(type(function), "send"):
            function.send = _sending(function)  # type: ignore[union-attr]
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"queue {definition.queue!r}: {function!r} can't be decorated; decorate the method in its class, or write a"
            " function that calls it"
        ) from error


def _sending(function: Handler) -> Callable[..., Any]:
    async def send(value: Any, **options: Any) -> Receipt:
        """Send one message to the handler's queue, like :meth:`marq.Producer.send`."""
        target_of(function, None, options.get("type"))
        producer = await current_producer(name_of(function))
        receipt: Receipt = await producer.send(function, value, **options)
        return receipt

    return send


def two_handlers(one: HandlerDefinition, other: HandlerDefinition) -> ConfigError:
    """Return the error for two handlers of the same messages."""
    most = "a queue has one, or one for each type (@marq.handler(…, type=…))" if one.type is None else "a type has one"
    return ConfigError(
        f"{one.what} has two handlers, {one.name} and {other.name}, but {most}: remove one of the decorators"
    )


def _refuse(settings: Mapping[str, object]) -> None:
    for name in settings:
        if name in _KEYWORDS:
            continue
        if name == "countdown":
            raise UnknownOption(
                "handler() has no keyword 'countdown': a message is delayed where it is sent, send(…, delay=…), or in"
                " the handler, raise marq.Retry(delay=…)"
            )
        close = difflib.get_close_matches(name, _KEYWORDS, n=1)
        if close and name not in OURS:
            raise UnknownOption(f"handler() has no keyword {name!r}; did you mean {close[0]!r}?")
        refuse("handler", {name: None})


def accepts(function: Callable[..., object], count: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Written in C, without a signature.
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _is_in_class(function: object) -> bool:
    scope, _, _ = getattr(function, "__qualname__", "").rpartition(".")
    return bool(scope) and not scope.endswith("<locals>")


def _local_names(frame: FrameType, in_class: bool) -> dict[str, Any]:
    """Return the local names where a function is decorated; for a method, also those around its class."""
    outer = frame.f_back.f_locals if in_class and frame.f_back else {}
    return {**outer, **frame.f_locals}


def _imported(name: str) -> object:
    """Return the object with a name, or None."""
    module, _, path = name.partition(":")
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module))


def _methods(module: ModuleType) -> Iterator[HandlerDefinition]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for member in vars(value):
                yield from definitions_of(getattr(value, member, None))
