"""Queries to a cluster: each returns facts, and none changes anything.

Brokers report permissions since Kafka 2.3; with older ones, attempts that can't succeed reveal them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    InvalidReplicationFactorError,
    NotCoordinatorForGroupError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    for_code,
)
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.transaction import EndTxnRequest

from marq.consumer.ordering import keys_of
from marq.dead_letters.log import open_dead_letter_log
from marq.dead_letters.selection import CountKey, Survey
from marq.kafka.connection import abandon_producer, client_options
from marq.kafka.group_members import DescribedMember, described_members
from marq.kafka.log_reader import LogReader
from marq.kafka.paced_clients import paced
from marq.kafka.protocol import allowed_on_topics
from marq.kafka.records import Records
from marq.kafka.topics import Look, look_up
from marq.queues.definition_log import KafkaDefinitionLog
from marq.queues.following import fold
from marq.settings.client import ClientSettings
from marq.settings.definitions import CHECK_KEY, Definitions
from marq.settings.topic_configs import TopicPlan
from marq.wire.markers import Source
from marq.wire.names import GONE_HEADER, TOO_LARGE_HEADER
from marq.wire.record_headers import last_value
from marq_worker.backlog.consumer_watch import unattended
from marq_worker.check.brokers import ClockSample
from marq_worker.check.consumers import GroupPosition, ReadingGroup
from marq_worker.check.permissions import Operations, operations

#: Maximum number of the newest records of a topic to read for the keys of its queues.
MAX_SAMPLED = 1_000
#: How long to read them in each topic; what was read by then is judged.
SAMPLE_LIMIT_S = 1.0
#: Interval between two attempts to find a coordinator.
_PAUSE_S = 0.1
_NOT_YET = (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    NotCoordinatorForGroupError,
)
_APPENDED = 1


@dataclass(frozen=True)
class Refusals:
    """Why each missing topic could not be created, "" if it could; ``replicas``: whether there are too few brokers."""

    reasons: dict[str, str] = field(default_factory=dict)
    replicas: bool = False


@dataclass(frozen=True)
class GroupFacts:
    """``allowed``: our permissions on the group, None if the broker does not report them."""

    members: Sequence[DescribedMember] = ()
    allowed: frozenset[str] | None = None


@dataclass(frozen=True)
class Published:
    """The queues topic; ``unreadable``: records that are not definitions, as (offset, reason)."""

    definitions: Definitions
    unreadable: list[tuple[int, str]] = field(default_factory=list)


class SampledKeys(NamedTuple):
    """How many of the newest messages of a queue were read, and how many of them have no key."""

    messages: int
    without: int


class ClusterView:
    """Queries one cluster."""

    def __init__(self, admin: AIOKafkaAdminClient, client: ClientSettings) -> None:
        self._admin = admin
        self._client = client

    async def apis(self) -> dict[int, tuple[int, int]]:
        """Return the versions of each request that a broker supports."""
        answer = await self._admin._send_request(ApiVersionRequest())
        return {key: (least, most) for key, least, most, *_ in answer.api_versions}

    async def brokers(self) -> int:
        return len((await self._admin.describe_cluster())["brokers"])

    async def look_up(self, topics: Iterable[str]) -> Look:
        return await look_up(self._admin, topics)

    async def refusals(self, missing: Iterable[TopicPlan]) -> Refusals:
        """Return which of the missing topics could not be created, without creating any."""
        replicas = self._client.replication_factor
        topics = [NewTopic(plan.name, plan.partitions, replicas, topic_configs=dict(plan.config)) for plan in missing]
        answer = await self._admin.create_topics(topics, validate_only=True)
        reasons, too_many = dict.fromkeys((topic.name for topic in topics), ""), False
        for name, code, *text in answer.topic_errors:
            error = for_code(code)
            too_many |= error is InvalidReplicationFactorError
            could = not code or error in (TopicAlreadyExistsError, InvalidReplicationFactorError)
            reasons[name] = "" if could else (text[0] if text else None) or error.__name__
        return Refusals(reasons, too_many)

    async def allowed_on_topics(self, topics: list[str]) -> Operations:
        """Return the permissions on topics; None if unknown, as for missing topics."""
        try:
            answer = await self._admin._send_request(allowed_on_topics(topics))
        except NotImplementedError:
            return dict.fromkeys(topics)
        return {
            name: frozenset() if for_code(code) is TopicAuthorizationFailedError else operations(bits)
            for code, name, _, _, bits in answer.topics
        }

    async def group_names(self) -> list[str]:
        """Return the namespace's groups that we may see."""
        names = self._client.names
        return sorted(name for name, *_ in await self._admin.list_consumer_groups() if names.is_group(name))

    async def group(self, name: str) -> GroupFacts:
        """Return a group's members, and our permissions on it."""
        while True:
            try:
                node = await self._admin.find_coordinator(name)
                [group] = await described_members(self._admin, {name: node}, permissions=True)
                if (error := for_code(group.error)) in (GroupAuthorizationFailedError, *_NOT_YET):
                    raise error
                return GroupFacts(group.members, None if group.operations is None else operations(group.operations))
            except GroupAuthorizationFailedError:
                return GroupFacts(allowed=frozenset())
            except _NOT_YET:
                await asyncio.sleep(_PAUSE_S)

    async def readers(self, groups: Iterable[str]) -> list[ReadingGroup]:
        """Return the positions of groups of queues, as far as we may see them."""
        readers = []
        async with LogReader(self._client, committed=False) as view:
            ranges: dict[str, dict[Source, range]] = {}
            for name in groups:
                facts = await self.group(name)
                if facts.allowed is not None and "Describe" not in facts.allowed:
                    continue
                committed = await self._admin.list_consumer_group_offsets(name)
                places = {}
                for tp, offset in committed.items():
                    if tp.topic not in ranges:
                        ranges[tp.topic] = await view.ranges(tp.topic)
                    span = ranges[tp.topic].get(Source(*tp))
                    if span is not None and offset.offset >= 0:
                        places[Source(*tp)] = GroupPosition(offset.offset, span.start)
                readers.append(ReadingGroup(name, len(facts.members), places))
        return readers

    async def unattended(self, definitions: Definitions, queues: Collection[str]) -> set[str]:
        return await unattended(self._admin, self._client.names, definitions, queues)

    async def sample_keys(self, definitions: Definitions, topics: Mapping[str, str]) -> dict[str, SampledKeys]:
        """Look for keys in the newest records of queues, which are in these topics."""
        found: dict[str, list[bytes | None]] = {queue: [] for queue in topics}
        async with LogReader(self._client, committed=False) as view:
            for topic in sorted({*topics.values()}):
                own = topic != self._client.names.messages
                queues = [queue for queue in topics if topics[queue] == topic]
                for records in await _newest(view, topic):
                    for queue in queues:
                        keys = keys_of(records, definitions.settings(queue).key, own_topic=own)
                        named = zip(keys, records.keys, strict=True)
                        found[queue] += [key for key, name in named if own or name == queue.encode()]
        return {queue: SampledKeys(len(keys), keys.count(None)) for queue, keys in found.items()}

    async def may_transact(self, transactional_id: str) -> bool:
        """Return whether we may use a transactional id.

        The request ends a transaction of a producer that does not exist: the broker checks permissions first, then
        rejects it. So the tracker that uses the id is not affected.
        """
        answer = await self._admin._send_request(EndTxnRequest(transactional_id, -1, -1, False))
        return for_code(answer.error_code) is not TransactionalIdAuthorizationFailed

    async def published(self) -> Published:
        """Read the queues topic to its end."""
        log = KafkaDefinitionLog(self._client)
        published = Published(Definitions())
        try:
            end, position = await log.start(), 0
            while position < end:
                entries, position = await log.read()
                for entry in entries:
                    error = fold(published.definitions, entry)
                    if error is not None:
                        published.unreadable.append((entry.offset, str(error)))
            published.definitions.end_pauses(int(time.time() * 1000))
        finally:
            await log.stop()
        return published

    async def large_messages(self, queues: Collection[str]) -> Mapping[CountKey, int]:
        """Count the dead letters of these queues whose values were left out, by queue and reason."""
        survey = Survey(
            self._client.names.dead_letters,
            lambda queue, record: (
                queue in queues
                and any(last_value(record.headers, header) is not None for header in (TOO_LARGE_HEADER, GONE_HEADER))
            ),
        )
        async with open_dead_letter_log(self._client) as log:
            await survey.make(log)
        return survey.counts()

    async def append(self) -> ClockSample | None:
        """Append an empty record to learn the broker's time; None if the topic does not have it."""
        producer = paced(AIOKafkaProducer(**client_options(self._client), enable_idempotence=True, linger_ms=0))
        try:
            await producer.start()
            sent_ms = time.time() * 1000
            receipt = await producer.send_and_wait(self._client.names.queues, None, CHECK_KEY, partition=0)
            confirmed_ms = time.time() * 1000
        finally:
            await abandon_producer(producer)
        return ClockSample(sent_ms, receipt.timestamp, confirmed_ms) if receipt.timestamp_type == _APPENDED else None


async def _newest(view: LogReader, topic: str) -> list[Records]:
    """Return some of the newest records of a topic, as far as they could be read in time."""
    spans, found = await view.ranges(topic), list[Records]()
    most = max(MAX_SAMPLED // max(len(spans), 1), 1)
    newest = {source: range(max(span.start, span.stop - most), span.stop) for source, span in spans.items()}
    # A reader waits behind open transactions of other programs.
    with suppress(TimeoutError):
        async with asyncio.timeout(SAMPLE_LIMIT_S):
            async for fetched in view.read(newest):
                found += fetched.values()
    return found
