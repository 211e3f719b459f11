"""The handlers of a simulated consumer: what its user's code does with messages, and what it learns about its acks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from lab.proof import history
from marq.client.outcomes import Reject, Retry
from marq.consumer.ordering import ordering_keys
from marq.kafka.records import Records
from marq.leases.message import Message, put_back
from marq.wire.errors import BrokerUnavailable, LeaseLost
from marq.wire.names import markers_partition
from tests.simulation.oracle import Violation, violate

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer


#: Faults that let a clock run at another speed.
_WRONG_CLOCKS = ("clock_step_every_ms", "clock_jump_every_ms", "suspended")
#: The value of the message whose handler ends its process.
KILLER = b"0"


class Handlers:
    """The handler of all queues of one consumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._world = consumer.world
        self._tasks: set[asyncio.Task[None]] = set()
        #: Messages of queues with ordering whose handlers have not returned.
        self._running: dict[Message, None] = {}

    async def handle(self, message: Message) -> None:
        if not message._batch.in_order:
            await self._handle(message)
            return
        self._check_line(message)
        self._check_limit(message)
        self._running[message] = None
        running = self._world.running
        running[message] = self._consumer
        try:
            await self._handle(message)
        finally:
            del self._running[message]
            running.pop(message, None)

    def _check_limit(self, message: Message) -> None:
        """Check that no more messages of its key are in flight in all consumers than may be."""
        world, queue, source = self._world, message.queue, message._batch.source
        most, most_here = world.ordering.most_of_key(world, queue), world.ordering.most_of_queue(world, queue)
        if world.blind or most == most_here == inf:
            return
        line, others, here = _line_of(message), list[Message](), list[Message]()
        # Other clocks may run at another speed: then a lease may have ended by the log before its consumer notices.
        wrong = any(getattr(world.faults, name) for name in _WRONG_CLOCKS)
        for other, consumer in world.running.items():
            held = other._batch
            if not consumer.alive or held.queue != queue or other.offset not in held.open - held.decided:
                continue
            if wrong and consumer is not self._consumer:
                continue
            if (held.source, other.offset) == (source, message.offset):
                # It was delivered twice, which is judged by the log.
                continue
            if consumer.loop.time() < held.expiry_s(other.offset):
                if held.source == source and _line_of(other) == line:
                    others.append(other)
                # Of partitions that it no longer reads, its successor counts the messages.
                if consumer is self._consumer and held.source in consumer.reader.positions:
                    here.append(other)
        of_key, of_queue = self._leased(others, wrong), self._leased(here, wrong)
        world.stats["at_limit"] += of_key + 1 == most or of_queue + 1 == most_here
        if of_key >= most or of_queue >= most_here:
            text = f"{queue} {source} {message.offset}: {len(others)} of its key, {len(here)} of its queue here"
            world.schedule(0, violate, Violation("limit", text))

    def _leased(self, messages: list[Message], wrong: bool) -> int:
        """Return how many of these messages are leased to their handlers by the log: others may have ended them.

        ``wrong``: clocks may differ.
        """
        world, count = self._world, 0
        for message in messages:
            held = message._batch
            partition = markers_partition(*held.source, len(world.markers))
            fold = world.plain_fold(partition, len(world.markers[partition].records) - 1)
            standing = fold.open.get((held.queue, history.name_of(held.source, message.offset)))
            if message.offset < world.messages[held.source].start:
                # No consumer can know its key any more.
                continue
            leased = standing is not None and standing.holder == history.holder_name(held.holder)
            # A jump of the log's clock ends leases that have not ended by their consumer's.
            count += leased and not (wrong and fold.now_ms >= standing.due_ms)
        return count

    def _check_line(self, message: Message) -> None:
        """Check that no other message of its line is in flight in this consumer."""
        for other in self._running:
            held, keys = other._batch, self._consumer.receiver.ordering._of(other._batch)
            # A late ack of an earlier attempt may have ended the other message.
            same = keys is self._consumer.receiver.ordering._of(message._batch) and keys is not None
            same = same and other.offset in keys._retries
            same = same and self._world.definitions.versions[-1].settings(message.queue).ordered
            same = same and _line_of(other) == _line_of(message)
            if same and other.offset in held.open and other.offset not in held.decided and not self._world.blind:
                # Not raised here: the library would take it for the handler's exception.
                text = f"{held.source} {other.offset}, while {message.offset} is delivered"
                self._world.schedule(0, violate, Violation("concurrent", text))

    async def _handle(self, message: Message) -> None:
        consumer, world, rng = self._consumer, self._world, self._world.rng
        held, row, queue = message._batch, message._record, message.queue
        name, log = history.name_of(held.source, message.offset), world.markers_of(held.source)
        world.history.add(
            consumer.name, "ok", "deliver", group=consumer.group.kafka_name,
            holder=history.holder_name(held.holder), record=name, queue=queue,
            attempt=message.attempt, content=history.content(queue, row.key, message._raw, row.headers),
            log_end=len(log.records), time_ms=log.time_ms(),
        )  # fmt: skip
        world.stats["handed_out"] += 1
        lease_ms = world.definitions.of(consumer).settings(queue).lease_ms
        choice = rng.random() if world.faulty else 1.0
        if message._raw == KILLER and world.hit(world.faults.killer):
            await self._work(message, world.killer_ms)
            world.stats["killed"] += 1
            world.schedule(0, consumer.end_process)
            await asyncio.Event().wait()
        if world.hit(world.faults.forgotten):
            # It hangs, perhaps for longer than its lease can be renewed, but returns in the end.
            world.history.add(consumer.name, "ok", "hang", queue=queue, record=name)
            await self._work(message, rng.randint(1, 4) * lease_ms, stubborn=True)
        elif choice < world.release_share:
            await self._work(message, rng.randint(0, 60))
            await self._release(message)
            return
        elif choice < world.release_share + world.reject_share:
            await self._work(message, rng.randint(0, 60))
            await self._reject(message)
            return
        elif choice < world.release_share + world.reject_share + world.slow_share:
            if world.faults.forgotten:
                world.history.add(consumer.name, "ok", "hang", queue=queue, record=name)
            stubborn = rng.random() < 0.8
            await self._work(message, rng.randint(0, lease_ms), stubborn=stubborn)
            if rng.random() < world.renew_share and message.offset in message._batch.open:
                # Also for longer than the library does: an earlier RENEW that comes late does not shorten the lease.
                await self._renew(message, lease_ms * (1 if message.offset % 3 else 3))
            await self._work(message, rng.randint(0, 2 * lease_ms), stubborn=stubborn)
        else:
            await self._work(message, rng.randint(0, 60))
        if message.offset in message._batch.decided:
            # The consumer was stopped, and has released it.
            return
        if rng.random() < 0.5:
            await self._ack(message)
        else:
            self._tell_later("ack", message)

    async def _ack(self, message: Message) -> None:
        await self._tell("ack", message, message.ack())

    async def _work(self, message: Message, took_ms: int, *, stubborn: bool = False) -> None:
        """Take some time; a stubborn handler goes on working when the lease of its message has ended."""
        loop = self._consumer.loop
        end_s = loop.time() + took_ms / 1000
        while (left_s := end_s - loop.time()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                if message.offset in message._batch.open:
                    # The consumer is stopped, and settles the message.
                    self._tell_failed(message)
                    raise
                if not stubborn or message._batch.at_most_once:
                    raise
                if self._world.faults.forgotten:
                    # In a task of its own, or messages would wait for the handler until they can't be renewed.
                    self._keep(self._end_late(message, end_s))
                    raise

    async def _end_late(self, message: Message, end_s: float) -> None:
        await asyncio.sleep(end_s - self._consumer.loop.time())
        if message.offset not in message._batch.decided:
            await self._ack(message)

    async def _renew(self, message: Message, lease_ms: int) -> None:
        try:
            await message.renew(lease_ms / 1000, wait=self._world.rng.random() < 0.5)
        except (LeaseLost, asyncio.CancelledError):
            self._tell_failed(message)
            raise

    async def _release(self, message: Message) -> None:
        world, rng = self._world, self._world.rng
        delay_ms = rng.choice([0, 0, rng.randint(1, 400), None])
        delay_s = None if delay_ms is None else delay_ms / 1000
        world.stats["released"] += 1
        how = 1.0 if message._batch.at_most_once else rng.random()
        if how < 0.3 and message._batch.decide(message.offset):
            # As the library does with messages that no handler has seen.
            put_back([message], delay_ms or 0)
            self._tell_later("release", message)
        elif how < 0.5:
            await self._tell("release", message, message.release(delay_s))
        else:
            self._tell_failed(message)
            raise Retry(delay_s) from RuntimeError(f"error {message.offset}" + "!" * rng.choice([0, 0, 0, 900]))

    async def _reject(self, message: Message) -> None:
        self._world.stats["rejected"] += 1
        if self._world.rng.random() < 0.5:
            self._tell_later("reject", message)
            raise Reject("no good")
        await self._tell("reject", message, message.reject("no good"))

    # --- history ------------------------------------------------------------------------------------------------------

    async def _tell(self, op: str, message: Message, settled: Awaitable[None]) -> None:
        """Note an outcome, and the result of its call."""
        began_ms = self._note("invoke", op, message)
        try:
            await settled
        except LeaseLost:
            if op != "ack":
                self._note("unknown", op, message)
                self._tell_failed(message)
                raise
            self._note("ok", op, message, began_ms, lost=[message.offset])
        except BrokerUnavailable:
            self._note("unknown", op, message)
        else:
            self._note("ok", op, message, began_ms)

    def _tell_failed(self, message: Message) -> None:
        """Note what the library makes of an exception."""
        self._tell_later("reject" if message._batch.at_most_once else "release", message)

    def _tell_later(self, op: str, message: Message) -> None:
        """Note an outcome that follows from how the handler ends, and when it is durable."""
        began_ms = self._note("invoke", op, message)
        # If its lease was over, there may be nothing to release.
        known = op == "ack" or message.offset in message._batch.open
        self._keep(self._told(op, message, began_ms, message._expiry_s, known))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, op: str, message: Message, began_ms: int, expiry_s: float, known: bool) -> None:
        try:
            await message._batch.keeper.settled()
        except BrokerUnavailable:
            known = False
        lost = {"lost": [message.offset]} if op == "ack" and self._consumer.loop.time() >= expiry_s else {}
        self._note("ok" if known else "unknown", op, message, began_ms, **lost)

    def _note(self, type_: str, op: str, message: Message, began_ms: int | None = None, **fields: Any) -> int:
        """Note an operation, and how long it took since ``began_ms``; return the current time."""
        held, now_ms = message._batch, self._consumer.monotonic_ms()
        if began_ms is not None:
            fields["took_ms"] = now_ms - began_ms
        self._consumer.note(type_, op, held.holder, held.queue, held.source, [message.offset], **fields)
        return now_ms


def _line_of(message: Message) -> bytes | int:
    """Return the ordering key of a message, or its offset without one."""
    held = message._batch
    [key] = ordering_keys(Records.of([held.record(message.offset)]), own_topic=held.own_topic)
    return message.offset if key is None else key
