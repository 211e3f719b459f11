"""Checks a suspected stall with its own clients, in the watchdog's thread.

If the probe's requests succeed, the worker's requests should succeed, too. So a worker is ended only if it fails where
the probe succeeds, and not if its broker is down, has lost replicas or rejects requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, for_code

from marq.kafka.connection import client_options, plain_admin, stop_consumer, stop_producer
from marq.kafka.foreign_transactions import CautiousConsumer
from marq.kafka.paced_clients import paced
from marq.settings.client import ClientSettings
from marq.wire.marker_codec import encode
from marq.wire.markers import Tick
from marq_worker.progress import ProgressReport
from marq_worker.watchdog.watchdog import ProbeResult

log = logging.getLogger("marq.watchdog")

#: Time limit for all answers of the broker.
ANSWER_SECONDS = 15.0
STOP_SECONDS = 1.0
_POLL_MS = 200


class MarkersPartition(NamedTuple):
    """A markers partition, and the topic to which its owner writes the rows of its table."""

    partition: int
    changelog: str

    def __str__(self) -> str:
        return f"markers partition {self.partition}"


class MessagesPartition(NamedTuple):
    """``committed``: records of open transactions are not read."""

    topic: str
    partition: int
    committed: bool = False

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}"


class Rebalance(NamedTuple):
    group: str

    def __str__(self) -> str:
        return f"a rebalance of the group {self.group}"


@dataclass(frozen=True)
class BrokerProbe:
    client: ClientSettings

    def ask(self, subject: Hashable, standing: ProgressReport, last: bool) -> ProbeResult:
        """Return whether a subject has work to do, and whether the broker would let it."""
        match subject:
            case MarkersPartition():
                return asyncio.run(self._answer(self._markers(subject, standing, last)))
            case MessagesPartition():
                source = TopicPartition(subject.topic, subject.partition)
                isolation = "read_committed" if subject.committed else "read_uncommitted"
                return asyncio.run(self._answer(self._records(source, standing.position, isolation)))
            case Rebalance():
                return asyncio.run(self._answer(self._rebalance(subject.group)))
        raise TypeError(f"cannot probe {subject!r}")

    async def _answer(self, question: Coroutine[Any, Any, ProbeResult]) -> ProbeResult:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await question
        except (KafkaError, OSError, TimeoutError) as error:
            log.info("the watchdog waits, because the broker does not answer correctly: %r", error)
        except (Exception, asyncio.CancelledError):
            # aiokafka may raise AssertionError, and stopping a client may raise a CancelledError of its own.
            log.exception("the watchdog waits, because its probe failed unexpectedly")
        return ProbeResult.AWAY

    async def _markers(self, markers: MarkersPartition, standing: ProgressReport, last: bool) -> ProbeResult:
        source = TopicPartition(self.client.names.markers, markers.partition)
        table = TopicPartition(markers.changelog, markers.partition)
        answer = await self._records(source, standing.position, "read_committed", table)
        if standing.owes:
            answer = ProbeResult.WORK_WAITS
        if last and answer is ProbeResult.WORK_WAITS:
            await self._write(source)
        return answer

    async def _records(
        self, source: TopicPartition, position: int | None, isolation: str, *others: TopicPartition
    ) -> ProbeResult:
        consumer = paced(
            CautiousConsumer(
                enable_auto_commit=False,
                isolation_level=isolation,
                auto_offset_reset="earliest",
                # Records that the worker may not read yet do not wait for it.
                messages_topic=self.client.names.messages,
                **client_options(self.client),
            )
        )
        try:
            await consumer.start()
            consumer.assign([source])
            end = (await consumer.end_offsets([source, *others]))[source]
            if position is None or position >= end:
                return ProbeResult.NOTHING_TO_DO
            consumer.seek(source, position)
            # These may be control records of transactions.
            while await consumer.position(source) < end:
                if any((await consumer.getmany(source, timeout_ms=_POLL_MS, max_records=1)).values()):
                    return ProbeResult.WORK_WAITS
            return ProbeResult.NOTHING_TO_DO
        finally:
            await stop_consumer(consumer, STOP_SECONDS)

    async def _write(self, source: TopicPartition) -> None:
        """Write as the owner would, and abort; this fences a previous owner of the partition."""
        producer = paced(
            AIOKafkaProducer(
                transactional_id=self.client.names.transactional_id(source.partition),
                transaction_timeout_ms=int(ANSWER_SECONDS * 1000),
                **client_options(self.client),
            )
        )
        try:
            await producer.start()
            await producer.begin_transaction()
            await producer.send_and_wait(source.topic, encode(Tick(0, 0)), partition=source.partition)
            await producer.abort_transaction()
        finally:
            await stop_producer(producer, STOP_SECONDS)

    async def _rebalance(self, group: str) -> ProbeResult:
        async with plain_admin(self.client) as admin:
            [response] = await admin.describe_consumer_groups([group])
        # (error, group, state, …)
        [(code, _, state, *_)] = response.groups
        if code:
            raise for_code(code)
        return ProbeResult.NOTHING_TO_DO if state.endswith("Rebalance") else ProbeResult.WORK_WAITS
