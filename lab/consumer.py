"""A consumer that writes its history: ``python -m lab.consumer NAME HISTORY QUEUE,... [--die-at POINT]``.

The number in a message's value decides its outcome (``--manner``): most are acknowledged, some released, some rejected,
some fail, some are forgotten. The consumer can kill itself with -9 at each step, the n-th time (``--die-after``).
`handle` is a handler for workers that writes its history into that of its worker: ``handler = "lab.consumer:handle"``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import marq
from lab.cpu_waits import recorded_stalls
from lab.proof import history
from lab.recorder import Recorder, around, install, options_parser
from marq.client import message_token
from marq.consumer.receiver import Receiver
from marq.kafka.group_reader import GroupReader
from marq.kafka.marker_writer import KafkaMarkerWriter, MarkerRecord
from marq.kafka.transactions import MarkerTransactions
from marq.wire.marker_codec import decode
from marq.wire.markers import LAST, Acquire, Batch, Dispatch, MixedAcquire, Release, Renew, Source, kind_of, split

#: Messages of a queue that a consumer handles at once, and how long it waits for the first.
MAX_RUNNING = 100
RECEIVE_SECONDS = 1.0
KINDS = 20
#: Lease of the queues, unless an option sets it.
LEASE_SECONDS = 3.0
#: How long a handler takes, and how much longer some handlers take: less than a lease.
WORK_SECONDS, SLOW_SECONDS = 0.02, 2.0
#: In the environment: the file with the history of the worker that runs `handle`.
HISTORY_VARIABLE = "FAULTS_HISTORY"
#: Outcomes of first attempts, by the message's number modulo KINDS; all others are acknowledged.
MANNERS: dict[str, dict[int, Any]] = {
    "mixed": {1: "later", 2: "release", 3: "reject"},
    #: Also exceptions: with the queue's backoff, with their own delay, and one that rejects.
    "failing": {1: "later", 2: "release", 3: "reject", 4: RuntimeError, 5: TimeoutError, 6: ValueError},
    "rejecting": {3: "reject", 6: ValueError},
    #: A quarter fails at every attempt, and another one at every second offset.
    "hopeless": {**dict.fromkeys(range(5), "hopeless"), **dict.fromkeys(range(5, 10), "moody")},
    #: Some handlers are still running when their partitions have moved.
    "slow": {1: "later", 2: "release", 3: "reject", 4: "slow", 5: "slow"},
    #: Few fail at every attempt.
    "unlucky": {1: "later", 2: "release", 3: "reject", 4: "hopeless"},
    "patient": {},
    #: The demo's: see :func:`demo_outcome`.
    "demo": {},
}
#: Of each queue's messages in the demo: which are forgotten at the first delivery, fail at the first two, or always.
FORGET_EVERY = 10
FAIL_EVERY, FAIL_AT, FAIL_ATTEMPTS = 50, 7, 2
HOPELESS_EVERY, HOPELESS_AT = 1_000, 13


def demo_outcome(place: int, attempt: int) -> Any:
    """Return the outcome of a message in the demo by its place in its queue; None to acknowledge it."""
    if place % HOPELESS_EVERY == HOPELESS_AT or (attempt <= FAIL_ATTEMPTS and place % FAIL_EVERY == FAIL_AT):
        return RuntimeError
    return "forget" if attempt == 1 and place % FORGET_EVERY == 0 else None


def points_of(batch: Batch) -> Iterator[str]:
    """Yield the names of the steps of writing a batch: a consumer can die ``before-`` and ``after-`` each."""
    yield "acquire" if isinstance(batch, MixedAcquire) else kind_of(batch).name.lower()
    if isinstance(batch, Acquire) and batch.in_order:
        yield "acquire-again" if any(payload.attempt > 1 for payload in batch.payloads) else "acquire-in-order"
    if isinstance(batch, Release) and LAST in batch.delays_ms:
        yield "last-release"


class WatchedConsumer:
    """Records the markers that the library writes, and kills the process between the steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: The last ACQUIREs of each queue: its commits never overlap, so the next one covers them.
        self._acquired: dict[str, list[dict[str, Any]]] = {}

    def install(self) -> None:
        """Wrap the library's functions in this process."""
        around(KafkaMarkerWriter, "write", self._write)
        around(GroupReader, "commit", self._commit)
        around(GroupReader, "verify", self._verify)
        around(Receiver, "revoked", self._revoked)
        around(MarkerTransactions, "write", self._write)
        around(MarkerTransactions, "_transact", self._transact)

    def _at(self, when: str, records: Sequence[MarkerRecord]) -> None:
        self._recorder.at(*{f"{when}-{point}" for _, value in records for point in points_of(decode(value))})

    async def _write(self, write: Any, writer: Any, records: Sequence[MarkerRecord], *arguments: Any) -> None:
        batches = [batch for _, value in records for batch in split(decode(value))]
        transactional = isinstance(writer, MarkerTransactions)
        acquires = [batch for batch in batches if isinstance(batch, Acquire)]
        if not transactional:
            self._acquired |= {batch.queue: [] for batch in acquires}
            for batch in acquires:
                self._acquired[batch.queue].append(_names(batch))
        # The handler records outcomes.
        told = [batch for batch in batches if isinstance(batch, Acquire | Renew | Dispatch)]
        self._at("before", records)
        with self._told([(kind_of(batch).name.lower(), _names(batch)) for batch in told]):
            await write(writer, records, *arguments)
        if transactional:
            self._recorder.at("after-commit")
        else:
            self._at("after", records)

    async def _commit(self, commit: Any, reader: GroupReader, *arguments: Any) -> None:
        acquired = [names for queue in reader._serving.queues for names in self._acquired.pop(queue, ())]
        with self._told([("commit", names) for names in acquired]):
            await commit(reader, *arguments)
        if acquired:
            self._recorder.at("after-commit")

    async def _verify(self, verify: Any, reader: GroupReader, sources: Any) -> None:
        self._recorder.at("before-verify")
        await verify(reader, sources)
        self._recorder.at("after-verify")

    async def _revoked(self, revoked: Any, receiver: Receiver) -> None:
        self._recorder.add("info", "revoke", target=self._recorder.process)
        await revoked(receiver)

    async def _transact(self, transact: Any, writer: Any, producer: Any, records: Any, group_commit: Any) -> None:
        commit_transaction = producer.commit_transaction

        async def commit_unless_dead() -> None:
            self._at("after", records)
            await commit_transaction()

        producer.commit_transaction = commit_unless_dead
        try:
            await transact(writer, producer, records, group_commit)
        finally:
            producer.commit_transaction = commit_transaction

    @contextmanager
    def _told(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[None]:
        began, outcome = time.monotonic(), "unknown"
        for op, names in operations:
            self._recorder.add("invoke", op, **names)
        try:
            yield
            outcome = "ok"
        finally:
            took_ms = int((time.monotonic() - began) * 1000)
            for op, names in operations:
                self._recorder.add(outcome, op, **names, took_ms=took_ms)


def _named(holder: int, queue: str, source: Source, offsets: Sequence[int]) -> dict[str, Any]:
    names = {"holder": history.holder_name(holder), "queue": queue}
    return {**names, "source": history.log_name(source), "offsets": list(offsets)}


def _names(batch: Acquire | Renew | Dispatch) -> dict[str, Any]:
    return _named(batch.holder, batch.queue, batch.source, batch.offsets)


class Teller:
    """Records deliveries and outcomes of one process; ``add`` takes type, op and fields of each event."""

    def __init__(self, add: Callable[..., None]) -> None:
        self._add = add

    def deliver(self, message: marq.Message) -> None:
        holder = history.holder_name(message_token.decode(message.token).holder)
        content = history.content(message.queue, message.key, message.body, tuple(message.headers.items()))
        self._add(
            "ok", "deliver", group="g", queue=message.queue, attempt=message.attempt, record=record_of(message),
            holder=holder, content=content,
        )  # fmt: skip

    async def settle(self, op: str, message: marq.Message, settle: Callable[[], Awaitable[None]]) -> bool:
        """Record an ``ack``, ``release`` or ``reject`` and its outcome; return whether it is durable and in time."""
        token = message_token.decode(message.token)
        names = _named(token.holder, message.queue, token.source, [token.offset])
        self._add("invoke", op, **names)
        began_s = time.monotonic()

        def ended(type_: str, **details: object) -> None:
            # A slow machine may explain that a lease has ended.
            self._add(type_, op, **names, took_ms=round((time.monotonic() - began_s) * 1000), **details)

        try:
            await settle()
        except marq.LeaseLost:
            # An ack was written anyway; another outcome may have been.
            if op == "ack":
                ended("ok", lost=[message.offset])
            else:
                ended("unknown")
        except marq.MarqError as error:
            ended("unknown", error=str(error))
        else:
            ended("ok")
            return True
        return False

    def forget(self, message: marq.Message) -> None:
        """Record that the message will not be settled before its lease ends."""
        self._add("info", "hang", queue=message.queue, record=record_of(message))


async def fail(message: marq.Message, error: Exception, op: str = "release") -> None:
    """Act like a handler that raises, and wait until the outcome ``op`` (release or reject) is durable."""
    with suppress(type(error)):
        async with message:
            raise error
    # The block has queued the outcome.
    await (message.reject() if op == "reject" else message.release())


def record_of(message: marq.Message) -> str:
    """Return the name of the record in a history."""
    named = message_token.decode(message.token)
    return history.name_of(named.source, named.offset)


class NumberedHandler:
    """Handles each message as its number says, and records it; ``queues`` is the number of queues in the demo."""

    def __init__(self, recorder: Recorder, work_seconds: float, manner: str, queues: int = 1) -> None:
        self._recorder = recorder
        self._teller = Teller(recorder.add)
        self._work_seconds = work_seconds
        self._manner = manner
        self._queues = queues

    async def handle(self, message: marq.Message) -> None:
        kind = self._kind_of(message)
        if kind == "forget":
            self._teller.forget(message)
            return
        # Recorded before the outcome: a process that dies between the two has done the work.
        self._teller.deliver(message)
        self._recorder.at("in-handler")
        if self._work_seconds:
            await asyncio.sleep(self._work_seconds)
        if kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if kind in (None, "slow"):
            op, settle = "ack", message.ack
        elif kind == "later":
            op, settle = "release", partial(message.release, delay=0.5)
        elif kind == "release":
            op, settle = "release", message.release
        elif kind == "reject":
            op, settle = "reject", partial(message.reject, "by its number")
        else:
            op = "reject" if kind is ValueError or message._batch.at_most_once else "release"
            # Differs between attempts, as errors do: dead letters are grouped all the same.
            text = f"fails at attempt {message.attempt}" if self._manner == "demo" else "by its number"
            settle = partial(fail, message, kind(text), op)
        await self._teller.settle(op, message, settle)

    def _kind_of(self, message: marq.Message) -> Any:
        """Return the outcome of a message; None to acknowledge it."""
        number = int((message.body or b"0")[:8])
        if self._manner == "demo":
            return demo_outcome(number // self._queues, message.attempt)
        kind = MANNERS[self._manner].get(number % KINDS)
        if kind == "hopeless" or (kind == "moody" and message.offset % 2):
            return RuntimeError
        return kind if kind != "moody" and message.attempt == 1 else None


@cache
def _worker_recorder() -> Recorder:
    return Recorder("handlers", Path(os.environ[HISTORY_VARIABLE]))


async def handle(message: marq.Message) -> None:
    """Acknowledge a message, in a worker's handler process."""
    recorder, lease = _worker_recorder(), message._batch
    # Its ACQUIRE is durable by now, or the message would not be here.
    for type_ in ("invoke", "ok"):
        recorder.add(type_, "acquire", **_named(lease.holder, lease.queue, lease.source, [message.offset]))
    await NumberedHandler(recorder, WORK_SECONDS, "patient").handle(message)


async def consume(
    consumers: Sequence[marq.Consumer], lease_s: float, handler: NumberedHandler, recorder: Recorder, at_once: int
) -> None:
    """Handle the messages of each consumer until SIGTERM; ``lease_s`` is the shortest lease of its messages."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(recorded_stalls(recorder.process, recorder.add, lease_s))
        await asyncio.gather(*map(opened.enter_async_context, consumers))
        recorder.add("info", "ready")
        await asyncio.gather(*[handle_all(consumer, handler, stopping, at_once) for consumer in consumers])
        recorder.add("info", "stop", target=recorder.process)


async def handle_all(consumer: marq.Consumer, handler: NumberedHandler, stopping: asyncio.Event, at_once: int) -> None:
    """Handle messages concurrently: none waits for the acks of others, except those of its ordering key."""
    running: set[asyncio.Task[None]] = set()
    while not stopping.is_set():
        try:
            messages = await consumer.receive(at_once - len(running), wait=RECEIVE_SECONDS)
        except marq.BrokerUnavailable:
            continue
        running |= {asyncio.create_task(handler.handle(message)) for message in messages}
        if running:
            timeout_s = 0.0 if len(running) < at_once else None
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for handled in done:
                handled.result()
    await asyncio.gather(*running)


def main() -> None:
    parser = options_parser("python -m lab.consumer", __doc__)
    parser.add_argument("queues", metavar="QUEUE,...")
    parser.add_argument("--work", type=float, default=WORK_SECONDS, metavar="SECONDS")
    parser.add_argument("--group", help="read these queues by one consumer of this group, not by one for each")
    parser.add_argument("--at-once", type=int, default=MAX_RUNNING, help="messages of a consumer in handlers at a time")
    parser.add_argument("--lease", type=float, metavar="SECONDS")
    parser.add_argument("--max-lease", type=float, metavar="SECONDS")
    parser.add_argument("--instance-id", help="as in marq.Consumer")
    parser.add_argument("--transactional", action="store_true", help="as in marq.Consumer")
    parser.add_argument("--manner", choices=MANNERS, default="mixed", help="outcomes of messages")
    options = parser.parse_args()
    recorder = Recorder(options.name, options.history, options.die_at, options.die_after)
    queues = options.queues.split(",")
    WatchedConsumer(recorder).install()
    install(options.install)
    handler = NumberedHandler(recorder, options.work, options.manner, len(queues))
    settings = {name: getattr(options, name) for name in ("lease", "max_lease", "instance_id", "transactional")}
    names = [{"group": options.group}] if options.group else [{"queue": queue} for queue in queues]
    consumers = [marq.Consumer(**name, **settings) for name in names]
    asyncio.run(consume(consumers, options.lease or LEASE_SECONDS, handler, recorder, options.at_once))


if __name__ == "__main__":
    main()
