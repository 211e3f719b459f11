"""Middleware: how it is found and checked. What it does is in tests/conformance."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

import marq
import marq.testing
from marq.handlers.middleware import middleware, middleware_in, surround
from marq.wire.errors import ConfigError, MarqError


async def passing(message: marq.Message, call_next: marq.CallNext) -> Any:
    return await call_next(message)


class Timer:
    async def __call__(self, message: marq.Message, call_next: marq.CallNext) -> Any:
        return await call_next(message)


async def handle(message: marq.Message) -> None: ...


def test_a_handler_without_middleware_is_called_as_it_is() -> None:
    assert surround(handle, []) is handle


def test_middleware_is_found_in_the_order_of_its_modules_and_once() -> None:
    timer, function = middleware(Timer()), middleware(passing)
    first, second = ModuleType("first"), ModuleType("second")
    first.timer, first.handle, first.mock = timer, handle, Mock()  # type: ignore[attr-defined]
    second.function, second.again = function, timer  # type: ignore[attr-defined]

    assert middleware_in(first, second) == [timer, passing]


@pytest.mark.parametrize(
    "wrong", [Timer, handle, lambda message, call_next: None, 5], ids=["class", "one argument", "plain", "number"]
)
def test_other_objects_than_coroutine_functions_of_two_arguments_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected `async def` with the arguments message, call_next"):
        middleware(wrong)


def test_a_method_is_refused_with_what_to_do() -> None:
    class Timing:
        async def timed(self, message: marq.Message, call_next: marq.CallNext) -> None: ...

    with pytest.raises(ConfigError, match=r"timed.* can't be decorated; write a function that calls it"):
        middleware(Timing().timed)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_middleware_that_forgets_to_await_the_handler_fails_so_that_the_message_is_not_lost() -> None:
    async def forgetful(message: marq.Message, call_next: marq.CallNext) -> None:
        call_next(message)

    with pytest.raises(MarqError, match=r"forgetful: call_next\(\) was not awaited.*write await call_next\(message\)"):
        await surround(handle, [forgetful])(Mock())


async def test_a_service_is_told_of_wrong_middleware_when_it_runs_a_handler() -> None:
    async with marq.testing.Broker() as broker, broker.consumer("q") as consumer:
        with pytest.raises(ConfigError, match=r"middleware .*handle: expected `async def`"):
            await consumer.run(handle, middleware=[handle])  # type: ignore[list-item]
