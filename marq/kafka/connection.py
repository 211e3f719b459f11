"""Start and stop aiokafka's clients within a bounded time, even if no broker answers.

While the broker is unavailable, three of aiokafka's waits never end: a producer's stop (which flushes first), a
consumer's commit and its stop. After a time limit, aiokafka's tasks are cancelled; the private names for that are in
this file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.kafka.connection_diagnosis import Obstacle, find_obstacle
from marq.kafka.paced_clients import client_of, hasten, paced
from marq.kafka.role_permissions import refused
from marq.kafka.token_logins import tokens_of
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, reason_of

log = logging.getLogger("marq")

#: First and longest pause between two attempts to reach the broker at a start.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0
#: Minimum and maximum time for a diagnosis after a failed attempt.
_LOOK_S, _MAX_LOOK_S = 0.5, 2.0
#: Time that cancelled tasks get to end.
_FORCE_S = 0.5


class _Client(Protocol):
    async def start(self) -> None: ...


C = TypeVar("C", bound=_Client)


def client_options(settings: ClientSettings) -> dict[str, Any]:
    """Return the options that aiokafka's producer, consumer and admin client share."""
    return {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": settings.client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "security_protocol": settings.security_protocol,
        "ssl_context": settings.ssl_context,
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "sasl_plain_password": settings.sasl_password,
        "sasl_oauth_token_provider": tokens_of(settings),
    }


async def started(
    make: Callable[[], C],
    settings: ClientSettings,
    close: Callable[[C], Any],
    *,
    impatient: bool = False,
    writes: str | None = None,
) -> C:
    """Make a client and start it; retry until it works or the connect timeout is over.

    ``impatient``: fail at once if waiting can't help, as with a wrong password. ``writes``: the topic that the client
    writes to, because a broker refuses a producer that has no permission to write to any topic.

    Raises BrokerUnavailable if no broker could be used in time; Forbidden if a permission is missing.
    """
    until = time.monotonic() + settings.connect_timeout_ms / 1000
    pause, cause = _FIRST_PAUSE_S, "no answer"
    while True:
        client = paced(make())
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.05)):
                await client.start()
            return client
        except TimeoutError:
            await close(client)
        except KafkaError as error:
            await close(client)
            cause = reason_of(error)
            if not error.retriable:
                raise refused(settings, error, "Write", writes) or unavailable(settings, cause) from error
        except BaseException:
            await close(client)
            raise
        obstacle = await find_obstacle(settings, min(max(until - time.monotonic(), _LOOK_S), _MAX_LOOK_S))
        if obstacle is not None and obstacle.lasting and impatient:
            raise unavailable(settings, obstacle)
        if time.monotonic() + pause >= until:
            raise unavailable(settings, obstacle or cause)
        await asyncio.sleep(pause)
        pause = min(pause * 2, _MAX_PAUSE_S)


@asynccontextmanager
async def admin_client(settings: ClientSettings, *, impatient: bool = False) -> AsyncIterator[AIOKafkaAdminClient]:
    """Return a context with a started admin client; same errors as :func:`started`."""
    admin = await started(
        lambda: AIOKafkaAdminClient(**client_options(settings)), settings, close_admin, impatient=impatient
    )
    try:
        yield admin
    finally:
        await close_admin(admin)


@asynccontextmanager
async def plain_admin(settings: ClientSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """Return a context with an admin client after one attempt to start it. Raises KafkaError."""
    admin = paced(AIOKafkaAdminClient(**client_options(settings)))
    try:
        await admin.start()
        yield admin
    finally:
        await close_admin(admin)


def unavailable(settings: ClientSettings, cause: Obstacle | str) -> BrokerUnavailable:
    """Return the error for a broker that does not answer or refuses."""
    where = f"no Kafka broker could be used at {settings.bootstrap_servers}"
    if isinstance(cause, Obstacle) and cause.lasting:
        return BrokerUnavailable(f"{where}: {cause}")
    where += f" within {settings.connect_timeout_ms / 1000:g} s"
    if isinstance(cause, Obstacle):
        return BrokerUnavailable(f"{where}: {cause}")
    return BrokerUnavailable(
        f"{where} ({cause}): check that it runs (`marq broker` starts one) and that the address and the"
        " security settings (bootstrap_servers or MARQ_BOOTSTRAP_SERVERS, MARQ_SECURITY_PROTOCOL …) are right"
    )


async def stop_producer(producer: Any, limit_s: float) -> bool:
    """Stop an AIOKafkaProducer after it has sent its batches; return False if the limit came first."""
    _retrieve_outcomes(producer)
    hasten(producer)
    if await _within(limit_s, producer.stop()):
        return True
    _fail_batches(producer._message_accumulator)
    sender = producer._sender.sender_task
    if sender is not None:
        # It would fail the batches a second time, and raise there (aiokafka 0.14, without transactions).
        sender.remove_done_callback(producer._sender._fail_all)
        sender.cancel()
    await _force(producer, [] if sender is None else [sender])
    return False


def _fail_batches(accumulator: Any) -> None:
    # aiokafka removes each failed batch from this set. A batch that waits to be resent is not in it: a KeyError.
    accumulator._pending_batches.update(batch for batches in accumulator._batches.values() for batch in batches)
    accumulator.fail_all(KafkaError("the producer was stopped before the broker confirmed"))


def _retrieve_outcomes(producer: Any) -> None:
    """Retrieve the outcomes of all pending batches, and of the transaction.

    A fenced producer fails these futures, too, although no caller awaits them. asyncio would log a traceback for each.
    """
    accumulator = producer._message_accumulator
    waiting = [batch for batches in accumulator._batches.values() for batch in batches]
    futures = [
        future
        for batch in [*waiting, *accumulator._pending_batches]
        for future in (batch.future, batch._drain_waiter, *[future for future, _ in batch._msg_futures])
    ]
    if producer._txn_manager is not None and producer._txn_manager.wait_for_transaction_end() is not None:
        futures.append(producer._txn_manager.wait_for_transaction_end())
    for future in futures:
        future.add_done_callback(retrieve)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a future that no caller awaits."""
    if not future.cancelled():
        future.exception()


async def abandon_producer(producer: Any) -> None:
    """Close an AIOKafkaProducer without waiting for its batches, whose futures get an error."""
    await stop_producer(producer, 0)


async def stop_consumer(consumer: Any, limit_s: float) -> bool:
    """Stop an AIOKafkaConsumer, leaving its group; return False if the limit came first."""
    hasten(consumer)
    stopped = False
    try:
        stopped = await _within(limit_s, consumer.stop())
    finally:
        # Also if the caller is cancelled: asyncio and aiokafka would log its tasks and connections as errors later.
        if not stopped:
            await _force_consumer(consumer)
    return stopped


async def _force_consumer(consumer: Any) -> None:
    tasks = []
    for owner, names in (
        (consumer._coordinator, ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")),
        (consumer._fetcher, ("_fetch_task",)),
    ):
        tasks += [task for name in names if (task := getattr(owner, name, None)) is not None]
    tasks += getattr(consumer._fetcher, "_pending_tasks", ())
    await _force(consumer, tasks)


async def close_admin(admin: Any) -> None:
    """Close an AIOKafkaAdminClient."""
    await _within(_FORCE_S, admin.close())


async def _within(limit_s: float, stopping: Any) -> bool:
    task = asyncio.ensure_future(stopping)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    except BaseException:
        task.cancel()
        raise
    if not done:
        task.cancel()
        await asyncio.wait([task], timeout=_FORCE_S)
        return False
    # While aiokafka's fetcher waits for a retry, it passes on the cancellation that it meant for its own task.
    if task.cancelled():
        return False
    if (error := task.exception()) is not None:
        log.debug("stopping a client failed: %r", error)
        return False
    return True


async def _force(owner: Any, tasks: Iterable[asyncio.Task[Any]]) -> None:
    owner._closed = True
    await _within(_FORCE_S, client_of(owner).close())
    pending = {task for task in tasks if not task.done()}
    # Twice: aiokafka's sender takes the first cancellation as a request to wait for its own requests.
    for _ in range(2):
        for task in pending:
            task.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_FORCE_S / 2)
