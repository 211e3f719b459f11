"""Questions to a cluster: each is answered with facts, and none changes anything.

What is allowed is asked of the broker itself where it tells (since Kafka 2.3), else by attempts that can't succeed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

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

from app.checkup.clock import Appended
from app.checkup.members import Member
from app.checkup.reading import Place, Reader
from app.checkup.requests import AllowedOnTopics, described_groups
from app.checkup.rights import operations
from app.consumers import unattended
from app.members import told_url
from marq.connection import abandon_producer, client_options
from marq.core.definitions import CHECK_KEY, Definitions
from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.core.topic_rules import TopicPlan
from marq.definition_log import KafkaDefinitionLog
from marq.log_view import LogView
from marq.reconnects import paced
from marq.settings import ClientSettings
from marq.topics import Look, look_up

#: Between two attempts while a coordinator is being found.
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
    """Why topics that are missing could not be made, "" if they could; ``copies``: too many for the brokers."""

    reasons: dict[str, str] = field(default_factory=dict)
    copies: bool = False


@dataclass(frozen=True)
class GroupFacts:
    """``allowed``: what we may do with the group, None when the broker does not tell."""

    members: list[Member] = field(default_factory=list)
    allowed: frozenset[str] | None = None


@dataclass(frozen=True)
class Published:
    """What the queues topic says; ``unreadable`` are records that are no definitions: (offset, why)."""

    definitions: Definitions
    unreadable: list[tuple[int, str]] = field(default_factory=list)


class ClusterView:
    """Asks one cluster."""

    def __init__(self, admin: AIOKafkaAdminClient, client: ClientSettings) -> None:
        self._admin = admin
        self._client = client

    async def apis(self) -> dict[int, tuple[int, int]]:
        """Return the versions of each request that a broker speaks."""
        answer = await self._admin._send_request(ApiVersionRequest())
        return {key: (least, most) for key, least, most, *_ in answer.api_versions}

    async def brokers(self) -> int:
        """Return how many brokers there are."""
        return len((await self._admin.describe_cluster())["brokers"])

    async def look_up(self, topics: Iterable[str]) -> Look:
        """Return what topics are like."""
        return await look_up(self._admin, topics)

    async def refusals(self, missing: Iterable[TopicPlan]) -> Refusals:
        """Return which of the topics that are missing could not be made; none is made."""
        copies = self._client.replication_factor
        topics = [NewTopic(plan.name, plan.partitions, copies, topic_configs=dict(plan.config)) for plan in missing]
        answer = await self._admin.create_topics(topics, validate_only=True)
        reasons, too_many = dict.fromkeys((topic.name for topic in topics), ""), False
        for name, code, *text in answer.topic_errors:
            error = for_code(code)
            too_many |= error is InvalidReplicationFactorError
            could = not code or error in (TopicAlreadyExistsError, InvalidReplicationFactorError)
            reasons[name] = "" if could else (text[0] if text else None) or error.__name__
        return Refusals(reasons, too_many)

    async def allowed_on_topics(self, topics: list[str]) -> dict[str, frozenset[str] | None]:
        """Return what is allowed on topics; None where that is unknown, as for those that are not there."""
        try:
            answer = await self._admin._send_request(AllowedOnTopics(topics))
        except NotImplementedError:
            return dict.fromkeys(topics)
        return {
            name: frozenset() if for_code(code) is TopicAuthorizationFailedError else operations(bits)
            for code, name, _, _, bits in answer.topics
        }

    async def group_names(self) -> list[str]:
        """Return the installation's groups that we may see."""
        names = self._client.names
        return sorted(name for name, *_ in await self._admin.list_consumer_groups() if names.is_group(name))

    async def group(self, name: str) -> GroupFacts:
        """Return a group's members, and what is allowed with it."""
        while True:
            try:
                node = await self._admin.find_coordinator(name)
                answer = await self._describe(name, node)
            except GroupAuthorizationFailedError:
                return GroupFacts(allowed=frozenset())
            except _NOT_YET:
                await asyncio.sleep(_PAUSE_S)
                continue
            [(code, _, _, _, _, members, *bits)] = answer.groups
            if code == GroupAuthorizationFailedError.errno:
                return GroupFacts(allowed=frozenset())
            if for_code(code) not in _NOT_YET:
                break
            await asyncio.sleep(_PAUSE_S)
        listed = [Member(client_id, host, _url(metadata)) for _, client_id, host, metadata, *_ in members]
        return GroupFacts(listed, operations(*bits) if bits else None)

    async def readers(self, groups: Iterable[str]) -> list[Reader]:
        """Return where groups of queues are in their partitions, of those that we may see."""
        found = []
        async with LogView(self._client, committed=False) as view:
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
                        places[Source(*tp)] = Place(offset.offset, span.start, span.stop)
                found.append(Reader(name, len(facts.members), places))
        return found

    async def unattended(self, definitions: Definitions, queues: Collection[str]) -> set[str]:
        """Return which of some queues have no consumer."""
        return await unattended(self._admin, self._client.names, definitions, queues)

    async def _describe(self, group: str, node: int) -> Any:
        return await described_groups(self._admin, [group], node)

    async def may_transact(self, transactional_id: str) -> bool:
        """Return whether we may use a transactional id.

        The request ends a transaction of a producer that does not exist: rights are looked at first, and then it fails.
        So the tracker that uses the id does not notice.
        """
        answer = await self._admin._send_request(EndTxnRequest(transactional_id, -1, -1, False))
        return for_code(answer.error_code) is not TransactionalIdAuthorizationFailed

    async def published(self) -> Published:
        """Read the queues topic to its end."""
        log = KafkaDefinitionLog(self._client)
        found = Published(Definitions())
        try:
            end, position = await log.start(), 0
            while position < end:
                entries, position = await log.read()
                for entry in entries:
                    try:
                        document = None if entry.value is None else json.loads(entry.value)
                        found.definitions.fold(entry.key, document)
                    except (ConfigError, ValueError, RecursionError) as error:
                        found.unreadable.append((entry.offset, str(error)))
        finally:
            await log.stop()
        return found

    async def append(self) -> Appended | None:
        """Append a record that says nothing, to learn what time it is for the broker; None where it does not tell."""
        producer = paced(AIOKafkaProducer(**client_options(self._client), enable_idempotence=True, linger_ms=0))
        try:
            await producer.start()
            sent_ms = time.time() * 1000
            kept = await producer.send_and_wait(self._client.names.queues, None, CHECK_KEY, partition=0)
            confirmed_ms = time.time() * 1000
        finally:
            await abandon_producer(producer)
        return Appended(sent_ms, kept.timestamp, confirmed_ms) if kept.timestamp_type == _APPENDED else None


def _url(metadata: bytes) -> str:
    try:
        return str(told_url(metadata))
    except (ValueError, KeyError, TypeError, AttributeError):
        # A member that is no worker, or one that has not told yet.
        return ""
