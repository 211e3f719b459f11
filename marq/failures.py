"""What an exception that left a handler means for its message, where the queue's settings say more than a backoff."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from marq.core.backoff import Backoff

#: An exception that no other attempt could mend.
REJECTED = "rejected"


class Failures:
    """The ``errors`` of a queue: by the class that is nearest in an exception's line of ancestors.

    A class goes by the name of the module that defines it, as tracebacks show it, or by any name under which a module
    that is loaded has it: ``httpx.TimeoutException``. Nothing is imported.
    """

    def __init__(self, errors: Mapping[str, Backoff | None]) -> None:
        self.errors = errors
        self._known: dict[type[BaseException], Backoff | str | None] = {}

    def said_of(self, error: BaseException) -> Backoff | str | None:
        """Return the backoff after an exception, REJECTED, or None where nothing is said of it."""
        kind = type(error)
        if kind not in self._known:
            self._known[kind] = self._find(kind)
        return self._known[kind]

    def _find(self, kind: type[BaseException]) -> Backoff | str | None:
        loaded = {found: name for name in self.errors if (found := _loaded(name)) is not None}
        for each in kind.__mro__:
            for name in (*_names(each), loaded.get(each, "")):
                if name in self.errors:
                    return self.errors[name] or REJECTED
        return None


def _names(kind: type) -> Iterator[str]:
    yield f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "builtins":
        yield kind.__qualname__


def _loaded(name: str) -> object:
    """Return what a dotted name stands for in the modules that are loaded; None for nothing."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for part in parts[cut:]:
                found = getattr(found, part, None)
            return found if isinstance(found, type) else None
    return None
