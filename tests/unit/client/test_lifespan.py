"""Resources around the handlers of a process: how lifespans are found, entered, merged and exited, and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from marq.handlers import lifespan as lifespan_module
from marq.handlers.lifespan import Resources, lifespan, lifespans_in
from marq.wire.errors import ConfigError, MarqError

LIMIT_S = 30


def failed(error: MarqError) -> None:
    raise AssertionError(error)


def yielding(state: object, journal: list[str] | None = None, name: str = "") -> Callable[[], AsyncIterator[Any]]:
    steps = [] if journal is None else journal

    async def resource() -> AsyncIterator[object]:
        steps.append(f"open {name}")
        try:
            yield state
        finally:
            steps.append(f"close {name}")

    return resource


async def state_of(*lifespans: Callable[[], AsyncIterator[Any]]) -> Any:
    resources = Resources(lifespans)
    try:
        return await resources.open(failed)
    finally:
        await resources.close()


async def test_the_state_is_what_a_lifespan_yields_or_the_union_of_what_several_yield() -> None:
    anything = object()

    assert await state_of() is None
    assert await state_of(yielding(anything)) is anything
    assert await state_of(yielding(None), yielding(anything)) is anything
    assert await state_of(yielding(None)) is None
    assert await state_of(yielding({"a": 1}), yielding(None), yielding({"b": 2})) == {"a": 1, "b": 2}


async def test_several_lifespans_are_exited_in_reverse() -> None:
    journal: list[str] = []

    await state_of(yielding(None, journal, "a"), yielding(None, journal, "b"))

    assert journal == ["open a", "open b", "close b", "close a"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"a": 2}, r"yields the key 'a', which another lifespan yields, too"),
        (5, r"yields an object of type int: expected a mapping, because there are several lifespans"),
    ],
)
async def test_states_that_can_not_be_merged_are_refused_and_all_is_closed(second: object, said: str) -> None:
    journal: list[str] = []

    with pytest.raises(ConfigError, match=said):
        await state_of(yielding({"a": 1}, journal, "a"), yielding(second, journal, "b"))

    assert journal == ["open a", "open b", "close b", "close a"]


async def test_an_error_at_the_start_names_the_lifespan_shows_its_line_and_closes_what_is_open() -> None:
    journal: list[str] = []

    async def connect() -> AsyncIterator[None]:
        raise ConnectionError("no answer")
        yield

    resources = Resources([yielding(None, journal, "a"), connect])
    with pytest.raises(MarqError, match=r"connect failed on startup: ConnectionError\('no answer'\)") as caught:
        await resources.open(failed)
    await resources.close()

    assert journal == ["open a", "close a"]
    [note] = caught.value.__notes__
    assert 'raise ConnectionError("no answer")' in note
    assert "contextlib" not in note
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_an_error_at_the_end_is_told_after_all_others_were_closed() -> None:
    journal: list[str] = []

    async def disconnecting() -> AsyncIterator[None]:
        yield
        raise ConnectionError("no answer")

    with pytest.raises(MarqError, match=r"disconnecting failed on shutdown: ConnectionError\('no answer'\)"):
        await state_of(yielding(None, journal, "a"), disconnecting)

    assert journal == ["open a", "close a"]


async def test_a_close_while_a_lifespan_still_starts_ends_that() -> None:
    begun, journal = asyncio.Event(), list[str]()

    async def slow() -> AsyncIterator[None]:
        begun.set()
        await asyncio.Event().wait()
        yield

    resources = Resources([yielding({"a": 1}, journal, "a"), slow])
    opening = asyncio.create_task(resources.open(failed))
    async with asyncio.timeout(LIMIT_S):
        await begun.wait()
        await resources.close()
        assert await opening is None

    assert journal == ["open a", "close a"]


async def test_after_a_close_nothing_is_opened_any_more() -> None:
    journal: list[str] = []
    resources = Resources([yielding({"a": 1}, journal, "a")])

    await resources.close()

    assert await resources.open(failed) is None
    assert journal == []


async def test_a_lifespan_that_does_not_start_is_named_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, logged = asyncio.Event(), list[str]()

    def warn(text: str, *arguments: object) -> None:
        logged.append(text % arguments)
        go_on.set()

    monkeypatch.setattr(lifespan_module, "SLOW_S", 0.001)
    monkeypatch.setattr(lifespan_module.log, "warning", warn)

    async def waiting() -> AsyncIterator[None]:
        await go_on.wait()
        yield

    resources = Resources([waiting])
    async with asyncio.timeout(LIMIT_S):
        await resources.open(failed)
    await resources.close()

    assert "waiting has not reached its yield" in logged[0]


async def test_a_lifespan_that_panics_fails_with_its_name() -> None:
    class PanicException(BaseException):
        """What extensions written in Rust raise."""

    async def panics() -> AsyncIterator[None]:
        raise PanicException("index")
        yield

    with pytest.raises(MarqError, match=r"panics failed on startup: PanicException\('index'\)"):
        await Resources([panics]).open(failed)


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise AttributeError("response")


@pytest.mark.parametrize(("raised", "text"), [(ConnectionError("lost"), "lost"), (Unprintable(), "<unprintable>")])
async def test_a_lifespan_whose_background_task_fails_is_told_and_the_others_are_closed(
    raised: Exception, text: str
) -> None:
    journal, errors = list[str](), asyncio.Queue[MarqError]()
    fail = asyncio.Event()

    async def watching() -> AsyncIterator[None]:
        async def watch() -> None:
            await fail.wait()
            raise raised

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            yield

    resources = Resources([yielding(None, journal, "a"), watching])
    await resources.open(errors.put_nowait)
    fail.set()
    async with asyncio.timeout(LIMIT_S):
        error = await errors.get()
    await resources.close()

    assert str(error).startswith("one of the lifespans ")
    assert "watching ended while handlers were running" in str(error)
    assert text in str(error)
    assert journal == ["open a", "close a"]


def test_lifespans_are_found_in_the_order_of_their_modules_and_once() -> None:
    one, two = lifespan(yielding(1)), lifespan(yielding(2))
    first, second = ModuleType("first"), ModuleType("second")
    first.two, first.other, second.one, second.again = two, yielding(3), one, two  # type: ignore[attr-defined]

    assert lifespans_in(first, second) == [two, one]


@pytest.mark.parametrize("wrong", [asynccontextmanager(yielding(1)), lambda: None, 5, print])
def test_only_async_generator_functions_are_lifespans(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected `async def` with one yield and no arguments"):
        lifespan(wrong)


def test_arguments_are_refused_and_so_is_another_decorator_above() -> None:
    async def resource(app: object) -> AsyncIterator[None]:
        yield

    with pytest.raises(ConfigError, match=r"resource: expected `async def` with one yield and no arguments"):
        lifespan(resource)  # type: ignore[type-var]

    module = ModuleType("first")
    module.resource = asynccontextmanager(lifespan(yielding(1)))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"@asynccontextmanager is not needed"):
        lifespans_in(module)
