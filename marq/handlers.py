"""The decorator that says which queue a function handles, and the search for such functions in modules.

The definition is an attribute of the function, and nothing else: there is no registry that fills while modules are
imported, so a test that imports a handler changes nothing, and who runs handlers says in which modules to look.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from marq.codecs import Codec, check_codec
from marq.core.errors import ConfigError
from marq.core.names import check_group_name, check_queue_name
from marq.core.queue import CHECKS, MAX_CONCURRENCY
from marq.message import Message
from marq.settings import whole_number
from marq.words import OURS, ForeignWord, Unknown, refuse

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]
Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_CONCURRENCY = 64

_ATTRIBUTE = "__marq_handlers__"
#: What other systems call settings of a queue.
_FOREIGN_SETTINGS = {"max_retries": "max_attempts", "visibility_timeout": "lease"}


@dataclass(frozen=True, slots=True)
class HandlerDefinition:
    """That a function handles the messages of a queue; what is None was not said.

    ``name`` is ``module:qualname``, as in ``handler`` of queues.toml.
    """

    queue: str
    function: Handler
    name: str
    concurrency: int | None = None
    codec: Codec | None = None
    group: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What the definition says of its queue: a layer of the queue's settings."""
        said = {"handler": self.name, "group": self.group, "concurrency": self.concurrency}
        return {key: value for key, value in said.items() if value is not None}


def handler(
    queue: str,
    *,
    concurrency: int | None = None,
    codec: Codec | None = None,
    group: str | None = None,
    **unknown: Unknown,
) -> Callable[[Function], Function]:
    """Decorate a function that handles the messages of ``queue``; it stays the function that it is.

    It is run by ``faust -A app worker`` where its module is named in MARQ_HANDLERS, and by :meth:`Consumer.run`.
    Several decorators, one above the other, make it the handler of several queues.

    Args:
        queue: the queue's name.
        concurrency: calls at a time; else what the queue's settings say, 64 unless they do.
        codec: makes ``message.value`` of the bytes; else that of the consumer, which is the bytes as they are.
        group: the named group of queues that are read together; else "handlers".

    Raises:
        ConfigError: a name or a number is not allowed, or it is nothing that can be called with one message.
        TypeError: the decorator lacks its parentheses, or a keyword is none of these.
    """
    if callable(queue):
        raise TypeError('@marq.handler needs the name of a queue: write @marq.handler("emails"), for example')
    check_queue_name(queue)
    _refuse(queue, unknown)
    if concurrency is not None:
        whole_number("concurrency", concurrency, most=MAX_CONCURRENCY)
    if codec is not None:
        check_codec(codec)
    if group is not None:
        check_group_name(group)

    def decorate(function: Function) -> Function:
        _check_decorated(queue, function)
        _attach(HandlerDefinition(queue, function, _name(function), concurrency, codec, group))
        return function

    return decorate


def definitions_of(function: object) -> tuple[HandlerDefinition, ...]:
    """Return what decorators say of a function, a method of an instance, or what wraps such a one."""
    try:
        found = getattr(function, _ATTRIBUTE, ())
    except Exception:  # proxies of other libraries raise what they like
        return ()
    if not isinstance(found, tuple) or not callable(function):
        return ()
    # Other decorators copy attributes to what they return, and methods show those of their function.
    return tuple(replace(each, function=function) for each in found if isinstance(each, HandlerDefinition))


def handlers_in(*modules: ModuleType) -> list[HandlerDefinition]:
    """Return the decorated functions that modules have in their namespaces, those that they import, too.

    So the ``__init__`` of a package can gather its handlers. A function that is found twice counts once; of a class
    the methods of an instance are found that the module has under a name of their own.

    Raises:
        ConfigError: two functions for one queue, or a decorated method without an instance.
    """
    found: dict[str, HandlerDefinition] = {}
    seen: set[int] = set()
    for module in modules:
        for place, value in list(vars(module).items()):
            if isinstance(value, type) or id(value) in seen:
                continue
            seen.add(id(value))
            for definition in definitions_of(value):
                name = f"{module.__name__}:{place}"
                _add(found, definition if _imported(definition.name) is value else replace(definition, name=name))
    for module in modules:
        for definition in _methods(module):
            if definition.queue not in found:
                raise ConfigError(
                    f"queue {definition.queue!r}: its handler {definition.name} is a method, and the module names no"
                    f" instance to call it on: write, for example, handle = {_class_of(definition.name)}().handle"
                )
    return list(found.values())


def definitions_for(function: object, queues: Collection[str]) -> dict[str, HandlerDefinition]:
    """Return what decorators say of a function for each of these queues; nothing, if it is not decorated.

    Raises:
        ConfigError: it is decorated, and for other queues.
    """
    said = {each.queue: each for each in definitions_of(function)}
    others = [queue for queue in queues if queue not in said]
    if said and others:
        raise ConfigError(
            f"{_name(function)} is the handler of queue {', '.join(map(repr, sorted(said)))}, and would be called with"
            f" messages of queue {', '.join(map(repr, others))}: decorate it for that one, too"
        )
    return {queue: said[queue] for queue in queues} if said else {}


def check_handler(function: object, takes: str = "a message") -> None:
    """Check that a handler can be called with what it ``takes``.

    Raises:
        ConfigError: it can't.
    """
    expected = f"expected a function that takes {takes}"
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"handler={function!r}: {expected}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"handler {_name(function)}: {expected}; it has a yield, so a call would run nothing of it")
    if not _takes(function, 1):
        raise ConfigError(f"handler {_name(function)}{inspect.signature(function)}: {expected}, and nothing more")


def _check_decorated(queue: str, function: object) -> None:
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise ConfigError(f"queue {queue!r}: write @{kind} above @marq.handler, not below it")
    if isinstance(function, type):
        raise ConfigError(
            f"queue {queue!r}: {_name(function)} is a class; decorate the method of it that takes a message"
        )
    # The instance comes first in a method, and is not there yet.
    if not (_is_in_class(function) and callable(function) and _takes(function, 2)):
        check_handler(function)


def _attach(definition: HandlerDefinition) -> None:
    function = definition.function
    before = getattr(function, _ATTRIBUTE, ())
    if any(each.queue == definition.queue for each in before):
        raise ConfigError(f"queue {definition.queue!r}: {definition.name} is decorated twice for it")
    try:
        setattr(function, _ATTRIBUTE, (*before, definition))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"queue {definition.queue!r}: {function!r} can't be decorated; of an instance decorate the method in its"
            " class, else write a function that calls it"
        ) from error


def _add(found: dict[str, HandlerDefinition], definition: HandlerDefinition) -> None:
    other = found.setdefault(definition.queue, definition)
    if other is not definition:
        raise ConfigError(
            f"queue {definition.queue!r} has two handlers, {other.name} and {definition.name}: a queue has one; take"
            " the decorator from the other"
        )


def _refuse(queue: str, unknown: Mapping[str, object]) -> None:
    for name in unknown:
        setting = _FOREIGN_SETTINGS.get(name, name)
        if setting in CHECKS:
            raise ForeignWord(
                f"handler() has no keyword {name!r}: {OURS.get(name, setting)} is a setting of the queue; write"
                f" {setting} = … under [queues.{queue}] in queues.toml"
            )
        if name in {"countdown", "delay"}:
            raise ForeignWord(
                f"handler() has no keyword {name!r}: a message is delayed where it is sent, send(…, delay=…), or in"
                " the handler, raise marq.Retry(delay=…)"
            )
    refuse("handler", unknown)


def _takes(function: Callable[..., object], count: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Written in C: nobody can tell.
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _name(function: object) -> str:
    """Return ``module:qualname``; with <> in it where nothing can be imported under that name."""
    inner = function.func if isinstance(function, functools.partial) else function
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    name = f"{named.__module__}:{named.__qualname__}"
    return name if named is function else f"{name}.<{type(function).__name__}>"


def _is_in_class(function: object) -> bool:
    scope, _, _ = getattr(function, "__qualname__", "").rpartition(".")
    return bool(scope) and not scope.endswith("<locals>")


def _imported(name: str) -> object:
    """Return what a name stands for, None where it stands for nothing."""
    module, _, path = name.partition(":")
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module))


def _methods(module: ModuleType) -> Iterator[HandlerDefinition]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for member in vars(value):
                yield from definitions_of(getattr(value, member, None))


def _class_of(name: str) -> str:
    return name.partition(":")[2].rpartition(".")[0]
