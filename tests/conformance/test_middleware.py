"""Middleware: what it sees and decides of the calls of a handler."""

from __future__ import annotations

import asyncio
import threading

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import running


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
async def test_the_first_middleware_is_outermost_and_all_run_in_the_event_loop(backend: Backend, plain: bool) -> None:
    queue, steps = backend.new_name(), []

    def step(name: str) -> None:
        steps.append((name, threading.current_thread() is threading.main_thread()))

    async def outer(message: marq.Message, call_next: marq.CallNext) -> None:
        step("outer begins")
        step(f"outer got {await call_next(message)}")

    async def inner(message: marq.Message, call_next: marq.CallNext) -> object:
        step("inner begins")
        result = await call_next(message)
        step("inner ends")
        return result

    def handle(message: marq.Message) -> str:
        step("handler")
        return "a result"

    async def handle_in_the_loop(message: marq.Message) -> str:
        return handle(message)

    consumer = backend.consumer(queue)
    handler = handle if plain else handle_in_the_loop
    async with running(consumer, lambda: consumer.run(handler, middleware=[outer, inner])):
        await backend.producer.send(queue, b"x")
        await backend.statistics(queue, acked=1)

    names = ["outer begins", "inner begins", "handler", "inner ends", "outer got a result"]
    assert steps == [(name, name != "handler" or not plain) for name in names]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
async def test_middleware_sees_the_exceptions_of_the_handler_and_they_decide_as_without_it(
    backend: Backend, plain: bool
) -> None:
    queue, seen = backend.new_name(), []

    async def seeing(message: marq.Message, call_next: marq.CallNext) -> None:
        try:
            await call_next(message)
        except Exception as error:
            seen.append((message.attempt, type(error)))
            raise

    def handle(message: marq.Message) -> None:
        if message.attempt > 1:
            return
        match message.value:
            case "retry":
                raise marq.Retry(delay=0)
            case "fail":
                raise LookupError("once")
            case "reject":
                raise marq.Reject("no good")

    async def handle_in_the_loop(message: marq.Message) -> None:
        handle(message)

    consumer = backend.consumer(queue, codec=marq.JSON)
    handler = handle if plain else handle_in_the_loop
    async with running(consumer, lambda: consumer.run(handler, middleware=[seeing])):
        await backend.producer.send_many(queue, [b'"retry"', b'"fail"', b'"reject"', b"{", b'"ack"'])
        await backend.statistics(queue, acked=3, dead_lettered=2, released=2)

    expected = [marq.DecodeError, LookupError, marq.Reject, marq.Retry]
    assert sorted(seen, key=str) == sorted([(1, kind) for kind in expected], key=str)


async def test_middleware_skips_replaces_and_raises(backend: Backend) -> None:
    queue, handled = backend.new_name(), []

    async def deciding(message: marq.Message, call_next: marq.CallNext) -> None:
        match message.value, message.attempt:
            case b"skip", _:
                return
            case b"retry", 1:
                raise marq.Retry(delay=0)
            case b"reject", _:
                raise marq.Reject("by a middleware")
            case b"forgive", _:
                try:
                    await call_next(message)
                except LookupError:
                    return
            case b"fail after", 1:
                await call_next(message)
                raise OSError("after the handler")
        await call_next(message)

    async def handle(message: marq.Message) -> None:
        handled.append((message.value, message.attempt))
        if message.value == b"forgive":
            raise LookupError("always")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle, middleware=[deciding])):
        await backend.producer.send_many(queue, [b"skip", b"retry", b"reject", b"forgive", b"fail after"])
        await backend.statistics(queue, acked=4, dead_lettered=1, released=2)

    assert sorted(handled) == [(b"fail after", 1), (b"fail after", 2), (b"forgive", 1), (b"retry", 2)]
    [letter] = await backend.dead_letters(queue)
    assert letter.reason == "by a middleware"


async def test_a_second_call_of_the_handler_is_an_error_of_the_middleware(backend: Backend) -> None:
    queue, handled = backend.new_name(), []

    async def insisting(message: marq.Message, call_next: marq.CallNext) -> None:
        await call_next(message)
        if message.attempt == 1:
            await call_next(message)

    async def handle(message: marq.Message) -> None:
        handled.append((message.attempt, message.last_error))

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle, middleware=[insisting])):
        await backend.producer.send(queue, b"x")
        await backend.statistics(queue, acked=1, released=1)

    [(first, _), (second, error)] = handled
    assert (first, second) == (1, 2)
    assert "insisting: call_next() was called twice for one message" in (error or "")


async def test_a_middleware_is_cancelled_with_its_handler_when_the_lease_ends(backend: Backend) -> None:
    queue, cancelled = backend.new_name(), asyncio.Event()

    async def seeing(message: marq.Message, call_next: marq.CallNext) -> None:
        try:
            await call_next(message)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def handle(message: marq.Message) -> None:
        if message.attempt == 1:
            await asyncio.Event().wait()

    consumer = backend.consumer(queue, lease=6, max_lease=6)
    async with running(consumer, lambda: consumer.run(handle, middleware=[seeing])):
        await backend.producer.send(queue, b"x")
        await backend.until(cancelled.is_set)
        await backend.statistics(queue, acked=1, expired=1)
