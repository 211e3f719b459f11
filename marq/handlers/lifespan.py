"""Lifespans: resources that stay open while the handlers of a process run, and the state that messages show."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Any, TypeVar

from marq.handlers.decorator import accepts, mark, marked_in
from marq.handlers.parameters import name_of
from marq.leases.message import INTERRUPTIONS
from marq.wire.errors import ConfigError, MarqError, error_text

Lifespan = Callable[[], AsyncIterator[Any]]
Function = TypeVar("Function", bound=Lifespan)

log = logging.getLogger("marq")

_ATTRIBUTE = "__marq_lifespan__"
#: How long a lifespan may take to start before the log says so, and then how often.
SLOW_S = 30.0
#: Files whose frames precede the user's code in the traceback of a lifespan.
_ENTERING = (__file__, contextlib.__file__)


def lifespan(function: Function) -> Function:
    """Decorate an async generator function that opens what handlers need, yields it once, and closes it.

    Handlers get the value that it yields as :attr:`Message.state`. A worker runs the lifespans in the modules of
    MARQ_HANDLERS and in the modules of its handlers, once in each handler process: from before the first message until
    the last handler has ended and its outcome is written. Several lifespans are entered in order and exited in reverse
    order. Their states are merged, so each must yield a mapping or nothing, and no two may yield the same key.

    If a lifespan raises before its ``yield``, the process ends, and the worker starts it again after a pause.

    Raises:
        ConfigError: it is not an async generator function without arguments.
    """
    _check(function)
    mark(function, _ATTRIBUTE)
    return function


def is_lifespan(function: object) -> bool:
    """Whether a function was decorated with :func:`lifespan`."""
    return getattr(function, _ATTRIBUTE, None) is True


def lifespans_in(*modules: ModuleType) -> list[Lifespan]:
    """Return the lifespans in the namespaces of modules, imported ones included, in their order."""
    lifespans = marked_in(modules, _ATTRIBUTE)
    for function in lifespans:
        # Another decorator may have replaced the function.
        _check(function)
    return lifespans


class Resources:
    """The resources of some lifespans; a separate task enters and exits them, as task groups and timeouts require."""

    def __init__(self, lifespans: Sequence[Lifespan] = ()) -> None:
        self._lifespans = lifespans
        #: The name of the lifespan that is being entered.
        self._entering = ""
        self._task: asyncio.Task[None] | None = None
        self._state: asyncio.Future[Any]
        self._end = asyncio.Event()

    async def open(self, failed: Callable[[MarqError], None]) -> Any:
        """Enter the lifespans and return their state; ``failed`` is called if they end before :meth:`close`.

        Raises:
            MarqError: a lifespan raised.
        """
        # close() may be called while the session is still connecting.
        if not self._lifespans or self._end.is_set():
            return None
        self._state = asyncio.get_running_loop().create_future()
        self._task = task = asyncio.create_task(self._run(), name="marq-lifespan")
        waited_s = 0.0
        while not (await asyncio.wait([task, self._state], timeout=SLOW_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            waited_s += SLOW_S
            log.warning(
                "lifespan %s has not reached its yield after %.0f s: no handler runs yet", self._entering, waited_s
            )
        if self._state.done():
            task.add_done_callback(lambda _: self._ended(failed))
            return self._state.result()
        if not task.cancelled():
            self._task = None
            task.result()
        # Cancelled by close().
        return None

    async def close(self) -> None:
        """Exit the lifespans.

        Raises:
            MarqError: a lifespan raised.
        """
        self._end.set()
        task, self._task = self._task, None
        if task is None:
            return
        if not self._state.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise MarqError(f"{self._named} failed on shutdown: {error_text(error, repr)}") from error

    @property
    def _named(self) -> str:
        """The lifespans, for an error that one of them caused."""
        names = ", ".join(map(name_of, self._lifespans))
        return f"lifespan {names}" if len(self._lifespans) == 1 else f"one of the lifespans {names}"

    async def _run(self) -> None:
        states: list[tuple[str, Any]] = []
        async with AsyncExitStack() as opened:
            for function in self._lifespans:
                self._entering = name_of(function)
                try:
                    state = await opened.enter_async_context(asynccontextmanager(function)())
                except INTERRUPTIONS:
                    raise
                except BaseException as error:
                    raise _failed(function, error) from error
                if state is not None:
                    states.append((name_of(function), state))
            self._state.set_result(_merged(states))
            await self._end.wait()

    def _ended(self, failed: Callable[[MarqError], None]) -> None:
        """Report that the lifespans have ended while handlers are running, because one of their task groups failed."""
        task, self._task = self._task, None
        if task is not None:
            text = "it was cancelled" if task.cancelled() else error_text(task.exception(), repr)
            failed(MarqError(f"{self._named} ended while handlers were running: {text}"))


def _check(function: object) -> None:
    if not inspect.isasyncgenfunction(function) or not accepts(function, 0):
        raise ConfigError(
            f"lifespan {name_of(function)}: expected `async def` with one yield and no arguments, decorated only with"
            " @marq.lifespan (@asynccontextmanager is not needed)"
        )


def _failed(function: Lifespan, error: BaseException) -> MarqError:
    """Return the error for a failed start, with the traceback from the user's first line as its note."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _ENTERING:
        trace = trace.tb_next
    failed = MarqError(f"lifespan {name_of(function)} failed on startup: {error_text(error, repr)}")
    failed.add_note("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    return failed


def _merged(states: Sequence[tuple[str, Any]]) -> Any:
    """Return the state of a single lifespan, or the union of several mappings."""
    if len(states) < 2:
        return states[0][1] if states else None
    merged: dict[Any, Any] = {}
    for name, state in states:
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"lifespan {name} yields an object of type {type(state).__name__}: expected a mapping, because there"
                " are several lifespans and message.state is the union of what they yield"
            )
        if repeated := merged.keys() & state.keys():
            raise ConfigError(
                f"lifespan {name} yields the key {', '.join(map(repr, repeated))}, which another lifespan yields, too:"
                " rename one of them"
            )
        merged |= state
    return merged
