"""Decorated handlers that no worker runs any more: when their definitions expire, and what consumers get then.

The code that workers and trackers run for this stands in for them; a test passes the time to it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

import marq
from marq.backend.cluster import cluster_of
from marq.client.current_producer import HandlersProducer
from marq.consumer.session import HandlersSession
from marq.handlers.lifespan import Resources
from marq.handlers.typed import HandlersByType
from marq.producer.producer import Producer
from marq.settings.client import ClientSettings
from marq.settings.definitions import confirmed_key, layer_key
from marq.settings.removed_handlers import CONFIRM_S, EXPIRY_S, REMOVED_S
from marq_worker.handlers.handler_groups import handler_groups
from marq_worker.handlers.handler_watch import RemovedHandlers
from marq_worker.handlers.handlers_role import HandlersRole
from tests.conformance.backend import Backend
from tests.conformance.receiving import numbered, send, served

Handler = Callable[[marq.Message], Any]
#: Starts a worker with the handler of a queue: publishes it as a worker does at its start.
MakeWorker = Callable[..., Any]


async def ignore(message: marq.Message) -> None:
    """A handler that is never called."""


@pytest.fixture
def make_worker(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> MakeWorker:
    async def make(queue: str, group: str | None = None, handler: Handler = ignore) -> HandlersRole:
        module = ModuleType(f"handlers_{queue.replace('-', '_')}")

        async def handle(message: marq.Message) -> None:
            await handler(message)

        handle.__module__, handle.__qualname__ = module.__name__, "handle"
        module.handle = marq.handler(queue, group=group)(handle)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        worker = HandlersRole((module.__name__,), cast("Any", None), backend.queues, AsyncMock(return_value={}))
        await backend.queues.publish(worker.publication(backend.queues.definitions))
        return worker

    return make


@pytest.fixture
def tracker(backend: Backend) -> RemovedHandlers:
    return RemovedHandlers(backend.queues, lambda: True)


@asynccontextmanager
async def handling(backend: Backend, queue: str, group: str, handler: Handler) -> AsyncIterator[None]:
    """Run a handler in its group, as a worker's process does."""
    settings = ClientSettings.read(backend.address, {"prefix": backend.names.prefix}, owner="test")
    cluster, definitions = cluster_of(settings), backend.queues.definitions
    name = definitions.settings(queue).handler
    assert name is not None
    served = handler_groups(definitions, {queue: name})[group].serving(settings.names.messages, [queue])
    member = cluster.member(settings.names.named_group(group), served, None)
    producer = HandlersProducer(functools.partial(Producer.of, settings))
    topics, handlers = await cluster.topics(), {queue: HandlersByType(queue, {None: handler})}
    session = HandlersSession(cluster, topics, served, member, definitions, handlers, producer, (), Resources())
    await session.connect()
    await member.start(session.receiver)
    session.start()
    yield
    await session.close()
    await member.stop(1.0)


async def test_after_the_expiry_a_consumer_gets_what_the_removed_handler_has_not_finished_and_nothing_else(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers, caplog: pytest.LogCaptureFixture
) -> None:
    queue, group = backend.new_name("handled"), backend.new_name("group")
    # Consumers had it before there was a handler, so their group has an old position.
    async with served(backend.consumer(queue)) as before:
        await send(backend, queue, 0, 5)
        await backend.until(lambda: len(before.seen) >= 5)
    finished, retried = list[bytes](), list[bytes]()

    async def handle(message: marq.Message) -> None:
        if int(message.value) % 2:
            retried.append(message.value)
            raise marq.Retry(delay=1.0)
        finished.append(message.value)

    worker = await make_worker(queue, group, handle)
    await backend.seen_by_all()
    async with handling(backend, queue, group, handle):
        await send(backend, queue, 5, 15)
        await backend.until(lambda: len({*finished, *retried}) >= 10)
    await worker.confirm(CONFIRM_S)
    await send(backend, queue, 15, 25)

    await tracker.look(0.0)
    with pytest.raises(marq.ConfigError, match=r"has the handler 'handlers_handled.*expires after 15 min, or with"):
        await backend.consumer(queue).start()
    with caplog.at_level(logging.WARNING):
        await tracker.look(REMOVED_S)
        await tracker.look(1.0)
    assert tracker.metrics()[queue]["seconds"] == REMOVED_S + 1.0
    warnings = [each.getMessage() for each in caplog.records if queue in each.getMessage()]
    assert len(warnings) == 1
    assert "no worker has run its handler" in warnings[0]
    await tracker.look(EXPIRY_S)

    assert not backend.queues.definitions.defines(queue)
    await backend.seen_by_all()
    async with served(backend.consumer(queue)) as after:
        await backend.until(lambda: len(set(after.seen)) >= 15)
        await backend.advance(0.3)
    left = numbered(queue, 15, 25) + [(queue, value) for value in set(retried)]
    assert Counter(after.seen) == Counter(left)
    assert Counter(finished) == Counter(value for _, value in numbered(queue, 6, 15)[::2])
    await backend.statistics(queue, acked=25)


async def test_a_handler_that_returns_after_its_expiry_goes_on_where_consumers_stopped(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers
) -> None:
    queue, group, handled = backend.new_name("returns"), backend.new_name("group"), list[tuple[str, bytes]]()

    async def handle(message: marq.Message) -> None:
        handled.append((queue, message.value))

    await make_worker(queue, group, handle)
    async with handling(backend, queue, group, handle):
        await send(backend, queue, 0, 10)
        await backend.until(lambda: len(handled) >= 10)
        await backend.advance(0.3)
    await tracker.look(0.0)
    await tracker.look(EXPIRY_S)
    await backend.seen_by_all()
    async with served(backend.consumer(queue)) as consumer:
        await send(backend, queue, 10, 20)
        await backend.until(lambda: len(consumer.seen) >= 10)
        await backend.advance(0.3)

    await make_worker(queue, group, handle)
    async with handling(backend, queue, group, handle):
        await send(backend, queue, 20, 30)
        await backend.until(lambda: len(handled) >= 20)
        await backend.advance(0.3)

    assert Counter(consumer.seen) == Counter(numbered(queue, 10, 20))
    assert Counter(handled) == Counter(numbered(queue, 0, 10) + numbered(queue, 20, 30))


async def test_a_handler_that_old_workers_of_a_rolling_deployment_run_does_not_expire(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers
) -> None:
    removed, kept = backend.new_name("removed"), backend.new_name("kept")
    old, new = await make_worker(removed), await make_worker(kept)
    await tracker.look(0.0)

    for _ in range(100):
        for worker in (old, new):
            await worker.confirm(CONFIRM_S / 30)
        await tracker.look(CONFIRM_S / 30)
        assert not {removed, kept} & tracker.metrics().keys()
    assert backend.queues.definitions.defines(removed)

    for _ in range(100):
        await new.confirm(CONFIRM_S / 30)
        await tracker.look(CONFIRM_S / 30)
    assert not backend.queues.definitions.defines(removed)
    assert backend.queues.definitions.defines(kept)


async def test_only_one_of_many_workers_confirms(backend: Backend, make_worker: MakeWorker) -> None:
    queue = backend.new_name("shared")
    workers = [await make_worker(queue) for _ in range(3)]
    for worker in workers:
        await worker.confirm(0.0)
    numbers = [backend.queues.definitions.confirmed(queue)]

    for worker in workers:
        await worker.confirm(CONFIRM_S)
        numbers.append(backend.queues.definitions.confirmed(queue))

    assert numbers[0] < numbers[1] == numbers[2] == numbers[3]


async def test_a_handler_that_left_its_module_expires_while_the_module_has_another_one(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers
) -> None:
    # given: a worker whose project has no name, so its start removes nothing
    removed, kept = backend.new_name("removed"), backend.new_name("kept")
    worker = await make_worker(kept)
    document = {"handler": f"{worker.documents[kept]['handler'].partition(':')[0]}:former"}
    await backend.queues.publish({confirmed_key(removed): {}, layer_key("handler", removed): document})

    # when: time passes in which the worker confirms its handlers
    for _ in range(4):
        await worker.confirm(CONFIRM_S)
        await tracker.look(CONFIRM_S)

    # then
    assert [backend.queues.definitions.defines(queue) for queue in (removed, kept)] == [False, True]


async def test_a_worker_that_was_cut_off_publishes_its_handlers_again(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers
) -> None:
    queue = backend.new_name("cut-off")
    worker = await make_worker(queue)
    await tracker.look(0.0)
    await tracker.look(EXPIRY_S)
    assert not backend.queues.definitions.defines(queue)

    await worker.confirm(10.0)

    assert backend.queues.definitions.defines(queue)
    await tracker.look(EXPIRY_S)
    assert queue not in tracker.metrics()


async def test_a_definition_that_was_forgotten_does_not_come_back_before_the_next_start(
    backend: Backend, make_worker: MakeWorker
) -> None:
    queue = backend.new_name("forgotten")
    worker = await make_worker(queue)
    await backend.queues.publish({layer_key("handler", queue): None})

    for _ in range(3):
        await worker.confirm(CONFIRM_S)

    assert not backend.queues.definitions.defines(queue)


async def test_a_definition_from_before_confirmations_expires_from_the_first_look_on(
    backend: Backend, tracker: RemovedHandlers
) -> None:
    queue = backend.new_name("old")
    await backend.queues.publish({layer_key("handler", queue): {"handler": "module_of_nobody:handle"}})

    await tracker.look(EXPIRY_S)
    await tracker.look(EXPIRY_S - 1.0)
    assert backend.queues.definitions.defines(queue)
    await tracker.look(1.0)

    assert not backend.queues.definitions.defines(queue)


async def test_settings_of_other_layers_stay_and_only_the_keeper_removes(
    backend: Backend, make_worker: MakeWorker, tracker: RemovedHandlers
) -> None:
    queue = await backend.new_queue("changed", max_attempts=3)
    await make_worker(queue)
    other = RemovedHandlers(backend.queues, lambda: False)
    for each in (other, tracker):
        await each.look(0.0)

    await other.look(EXPIRY_S)
    assert backend.queues.definitions.settings(queue).handler is not None
    assert queue in other.metrics()
    await tracker.look(EXPIRY_S)

    settings = backend.queues.definitions.settings(queue)
    assert (settings.handler, settings.max_attempts) == (None, 3)
