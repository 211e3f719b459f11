"""Creates the topics that are missing, and checks the others.

Clients call :func:`ensure_topics` when they start, and so does the Faust application. An existing topic is never
changed, because its settings may be deliberate: a wrong setting is a ConfigError that names the command to change it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidReplicationFactorError,
    KafkaError,
    LeaderNotAvailableError,
    PolicyViolationError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

from marq.kafka.connection import admin_client, unavailable
from marq.kafka.protocol import known_ids
from marq.kafka.role_permissions import Permission, ResourceType, missing_permissions, principal, refused, tools
from marq.settings.client import ClientSettings
from marq.settings.topic_configs import (
    DEFAULT_LIMIT_BYTES,
    LIMIT,
    TopicFacts,
    TopicPlan,
    broken_rules,
    plans,
    room_for_markers,
    rules,
    wrong_partitions,
)
from marq.wire.errors import ConfigError, Forbidden
from marq.wire.names import incarnation

log = logging.getLogger("marq")

_PAUSE_S = 0.05
_UNKNOWN = (UnknownTopicOrPartitionError, LeaderNotAvailableError)
#: Errors of a creation that ACLs or a policy of the cluster forbid.
_FORBIDDEN = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError, PolicyViolationError)


@dataclass(frozen=True, slots=True)
class Topics:
    """The facts of the topics that clients need: partition counts, and the largest record batch each accepts."""

    messages_partitions: int
    markers_partitions: int
    messages_limit_bytes: int
    markers_limit_bytes: int


async def ensure_topics(settings: ClientSettings, *, changelog: bool = False) -> Topics:
    """Create the topics that are missing and check the others; safe to call concurrently.

    ``changelog``: also the lease table's topic, which only trackers need.

    Raises BrokerUnavailable if no broker answered within the connect timeout, or it refused; ConfigError if a topic's
    setting is wrong.
    """
    async with _admin(settings) as admin:
        return await _Topics(admin, settings, changelog).ensure()


async def own_topics(settings: ClientSettings, names: Iterable[str], topics: Topics) -> dict[str, int]:
    """Check topics that belong to queues, which Marq never creates; return the number of partitions of each.

    Messages that the markers topic can't carry become dead letters, so a topic that accepts such messages is only
    reported.

    Raises BrokerUnavailable like :func:`ensure_topics`; ConfigError if a topic does not exist.
    """
    wanted = sorted(names)
    facts = await _facts(settings, wanted)
    for name in wanted:
        if name not in facts:
            raise ConfigError(_missing(name))
        room = room_for_markers(facts[name].limit_bytes)
        if room > topics.markers_limit_bytes:
            ours, kafka = settings.names, tools(settings)
            lines = [kafka.alter_topic(n, LIMIT, str(room)) for n in (ours.markers, ours.changelog, ours.dead_letters)]
            log.warning(
                "topic %s accepts %d bytes, but a marker of that size does not fit into %s: larger messages become dead"
                " letters. Raise %s of three topics, and start again:%s",
                name, facts[name].limit_bytes, ours.markers, LIMIT, "".join(f"\n    {line}" for line in lines),
            )  # fmt: skip
    return {name: facts[name].partitions for name in wanted}


async def missing_topics(settings: ClientSettings, own: Mapping[str, str]) -> dict[str, str]:
    """Return which of these queues have an own topic that does not exist, each with an error text.

    Raises BrokerUnavailable like :func:`ensure_topics`; Forbidden if the permission to describe a topic is missing.
    """
    facts = await _facts(settings, sorted(set(own.values())))
    return {queue: _missing(topic) for queue, topic in own.items() if topic not in facts}


def _missing(topic: str) -> str:
    return (
        f"topic {topic} does not exist, but a queue's settings name it: create it, or remove `topic` from those"
        " settings"
    )


async def topic_exists(settings: ClientSettings, topic: str) -> bool:
    """Return whether a topic exists.

    Raises BrokerUnavailable like :func:`ensure_topics`; ConfigError if the permission to describe it is missing.
    """
    return topic in await _facts(settings, [topic])


async def _facts(settings: ClientSettings, names: Collection[str]) -> dict[str, TopicFacts]:
    if not names:
        return {}
    async with _admin(settings) as admin:
        return await _Topics(admin, settings).describe(names)


async def topic_id(settings: ClientSettings, topic: str) -> str:
    """Return the id of a topic, which differs from that of any other topic, also of a deleted one of the same name.

    It is empty if the topic does not exist, or if the brokers have no such ids (before Kafka 2.8).

    Raises BrokerUnavailable like :func:`ensure_topics`.
    """
    async with _admin(settings) as admin:
        return (await ids_of(admin, [topic])).get(topic, "")


async def incarnations(settings: ClientSettings, topics: Iterable[str]) -> dict[str, str]:
    """Return the names of the present incarnations of topics (:func:`marq.wire.names.incarnation`).

    Those that do not exist, and all of brokers before Kafka 2.8, keep their names.

    Raises BrokerUnavailable like :func:`ensure_topics`.
    """
    wanted = sorted(set(topics))
    if not wanted:
        return {}
    async with _admin(settings) as admin:
        ids = await ids_of(admin, wanted)
    return {topic: incarnation(topic, ids.get(topic, "")) for topic in wanted}


async def ids_of(admin: AIOKafkaAdminClient, topics: Collection[str]) -> dict[str, str]:
    """Return the ids of those of the topics that exist; none if the brokers have no such ids. Raises KafkaError."""
    return await known_ids(admin._send_request, topics) if topics else {}


async def offset_snapshot_topic(settings: ClientSettings, *, make: bool) -> bool:
    """Return whether the topic of offset snapshots exists, which few namespaces need; with ``make``, create it.

    Raises BrokerUnavailable like :func:`ensure_topics`; ConfigError if a setting of the topic is wrong, or the
    permission to create it is missing.
    """
    async with _admin(settings) as admin:
        return await _Topics(admin, settings).ensure_offset_snapshots(make=make)


@asynccontextmanager
async def _admin(settings: ClientSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """Return a context with an admin client whose calls fail with our errors, within the connect timeout."""
    async with admin_client(settings, impatient=True) as admin:
        try:
            async with asyncio.timeout(settings.connect_timeout_ms / 1000):
                yield admin
        except TimeoutError:
            raise unavailable(settings, "it did not answer while topics were looked up or created") from None
        except KafkaError as error:
            cause = f"while topics were looked up or made: {error}"
            raise refused(settings, error) or unavailable(settings, cause) from error


class _Topics:
    def __init__(self, admin: AIOKafkaAdminClient, settings: ClientSettings, changelog: bool = False) -> None:
        self._admin = admin
        self._settings = settings
        self._changelog = changelog

    async def ensure(self) -> Topics:
        names = self._settings.names
        wanted = [names.messages, names.markers, names.dead_letters, names.quarantine, names.queues]
        wanted += [names.changelog] if self._changelog else []
        found = await self.describe(wanted)
        # One at a time: the settings of later topics depend on the first ones.
        for first in (names.messages, names.markers):
            if first not in found:
                missing = [name for name in wanted if name not in found]
                found |= await self._make([first], missing, found)
        missing = [name for name in wanted if name not in found]
        if missing:
            found |= await self._make(missing, missing, found)
        messages, markers = found[names.messages], found[names.markers]
        self._check_rules(found, messages.limit_bytes)
        for wrong in wrong_partitions(names, found):
            raise ConfigError(wrong)
        return Topics(messages.partitions, markers.partitions, messages.limit_bytes, markers.limit_bytes)

    async def ensure_offset_snapshots(self, *, make: bool) -> bool:
        name = self._settings.names.offset_snapshots
        found = await self.describe([name])
        if make and not found:
            found = await self._make([name], [name], {})
        self._check_rules(found, DEFAULT_LIMIT_BYTES)
        return bool(found)

    async def describe(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        look = await look_up(self._admin, names)
        if look.forbidden:
            raise missing_permissions(self._settings, look.forbidden)
        return look.found

    async def _make(
        self, names: Sequence[str], missing: Sequence[str], found: Mapping[str, TopicFacts]
    ) -> dict[str, TopicFacts]:
        """Create some of the missing topics; if that is forbidden, the error has commands for all of them."""
        made = planned(self._settings, found)
        copies = self._settings.replication_factor
        topics = [
            NewTopic(name, made[name].partitions, copies, topic_configs=dict(made[name].config)) for name in names
        ]
        response = await self._admin.create_topics(topics, timeout_ms=self._settings.connect_timeout_ms)
        for name, code, *text in response.topic_errors:
            error = for_code(code)
            if error in _FORBIDDEN:
                raise cannot_make(self._settings, [made[topic] for topic in missing], _said(error, text))
            if error is InvalidReplicationFactorError:
                raise ConfigError(
                    f"topic {name}: the cluster can't keep {copies} replicas ({_said(error, text)}): set"
                    " MARQ_REPLICATION_FACTOR to at most the number of brokers"
                )
            if code and error is not TopicAlreadyExistsError:
                raise error(f"topic {name} could not be created: {_said(error, text)}")
        return await self._await(names)

    async def _await(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        """Describe topics that were just created; for a moment a broker may not know them."""
        until = time.monotonic() + self._settings.connect_timeout_ms / 1000
        while True:
            found = await self.describe(names)
            missing = [name for name in names if name not in found]
            if not missing:
                return found
            if time.monotonic() > until:
                raise UnknownTopicOrPartitionError(f"{missing} did not appear after they were created")
            await asyncio.sleep(_PAUSE_S)

    def _check_rules(self, found: Mapping[str, TopicFacts], messages_limit_bytes: int) -> None:
        wanted = rules(self._settings.names, messages_limit_bytes, changelog=self._changelog)
        for broken in broken_rules(wanted, found):
            command = tools(self._settings).alter_topic(broken.rule.topic, broken.rule.setting, broken.rule.needed)
            raise ConfigError(f"{broken}. Change it with: {command}")


def planned(settings: ClientSettings, found: Mapping[str, TopicFacts]) -> dict[str, TopicPlan]:
    """Return how each topic would be created, given those that exist."""
    messages, markers = found.get(settings.names.messages), found.get(settings.names.markers)
    return plans(
        settings.names,
        DEFAULT_LIMIT_BYTES if messages is None else messages.limit_bytes,
        partitions=settings.partitions,
        markers_partitions=settings.markers_partitions if markers is None else markers.partitions,
        markers_retention_ms=settings.markers_retention_ms,
    )


def cannot_make(settings: ClientSettings, missing: Iterable[TopicPlan], said: str) -> Forbidden:
    """Return the error for missing topics that this client's principal may not create."""
    wanted = list(missing)
    return Forbidden(
        f"topics are missing at {settings.bootstrap_servers}, and {principal(settings)} may not make them ({said})."
        " An administrator makes them with:" + "".join(f"\n    {line}" for line in commands_to_make(settings, wanted))
    )


def commands_to_make(settings: ClientSettings, missing: Iterable[TopicPlan]) -> list[str]:
    """Return the commands that create topics as Marq would create them."""
    kafka, copies = tools(settings), settings.replication_factor
    return [kafka.create_topic(plan.name, plan.partitions, copies, plan.config) for plan in missing]


@dataclass(frozen=True)
class Look:
    """The topics that exist, and the permissions that were missing to see more."""

    found: dict[str, TopicFacts] = field(default_factory=dict)
    forbidden: list[Permission] = field(default_factory=list)


async def look_up(admin: AIOKafkaAdminClient, names: Iterable[str]) -> Look:
    """Describe topics without creating them, even if the broker creates topics that are asked for.

    Raises KafkaError if the broker did not answer, or with an error that is not about permissions.
    """
    look = Look()
    described = {topic["topic"]: topic for topic in await _metadata(admin, list(names))}
    there = []
    for name, topic in described.items():
        error = for_code(topic["error_code"])
        if error is TopicAuthorizationFailedError:
            # Without the first, it is unknown whether the second is missing, too.
            look.forbidden.extend(
                Permission(ResourceType.TOPIC, name, operation) for operation in ("Describe", "DescribeConfigs")
            )
        elif topic["error_code"] and error not in _UNKNOWN:
            raise error(f"topic {name}")
        elif topic["partitions"]:
            there.append(name)
    for name, code, config in await _configs(admin, there):
        error = for_code(code)
        if error is TopicAuthorizationFailedError:
            look.forbidden.append(Permission(ResourceType.TOPIC, name, "DescribeConfigs"))
        elif code and error not in _UNKNOWN:
            raise error(f"topic {name}")
        elif not code:
            partitions = described[name]["partitions"]
            look.found[name] = TopicFacts(
                len(partitions), config, min(len(partition["replicas"]) for partition in partitions)
            )
    return look


async def _metadata(admin: AIOKafkaAdminClient, names: list[str]) -> list[dict[str, Any]]:
    # admin.describe_topics would create the topics on a broker with auto.create.topics.enable, with wrong settings.
    request = MetadataRequest(names, allow_auto_topic_creation=False)
    topics: list[dict[str, Any]] = (await admin._send_request(request)).to_object()["topics"]
    return topics


async def _configs(admin: AIOKafkaAdminClient, names: list[str]) -> list[tuple[str, int, dict[str, str]]]:
    if not names:
        return []
    responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    return [
        (name, code, {entry[0]: entry[1] for entry in entries})
        for response in responses
        for code, _, _, name, entries in response.resources
    ]


def _said(error: type[KafkaError], text: Sequence[str | None]) -> str:
    return (text[0] if text else None) or error.__name__
