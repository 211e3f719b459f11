"""Makes sure that an installation's topics exist and are set as the markers need them.

Clients call :func:`ensure_topics` at their start, and so does the Faust application. What is missing is created;
what is there is checked and never changed, for it may be somebody's decision: a wrong setting is a ConfigError that
says with which command to change it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
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

from marq.connection import client_options, close_admin, started, unavailable
from marq.core.errors import ConfigError, Forbidden
from marq.core.rights import Kind, Right
from marq.core.topic_rules import (
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
from marq.rights import missing_rights, principal, refused, tools
from marq.settings import ClientSettings

_PAUSE_S = 0.05
_UNKNOWN = (UnknownTopicOrPartitionError, LeaderNotAvailableError)
#: Answers to a creation that is not allowed: by ACLs, or by a policy of the broker's owner.
_FORBIDDEN = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError, PolicyViolationError)


@dataclass(frozen=True, slots=True)
class Topics:
    """What clients must know of the topics: partition counts, and the largest record batch each accepts."""

    messages_partitions: int
    markers_partitions: int
    messages_limit_bytes: int
    markers_limit_bytes: int


async def ensure_topics(settings: ClientSettings, *, changelog: bool = False) -> Topics:
    """Create the topics that are missing and check those that are there; several callers at once do no harm.

    ``changelog``: the lease table's too, which only trackers need.

    Raises:
        BrokerUnavailable: no broker answered within the connect timeout, or it refused.
        ConfigError: a topic's setting is wrong.
    """
    async with _admin(settings) as admin:
        return await _Topics(admin, settings, changelog).ensure()


async def own_topics(settings: ClientSettings, names: Iterable[str], topics: Topics) -> dict[str, int]:
    """Check topics that queues have of their own, which are never made here; return how many partitions each has.

    Raises:
        BrokerUnavailable: no broker answered within the connect timeout, or it refused.
        ConfigError: a topic does not exist, or accepts larger messages than the markers topic can carry.
    """
    wanted = sorted(names)
    if not wanted:
        return {}
    async with _admin(settings) as admin:
        found = await _Topics(admin, settings, changelog=False).describe(wanted)
    for name in wanted:
        if name not in found:
            raise ConfigError(
                f"topic {name} does not exist, but a queue's settings name it as the queue's own: create it, or take"
                f" `topic` out of the settings of that queue"
            )
        room = room_for_markers(found[name].limit_bytes)
        if room > topics.markers_limit_bytes:
            ours, kafka = settings.names, tools(settings)
            lines = [kafka.alter_topic(n, LIMIT, str(room)) for n in (ours.markers, ours.changelog, ours.dead_letters)]
            raise ConfigError(
                f"topic {name}: it accepts {found[name].limit_bytes} bytes, with which a marker does not fit into"
                f" {ours.markers}. Raise {LIMIT} of three topics:" + "".join(f"\n    {line}" for line in lines)
            )
    return {name: found[name].partitions for name in wanted}


async def roster_topic(settings: ClientSettings, *, make: bool) -> bool:
    """Return whether the rosters' topic is there, which most installations never need; with ``make`` it is, then.

    Raises:
        BrokerUnavailable: no broker answered within the connect timeout, or it refused.
        ConfigError: a setting of the topic is wrong, or it may not be made.
    """
    async with _admin(settings) as admin:
        return await _Topics(admin, settings, changelog=False).ensure_rosters(make=make)


@asynccontextmanager
async def _admin(settings: ClientSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client whose calls fail in our words, within the connect timeout."""
    admin = await started(
        lambda: AIOKafkaAdminClient(**client_options(settings)), settings, close_admin, impatient=True
    )
    try:
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            yield admin
    except TimeoutError:
        raise unavailable(settings, "it did not answer while topics were looked up or made") from None
    except KafkaError as error:
        cause = f"while topics were looked up or made: {error}"
        raise refused(settings, error) or unavailable(settings, cause) from error
    finally:
        await close_admin(admin)


class _Topics:
    def __init__(self, admin: AIOKafkaAdminClient, settings: ClientSettings, changelog: bool) -> None:
        self._admin = admin
        self._settings = settings
        self._changelog = changelog

    async def ensure(self) -> Topics:
        names = self._settings.names
        wanted = [names.messages, names.markers, names.dead_letters, names.quarantine, names.queues]
        wanted += [names.changelog] if self._changelog else []
        found = await self.describe(wanted)
        # One after the other: how the next are made depends on the first.
        for first in (names.messages, names.markers):
            if first not in found:
                missing = [name for name in wanted if name not in found]
                found |= await self._make([first], missing, found)
        missing = [name for name in wanted if name not in found]
        if missing:
            found |= await self._make(missing, missing, found)
        self._check(found)
        messages, markers = found[names.messages], found[names.markers]
        return Topics(messages.partitions, markers.partitions, messages.limit_bytes, markers.limit_bytes)

    async def ensure_rosters(self, *, make: bool) -> bool:
        name = self._settings.names.rosters
        found = await self.describe([name])
        if make and not found:
            found = await self._make([name], [name], {})
        self._check_rules(found, DEFAULT_LIMIT_BYTES)
        return bool(found)

    async def describe(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        look = await look_up(self._admin, names)
        if look.forbidden:
            raise missing_rights(self._settings, look.forbidden)
        return look.found

    async def _make(
        self, names: Sequence[str], missing: Sequence[str], found: Mapping[str, TopicFacts]
    ) -> dict[str, TopicFacts]:
        """Create some of the missing topics; where that is forbidden, the error says how to make all of them."""
        made = planned(self._settings, found)
        copies = self._settings.replication_factor
        topics = [
            NewTopic(name, made[name].partitions, copies, topic_configs=dict(made[name].config)) for name in names
        ]
        response = await self._admin.create_topics(topics, timeout_ms=self._settings.connect_timeout_ms)
        for name, code, *text in response.topic_errors:
            error = for_code(code)
            if error in _FORBIDDEN:
                raise cannot_make(self._settings, [made[each] for each in missing], _said(error, text))
            if error is InvalidReplicationFactorError:
                raise ConfigError(
                    f"topic {name}: the cluster can't keep {copies} copies ({_said(error, text)}): set"
                    " MARQ_REPLICATION_FACTOR to at most the number of brokers"
                )
            if code and error is not TopicAlreadyExistsError:
                raise error(f"topic {name} could not be created: {_said(error, text)}")
        return await self._await(names)

    async def _await(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        """Describe topics that were just made: for a moment a broker may not know them yet."""
        until = time.monotonic() + self._settings.connect_timeout_ms / 1000
        while True:
            found = await self.describe(names)
            missing = [name for name in names if name not in found]
            if not missing:
                return found
            if time.monotonic() > until:
                raise UnknownTopicOrPartitionError(f"{missing} did not appear after they were made")
            await asyncio.sleep(_PAUSE_S)

    def _check(self, found: Mapping[str, TopicFacts]) -> None:
        names = self._settings.names
        self._check_rules(found, found[names.messages].limit_bytes)
        for wrong in wrong_partitions(names, found):
            raise ConfigError(wrong)

    def _check_rules(self, found: Mapping[str, TopicFacts], messages_limit_bytes: int) -> None:
        wanted = rules(self._settings.names, messages_limit_bytes, changelog=self._changelog)
        for broken in broken_rules(wanted, found):
            command = tools(self._settings).alter_topic(broken.rule.topic, broken.rule.setting, broken.rule.needed)
            raise ConfigError(f"{broken}. Change it with: {command}")


def planned(settings: ClientSettings, found: Mapping[str, TopicFacts]) -> dict[str, TopicPlan]:
    """Return how each topic would be made, beside those that are there."""
    messages, markers = found.get(settings.names.messages), found.get(settings.names.markers)
    return plans(
        settings.names,
        DEFAULT_LIMIT_BYTES if messages is None else messages.limit_bytes,
        partitions=settings.partitions,
        markers_partitions=settings.markers_partitions if markers is None else markers.partitions,
        markers_retention_ms=settings.markers_retention_ms,
    )


def cannot_make(settings: ClientSettings, missing: Iterable[TopicPlan], said: str) -> Forbidden:
    """Return the error for topics that are missing and that this client's principal may not make."""
    wanted = list(missing)
    return Forbidden(
        f"topics are missing at {settings.bootstrap_servers}, and {principal(settings)} may not make them ({said})."
        " An administrator makes them with:" + "".join(f"\n    {line}" for line in commands_to_make(settings, wanted))
    )


def commands_to_make(settings: ClientSettings, missing: Iterable[TopicPlan]) -> list[str]:
    """Return the commands that make topics as we would make them."""
    kafka, copies = tools(settings), settings.replication_factor
    return [kafka.create_topic(plan.name, plan.partitions, copies, plan.config) for plan in missing]


@dataclass(frozen=True)
class Look:
    """What could be learned of topics: those that are there, and the rights that were missing to learn more."""

    found: dict[str, TopicFacts] = field(default_factory=dict)
    forbidden: list[Right] = field(default_factory=list)


async def look_up(admin: AIOKafkaAdminClient, names: Iterable[str]) -> Look:
    """Describe topics without making them, whatever the broker does by itself for those that are asked for.

    Raises:
        KafkaError: the broker did not answer, or with an error that is no matter of rights.
    """
    look = Look()
    described = {topic["topic"]: topic for topic in await _metadata(admin, list(names))}
    there = []
    for name, topic in described.items():
        error = for_code(topic["error_code"])
        if error is TopicAuthorizationFailedError:
            # Whether the second is missing, too, can't be seen without the first.
            look.forbidden.extend(Right(Kind.TOPIC, name, operation) for operation in ("Describe", "DescribeConfigs"))
        elif topic["error_code"] and error not in _UNKNOWN:
            raise error(f"topic {name}")
        elif topic["partitions"]:
            there.append(name)
    for name, code, config in await _configs(admin, there):
        error = for_code(code)
        if error is TopicAuthorizationFailedError:
            look.forbidden.append(Right(Kind.TOPIC, name, "DescribeConfigs"))
        elif code and error not in _UNKNOWN:
            raise error(f"topic {name}")
        elif not code:
            partitions = described[name]["partitions"]
            look.found[name] = TopicFacts(len(partitions), config, min(len(each["replicas"]) for each in partitions))
    return look


async def _metadata(admin: AIOKafkaAdminClient, names: list[str]) -> list[dict[str, Any]]:
    # Not admin.describe_topics: on a broker with auto.create.topics.enable that makes the topics, as markers must not
    # be made.
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
