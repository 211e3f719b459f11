"""Imports users' modules; if one can't be imported, explains what is wrong in its code."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, TracebackType

import marq
from marq.wire.errors import ConfigError, MarqError, error_text

#: Files whose frames precede the user's code in the traceback of an import.
_IMPORTING = (__file__, importlib.__file__, "<frozen importlib")
#: Directory of Marq's own code.
_MARQ = f"{Path(marq.__file__).parent}{os.sep}"


def check_exists(name: str) -> None:
    """Check that there is a module of this name, without importing it; raise ConfigError if not."""
    top, _, rest = name.partition(".")
    if top in sys.modules:
        return
    path = sys.path[:]
    _find_working_directory()
    try:
        spec = importlib.util.find_spec(top)
    finally:
        # Faust is imported later, and would import a statistics.py of the user instead of the standard library's.
        sys.path[:] = path
    # The module may exist although its parent is not a package, like os.path.
    if spec is None or (rest == "py" and spec.submodule_search_locations is None):
        raise ConfigError(f"MARQ_HANDLERS: module {name!r} can't be imported: there is no such module; {_hint(name)}")


def import_module(name: str) -> ModuleType:
    """Import a module from the working directory or the path."""
    _find_working_directory()
    return importlib.import_module(name)


def _find_working_directory() -> None:
    # The `faust` script has its own directory in the path, and Faust adds ours only while it looks for the app.
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)


def load_module(name: str) -> ModuleType:
    """Import a module that MARQ_HANDLERS names; raise ConfigError if it can't be imported."""
    return _load(f"MARQ_HANDLERS: module {name!r}", name)


def load_function(queue: str, path: str) -> object:
    """Import the handler of a queue, ``module:function``; raise ConfigError if it can't be imported."""
    what = f"queue {queue!r}: its handler {path!r}"
    name, _, attributes = path.partition(":")
    module = _load(what, name)
    try:
        return functools.reduce(getattr, attributes.split("."), module)
    except Exception as error:  # a module may have a __getattr__ of its own
        hint = _closest(attributes, vars(module)) or "expected MODULE:FUNCTION"
        raise ConfigError(f"{what} can't be imported: {error_text(error)}; {hint}") from error


def _load(what: str, name: str) -> ModuleType:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        raise _not_imported(f"{what} can't be imported", name, error) from error


def _not_imported(what: str, module: str, error: BaseException) -> ConfigError:
    """Return the error for a failed import; its note is the traceback from the user's first line, if that helps."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return ConfigError(f"{what}: there is no such module; {_hint(module)}")
    trace = _users(error.__traceback__)
    if isinstance(error, MarqError | TypeError) and (refused := _refused_line(trace)) is not None:
        # The traceback would show Marq's code, which only checked the user's.
        return ConfigError(f"{what}: {refused}: {error}")
    if isinstance(error, SystemExit):
        said = f"it ends the process ({error_text(error, repr)})"
        said += '; move what a program does below if __name__ == "__main__":'
    else:
        said = f"{type(error).__name__}: {error_text(error)}"
    failed = ConfigError(f"{what}: {said}")
    failed.add_note("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    return failed


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code on."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_IMPORTING):
        trace = trace.tb_next
    return trace


def _refused_line(trace: TracebackType | None) -> str | None:
    """Return the user's line from which marq was called if marq raised the error."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(_MARQ):
        return None
    called = [frame for frame in frames if not frame.filename.startswith(_MARQ)]
    return f"{Path(called[-1].filename).name}, line {called[-1].lineno}" if called else None


def _hint(module: str) -> str:
    if module.endswith(".py"):
        return f"write {module.removesuffix('.py')!r}, without .py"
    directory = Path.cwd()
    names = [info.name for info in pkgutil.iter_modules([str(directory)])]
    return _closest(module, names) or f"expected a module that is importable from {directory}"


def _closest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
