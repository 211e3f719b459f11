"""The shipped receiver of a simulated consumer, which notes its cycles in the history."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from marq.consumer import acquire
from marq.consumer.ordering import RereadRecords, Steps
from marq.consumer.prefetch import PrefetchBuffer
from marq.consumer.receiver import Cycle, Receiver
from marq.consumer.session import ConsumerSession
from marq.kafka.records import Records
from marq.leases.message import Message
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.topic_configs import room_for_markers
from marq.wire.markers import Payload, Source, payload_bytes
from marq.wire.names import FRAME_BYTES
from tests.simulation.asking import open_reader
from tests.simulation.prioritising import JudgedPriorities

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer

#: How many of a cycle's largest messages fit into one ACQUIRE; if few, some cycles write several.
ROOMS = (1, 3, 100)
#: The least room for one message.
LEAST_ROOM = 2_300


class SimulatedReceiver(Receiver):
    """Receives for one consumer."""

    def __init__(self, consumer: Consumer, max_in_flight: int, max_lease_ms: int) -> None:
        self._consumer = consumer
        world, reader, writer = consumer.world, consumer.reader, consumer.writer
        transactions = consumer.starting
        settings = ReceiverSettings(
            max_in_flight=max_in_flight,
            max_lease_ms=max_lease_ms,
            markers_partitions=len(world.markers),
            limit_bytes=world.limit_bytes,
            queue=lambda queue: world.definitions.of(consumer).settings(queue),
            skipped=lambda queue: world.definitions.of(consumer).skipped(queue),
            partitions=lambda queue: world.definitions.of(consumer).placement(queue).reads,
        )
        super().__init__(
            consumer.serving,
            reader,
            None if transactions is not None and transactions.always else writer,
            writer,
            settings,
            _Brokers(consumer),  # type: ignore[arg-type]
            transactions=transactions,  # type: ignore[arg-type]
            buffer=PrefetchBuffer(consumer.name),
        )
        if not world.blind:
            self.ordering.priorities = JudgedPriorities(world)
        # Records with the headers of another attempt fit in the markers topic.
        self._settings_again = replace(settings, limit_bytes=room_for_markers(settings.limit_bytes))

    def _new_holder(self) -> int:
        return self._consumer.world.rng.getrandbits(64)

    def _acquire_again(self, steps: Steps) -> None:
        self._settings = self._settings_again
        super()._acquire_again(steps)

    def suspects_run_at_once(self) -> None:
        """Let no suspect wait for others, or for its start, in worlds in which handlers hang."""

        async def at_once(messages: Sequence[Message]) -> list[Message]:
            return list(messages)

        self.starts.started = at_once  # type: ignore[method-assign]
        self.prefetch._most_together = lambda message: inf  # type: ignore[method-assign]

    @property
    def busy(self) -> bool:
        """Whether it has messages, or outcomes to write."""
        waiting = self._fetched or self._fetched.held
        return bool(self.prefetch.in_flight or self.writer.unwritten or self._cycles or waiting)

    def fail(self, error: BaseException) -> None:
        """End the world, because nothing that happens in it may end a receiver."""
        raise error

    async def _cycle(self, cycle: Cycle) -> bool:
        consumer, holder, began_ms = self._consumer, self._holder, self._consumer.monotonic_ms()
        taken = {
            (queue, source): list(own.offsets)
            for source, read in cycle.records.items()
            for queue, own in self._serving.own(source, read)
        }
        if not cycle.records:
            taken = {(each.queue, each.source): list(each.offsets) for each in cycle.acquisitions}

        def note(type_: str, **fields: int) -> None:
            """Note how a cycle begins or ends: from the ACQUIRE to the commit."""
            for (queue, source), offsets in taken.items():
                if offsets:
                    consumer.note(type_, "commit", holder, queue, source, offsets, **fields)

        note("invoke")
        delivered = await super()._cycle(cycle)
        if delivered:
            delayed = sum(len(each.taken) - len(each.messages) for each in cycle.acquisitions)
            consumer.world.stats["delayed_by_header"] += delayed
            # No handler has seen any of them yet.
            note("ok", took_ms=consumer.monotonic_ms() - began_ms)
        else:
            note("unknown")
            consumer.world.stats["acquire_not_certain" if consumer.starting is None else "start_not_certain"] += 1
        return delivered

    def _acquisitions_of(
        self, records: Mapping[Source, Records]
    ) -> tuple[Sequence[acquire.Acquisition], Sequence[RereadRecords]]:
        rows = [row for read in records.values() for row in read]
        largest = max(payload_bytes(Payload(0, 1, row.key, row.headers, row.value)) for row in rows)
        world = self._consumer.world
        if world.has_large and largest > LEAST_ROOM:
            # What the shared topic accepts fits, and some of a queue's own topic never does.
            room = LEAST_ROOM + 2
        else:
            # The number of headers takes two bytes, even if it is 0.
            room = (room_for_markers(largest) + 2) * world.rng.choice(ROOMS)
        fixed = FRAME_BYTES + acquire._HEAD_BYTES + acquire._ADDED_BYTES
        self._settings = replace(self._settings, limit_bytes=fixed + room)
        return super()._acquisitions_of(records)


class _Brokers:
    """The clocks of a consumer's process, and its readers of markers."""

    def __init__(self, consumer: Consumer) -> None:
        self.now_s = consumer.loop.time
        self.wall_s = lambda: consumer.wall_ms() / 1000
        self.broker_ms = consumer.world.wall_ms
        self.sleep = asyncio.sleep
        self.markers_reader = partial(open_reader, consumer)


class Session(ConsumerSession):
    """The shipped session, for a receiver without connections."""

    def __init__(self, receiver: SimulatedReceiver) -> None:
        self.receiver = receiver
        self.prefetch = receiver.prefetch
        self.pools = []
