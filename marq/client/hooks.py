"""Named points at which a module such as :mod:`marq.tracing` wraps a method or function of the clients.

:func:`point` marks it. An unwrapped point costs nothing, because the function is unchanged. Call a function that is a
point through its module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

#: The class or module and the attribute of each point.
_points: dict[str, tuple[Any, str]] = {}


class _Declaration:
    """A placeholder for a method in the body of a class, until the class exists."""

    def __init__(self, name: str, method: object) -> None:
        self._name = name
        self._method = method

    def __set_name__(self, owner: type, attribute: str) -> None:
        setattr(owner, attribute, self._method)
        _points[self._name] = owner, attribute


def point(name: str) -> Callable[[F], F]:
    """Declare a method, or a function of a module, as the point of that name."""

    def declare(method: F) -> F:
        if "." not in method.__qualname__:
            _points[name] = sys.modules[method.__module__], method.__name__
            return method
        return cast("F", _Declaration(name, method))

    return declare


def wrap(name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the method of a point with ``around(method)``; return a function that undoes this.

    Several wrappers may share a point; undo them in reverse order.
    """
    owner, attribute = _points[name]
    method = getattr(owner, attribute)
    setattr(owner, attribute, functools.wraps(method)(around(method)))
    return lambda: setattr(owner, attribute, method)
