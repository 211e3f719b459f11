"""Transactions of ACQUIRE markers and offsets: both take effect, or neither.

The group fences (KIP-447): a commit carries the member's generation, so the group refuses that of an expelled member
and its transaction has no effect. The next owner of the partitions reads their offsets only when no open transaction
can still move them (:mod:`marq.kafka.committed_offsets`). So no two members continue from the same place.

An open transaction of a dead process blocks all readers of the same markers partitions, above all the trackers: leases
there do not expire until the broker aborts it. The broker does so :data:`TRANSACTION_S` after it began, and up to 10 s
later (``transaction.abort.timed.out.transaction.cleanup.interval.ms``). A restart with the same ``instance_id`` ends it
at once.

aiokafka 0.14 commits offsets in transactions without a generation; the private names of the repair are in this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.client import CoordinationType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    IllegalGenerationError,
    IllegalOperation,
    KafkaError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from aiokafka.producer.sender import TxnOffsetCommitHandler
from aiokafka.producer.transaction_manager import TransactionState
from aiokafka.structs import OffsetAndMetadata

from marq.kafka.broker_clock import BrokerClock
from marq.kafka.connection import abandon_producer, client_options, retrieve, started, stop_producer
from marq.kafka.group_reader import GroupCommit, NotCommitted
from marq.kafka.marker_writer import MarkerRecord, batch_limits
from marq.kafka.protocol import FENCED_INSTANCE_ID, Generation, HandMade, commit_of_member
from marq.kafka.role_permissions import refused
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, reason_of

#: Time after which the broker may abort a transaction: the shorter it is, the sooner that of a dead process ends.
TRANSACTION_S = 5.0
#: Limit for aborting a transaction; after that, the broker aborts it.
_ABORT_S = 1.0
#: Pause before the retry of a request that the broker is not ready for, such as while it ends the last transaction.
_RETRY_MS = 20

#: Errors of a group for a client that is not its member in this generation.
_NOT_MEMBER = {
    UnknownMemberIdError.errno: "UNKNOWN_MEMBER_ID",
    IllegalGenerationError.errno: "ILLEGAL_GENERATION",
    RebalanceInProgressError.errno: "REBALANCE_IN_PROGRESS",
    FENCED_INSTANCE_ID: "FENCED_INSTANCE_ID",
}
_ABORTABLE = (TransactionState.IN_TRANSACTION, TransactionState.ABORTABLE_ERROR)


class NotMember(KafkaError):  # type: ignore[misc]
    """The group refuses a commit: another member owns the partitions, or soon will."""


class MarkerTransactions:
    """Writes ACQUIREs and commits offsets, in one transaction at a time, all under one transactional id.

    After a failure it uses a new producer, whose start aborts the open transaction of the former one, or waits for the
    end of one that is already decided. Each write sets ``clock``.
    """

    def __init__(self, settings: ClientSettings, limit_bytes: int, transactional_id: str, clock: BrokerClock) -> None:
        self._settings = settings
        self._topic = settings.names.markers
        self._limit_bytes = limit_bytes
        self._id = transactional_id
        self._clock = clock
        self._producer: AIOKafkaProducer | None = None
        #: The member whose offsets the current transaction commits.
        self._generation: Generation

    async def start(self) -> None:
        await self._running()

    async def stop(self, limit_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _abort(producer, min(limit_s, _ABORT_S))
            await stop_producer(producer, limit_s)

    async def write(self, records: Sequence[MarkerRecord], commit: GroupCommit, limit_s: float) -> None:
        """Write records and commit offsets; return when it is certain that both take effect.

        Raises NotCommitted if the group refused; BrokerUnavailable if the outcome is unknown after ``limit_s``, or the
        broker refused.
        """
        limit_s = min(limit_s, TRANSACTION_S)
        producer = None
        try:
            async with asyncio.timeout(limit_s):
                producer = await self._running()
                await self._transact(producer, records, commit)
        except NotMember as error:
            await self._give_up(producer)
            raise NotCommitted(str(error)) from error
        except (TimeoutError, KafkaError, IllegalOperation, AssertionError) as error:
            await self._give_up(producer)
            cause = refused(self._settings, error, "Write", self._topic) or reason_of(error)
            raise BrokerUnavailable(
                f"a transaction of {len(records)} marker batches for {self._topic} and of offsets of group"
                f" {commit.group} is not known to be committed at {self._settings.bootstrap_servers} after"
                f" {limit_s:g} s at most: {cause}"
            ) from error

    async def _transact(self, producer: Any, records: Sequence[MarkerRecord], commit: GroupCommit) -> None:
        await producer.begin_transaction()
        self._generation = commit.generation
        futures = [await producer.send(self._topic, value, partition=where) for where, value in records]
        # Not concurrently with the offsets: while the coordinator adds the group to the transaction, it cannot tell a
        # partition's leader whether the transaction includes that partition. The leader would refuse the records.
        for written in await asyncio.gather(*futures):
            self._clock.note(written)
        await producer.send_offsets_to_transaction(commit.offsets, commit.group)
        await producer.commit_transaction()

    async def _running(self) -> AIOKafkaProducer:
        if self._producer is None:
            self._producer = await started(self._make, self._settings, abandon_producer, writes=self._topic)
        return self._producer

    def _make(self) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **client_options(self._settings),
            transactional_id=self._id,
            transaction_timeout_ms=int(TRANSACTION_S * 1000),
            retry_backoff_ms=_RETRY_MS,
            linger_ms=0,
            **batch_limits(self._limit_bytes),
        )
        sender: Any = producer._sender

        async def commit(offsets: Mapping[TopicPartition, OffsetAndMetadata], group: str) -> None:
            await _commit_as_member(sender, offsets, group, self._generation)

        sender._do_txn_offset_commit = commit
        return producer

    async def _give_up(self, producer: AIOKafkaProducer | None) -> None:
        if producer is not None and self._producer is producer:
            self._producer = None
            await _abort(producer, _ABORT_S)
            await abandon_producer(producer)


@dataclass(frozen=True)
class _Answer:
    """The part of a broker's answer that aiokafka's handler reads."""

    errors: Sequence[tuple[str, Sequence[tuple[int, int]]]]


class _MemberCommit(TxnOffsetCommitHandler):  # type: ignore[misc]
    """aiokafka's commit of offsets in a transaction, with the generation of the member."""

    def __init__(self, sender: Any, offsets: Any, group: str, generation: Generation) -> None:
        super().__init__(sender, offsets, group)
        self._generation = generation

    def create_request(self) -> HandMade:
        manager = self._sender._txn_manager
        producer = (manager.producer_id, manager.producer_epoch)
        return commit_of_member(manager.transactional_id, producer, self._group_id, self._generation, self._offsets)

    def handle_response(self, response: Any) -> float | None:
        errors = [(topic, [(number, code) for number, code, _ in found]) for topic, found, _ in response.topics]
        refusals = {_NOT_MEMBER[code] for _, found in errors for _, code in found if code in _NOT_MEMBER}
        if refusals:
            error = NotMember(f"group {self._group_id} refuses the commit: {', '.join(sorted(refusals))}")
            self._sender._txn_manager.error_transaction(error)
            return None
        return super().handle_response(_Answer(errors))  # type: ignore[no-any-return]


async def _commit_as_member(sender: Any, offsets: Any, group: str, generation: Generation) -> None:
    """Commit offsets as aiokafka's sender does, but as a member."""
    try:
        node = await sender._find_coordinator(CoordinationType.GROUP, group)
        await _MemberCommit(sender, offsets, group, generation).do(node)
    except GroupAuthorizationFailedError as error:
        sender._txn_manager.error_transaction(error)
    except NotImplementedError:
        old = KafkaError("transactional=True needs brokers of Kafka 2.5 or newer; these are older")
        sender._txn_manager.error_transaction(old)


async def _abort(producer: Any, limit_s: float) -> None:
    """Abort a transaction that is not decided yet, so that its readers need not wait until the broker does."""
    manager = producer._txn_manager
    if (outcome := manager.wait_for_transaction_end()) is not None:
        # Otherwise asyncio would report the exception of a future that is never awaited.
        outcome.add_done_callback(retrieve)
    if manager.state not in _ABORTABLE:
        return
    with suppress(TimeoutError, KafkaError, IllegalOperation, AssertionError):
        async with asyncio.timeout(limit_s):
            await producer.abort_transaction()
