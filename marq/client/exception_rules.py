"""Maps exceptions of handlers to backoffs or rejections, by a queue's ``errors``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from marq.settings.backoff import Backoff

#: The result for an exception that no retry can fix.
REJECTED = "rejected"


def policy_for(error: BaseException, errors: Mapping[str, Backoff | None]) -> Backoff | str | None:
    """Return the backoff after an exception, REJECTED, or None if the queue's ``errors`` do not mention it.

    The nearest class in its MRO decides. A class is named by its defining module, as in tracebacks, or by any loaded
    module that has it, such as ``httpx.TimeoutException``. Nothing is imported.
    """
    # Not cached: a name may denote a class only later, when its module is loaded.
    loaded = {named: name for name in errors if (named := _loaded(name)) is not None}
    for ancestor in type(error).__mro__:
        for name in (*_names(ancestor), loaded.get(ancestor, "")):
            if name in errors:
                return errors[name] or REJECTED
    return None


def _names(kind: type) -> Iterator[str]:
    yield f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "builtins":
        yield kind.__qualname__


def _loaded(name: str) -> object:
    """Return the class that a dotted name denotes in the loaded modules, or None."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        value: object = sys.modules.get(".".join(parts[:cut]))
        if value is not None:
            for part in parts[cut:]:
                value = getattr(value, part, None)
            return value if isinstance(value, type) else None
    return None
