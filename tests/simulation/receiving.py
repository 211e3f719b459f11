"""The shipped receiver of a simulated consumer, which notes its cycles in the history."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from marq.consumer import acquisition
from marq.consumer.cycles import Taking
from marq.consumer.message import Message
from marq.consumer.prefetch import PrefetchBuffer
from marq.consumer.receiver import Receiver
from marq.consumer.receiver_settings import ReceiverSettings
from marq.consumer.resume_questions import TrackerQueries
from marq.consumer.session import ConsumerSession
from marq.kafka.acquire_strategies import AcquireStrategy, MarkerFirst, Transactional
from marq.kafka.marker_writer import FRAME_BYTES
from marq.kafka.records import Records
from marq.settings.topic_configs import room_for_markers
from marq.wire.markers import Payload, Source, payload_bytes
from tests.simulation.asking import open_reader

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer

#: How many of a cycle's largest messages fit into one ACQUIRE; if few, some cycles write several.
ROOMS = (1, 3, 100)
#: The least room for one message.
LEAST_ROOM = 2_300


class SimulatedReceiver(Receiver):
    """Receives for one consumer."""

    def __init__(self, consumer: Consumer, max_in_flight: int, max_lease_ms: int) -> None:
        world, reader, writer = consumer.world, consumer.reader, consumer.writer
        strategy: AcquireStrategy = MarkerFirst(writer, reader)
        transactional = None
        if consumer.starting is not None:
            transactional = Transactional(consumer.starting, reader)  # type: ignore[arg-type]
        settings = ReceiverSettings(
            max_in_flight=max_in_flight,
            max_lease_ms=max_lease_ms,
            markers_partitions=len(world.markers),
            limit_bytes=world.limit_bytes,
            queue=lambda queue: world.definitions.of(consumer).settings(queue),
            skipped=lambda queue: world.definitions.of(consumer).skipped(queue),
        )
        super().__init__(
            consumer.serving,
            reader,
            transactional if transactional is not None and consumer.starting.always else strategy,
            writer,
            settings,
            transactional=transactional,
            buffer=PrefetchBuffer(consumer.name),
            clock=consumer.loop.time,
            wall=lambda: consumer.wall_ms() / 1000,
            new_holder=lambda: world.rng.getrandbits(64),
            questions=TrackerQueries(
                partial(open_reader, consumer), writer, len(world.markers), consumer.loop.time, asyncio.sleep
            ),
        )
        self._consumer = consumer
        # Records with the headers of another attempt fit in the markers topic.
        self.ordering._settings = replace(settings, limit_bytes=room_for_markers(settings.limit_bytes))

    def suspects_run_at_once(self) -> None:
        """Let no suspect wait for others, or for its start, in worlds in which handlers hang."""

        async def at_once(messages: Sequence[Message]) -> list[Message]:
            return list(messages)

        add = self.prefetch.add_suspects
        self.starts.start = at_once  # type: ignore[method-assign]
        self.prefetch.add_suspects = lambda suspects: add([(each, False) for each, _ in suspects])  # type: ignore[method-assign]

    @property
    def busy(self) -> bool:
        """Whether it has messages, or outcomes to write."""
        waiting = self._fetched or self._fetched.held
        return bool(self.prefetch.in_flight or self.acks.unwritten or self._cycles or waiting)

    def fail(self, error: BaseException) -> None:
        """End the world, because nothing that happens in it may end a receiver."""
        raise error

    async def _cycle(
        self, records: Mapping[Source, Records], taking: Taking, assignment: int, before: asyncio.Task[bool] | None
    ) -> bool:
        consumer, holder, began_ms = self._consumer, self._holder, self._consumer.monotonic_ms()
        taken = {
            (queue, source): list(own.offsets)
            for source, read in records.items()
            for queue, own in self._serving.own(source, read)
        }
        if not records:
            taken = {(each.queue, each.source): list(each.offsets) for each in taking.acquisitions}

        def note(type_: str, **fields: int) -> None:
            """Note how a cycle begins or ends: from the ACQUIRE to the commit."""
            for (queue, source), offsets in taken.items():
                if offsets:
                    consumer.note(type_, "commit", holder, queue, source, offsets, **fields)

        note("invoke")
        delivered = await super()._cycle(records, taking, assignment, before)
        if delivered:
            delayed = sum(len(each.taken) - len(each.messages) for each in taking.acquisitions)
            consumer.world.stats["delayed_by_header"] += delayed
            # No handler has seen any of them yet.
            note("ok", took_ms=consumer.monotonic_ms() - began_ms)
        else:
            note("unknown")
            consumer.world.stats["acquire_not_certain" if consumer.starting is None else "start_not_certain"] += 1
        return delivered

    def _take(self, records: Mapping[Source, Records]) -> Taking:
        rows = [row for read in records.values() for row in read]
        largest = max(payload_bytes(Payload(0, 1, row.key, row.headers, row.value)) for row in rows)
        world = self._consumer.world
        if world.has_large and largest > LEAST_ROOM:
            # What the shared topic accepts fits, and some of a queue's own topic never does.
            room = LEAST_ROOM + 2
        else:
            # The number of headers takes two bytes, even if it is 0.
            room = (room_for_markers(largest) + 2) * world.rng.choice(ROOMS)
        fixed = FRAME_BYTES + acquisition._HEAD_BYTES + acquisition._ADDED_BYTES
        self._settings = replace(self._settings, limit_bytes=fixed + room)
        return super()._take(records)


class Session(ConsumerSession):
    """The shipped session, for a receiver without connections."""

    def __init__(self, receiver: SimulatedReceiver) -> None:
        self.receiver = receiver
        self.prefetch = receiver.prefetch
        self.pools = []
