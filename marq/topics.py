"""Makes sure that an installation's topics exist and are set as the markers need them.

Clients call :func:`ensure_topics` at their start, and so does the Faust application. What is missing is created;
what is there is checked and never changed, for it may be somebody's decision: a wrong setting is a ConfigError that
says with which command to change it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from marq.connection import client_options, close_admin, started, unavailable
from marq.core.errors import ConfigError
from marq.core.names import ENVELOPE_ROOM_BYTES
from marq.settings import ClientSettings

_PAUSE_S = 0.05
_LIMIT = "max.message.bytes"
_APPENDED = "LogAppendTime"
#: A compacted changelog forgets a deletion after this long; older local files are not trusted (tables/leases.py).
CHANGELOG_DELETE_RETENTION_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Topics:
    """What clients must know of the topics: partition counts, and the largest record batch each accepts."""

    messages_partitions: int
    markers_partitions: int
    messages_limit_bytes: int
    markers_limit_bytes: int


@dataclass(frozen=True, slots=True)
class _Found:
    partitions: int
    config: Mapping[str, str]

    @property
    def limit_bytes(self) -> int:
        return int(self.config[_LIMIT])


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
        found = await _Topics(admin, settings, changelog=False)._describe(wanted)
    for name in wanted:
        if name not in found:
            raise ConfigError(
                f"topic {name} does not exist, but a queue's settings name it as the queue's own: create it, or take"
                f" `topic` out of the settings of that queue"
            )
        room = found[name].limit_bytes + ENVELOPE_ROOM_BYTES
        if room > topics.markers_limit_bytes:
            names_, servers = settings.names, settings.bootstrap_servers
            raise ConfigError(
                f"topic {name}: it accepts {found[name].limit_bytes} bytes, with which a marker does not fit into"
                f" {names_.markers}. Raise {_LIMIT} to {room} of {names_.markers}, {names_.changelog} and"
                f" {names_.dead_letters}: kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics"
                f" --entity-name {names_.markers} --add-config {_LIMIT}={room} (and so for the others)"
            )
    return {name: found[name].partitions for name in wanted}


@asynccontextmanager
async def _admin(settings: ClientSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client whose calls fail in our words, within the connect timeout."""
    admin = await started(lambda: AIOKafkaAdminClient(**client_options(settings)), settings, close_admin)
    try:
        async with asyncio.timeout(settings.connect_timeout_ms / 1000):
            yield admin
    except TimeoutError:
        raise unavailable(settings, "it did not answer while topics were looked up or made") from None
    except KafkaError as error:
        raise unavailable(settings, f"while topics were looked up or made: {error}") from error
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
        found = await self._describe(wanted)
        if names.messages not in found:
            await self._create({names.messages: (self._settings.partitions, {})})
            found |= await self._await([names.messages])
        room = found[names.messages].limit_bytes + ENVELOPE_ROOM_BYTES
        missing = [name for name in wanted if name not in found]
        if missing:
            plans = self._plans(room)
            await self._create({name: plans[name] for name in missing})
            found |= await self._await(missing)
        if self._changelog:
            found |= await self._ensure_changelog(found[names.markers].partitions, room)
        self._check(found, room)
        messages, markers = found[names.messages], found[names.markers]
        return Topics(messages.partitions, markers.partitions, messages.limit_bytes, markers.limit_bytes)

    async def _ensure_changelog(self, partitions: int, room: int) -> dict[str, _Found]:
        name = self._settings.names.changelog
        found = await self._describe([name])
        if not found:
            config = {
                _LIMIT: str(room),
                "cleanup.policy": "compact",
                "delete.retention.ms": str(CHANGELOG_DELETE_RETENTION_MS),
            }
            await self._create({name: (partitions, config)})
            found = await self._await([name])
        self._require(found, name, "cleanup.policy", "compact", lambda value: value == "compact")
        self._require(found, name, _LIMIT, str(room), lambda value: int(value) >= room)
        needed = str(CHANGELOG_DELETE_RETENTION_MS)
        self._require(
            found, name, "delete.retention.ms", needed, lambda value: int(value) >= CHANGELOG_DELETE_RETENTION_MS
        )
        if found[name].partitions != partitions:
            raise ConfigError(
                f"topic {name} has {found[name].partitions} partitions and {self._settings.names.markers} has "
                f"{partitions}: they must be equal. The count of the markers topic is fixed at its creation"
            )
        return found

    def _plans(self, room: int) -> dict[str, tuple[int, dict[str, str]]]:
        names, settings = self._settings.names, self._settings
        limit = {_LIMIT: str(room)}
        markers = {
            **limit,
            "message.timestamp.type": _APPENDED,
            "retention.ms": str(settings.markers_retention_ms),
        }
        # A client that was cut off from the broker for a weekend still learns which definitions were taken away.
        queues = {
            "cleanup.policy": "compact",
            "message.timestamp.type": _APPENDED,
            "delete.retention.ms": str(CHANGELOG_DELETE_RETENTION_MS),
        }
        # Dead letters stay until somebody looks at them; a record in quarantine comes with headers around it.
        return {
            names.markers: (settings.markers_partitions, markers),
            names.dead_letters: (settings.partitions, {**limit, "retention.ms": "-1"}),
            names.quarantine: (1, {_LIMIT: str(room + ENVELOPE_ROOM_BYTES)}),
            names.queues: (1, queues),
        }

    async def _create(self, plans: Mapping[str, tuple[int, dict[str, str]]]) -> None:
        replication = self._settings.replication_factor
        topics = [NewTopic(name, count, replication, topic_configs=dict(c)) for name, (count, c) in plans.items()]
        response = await self._admin.create_topics(topics, timeout_ms=self._settings.connect_timeout_ms)
        for name, code, *text in response.topic_errors:
            error = for_code(code)
            if code == 0 or error is TopicAlreadyExistsError:
                continue
            if error is InvalidReplicationFactorError:
                raise ConfigError(
                    f"topic {name}: the cluster can't keep {replication} copies"
                    f" ({text[0] if text else error.__name__}): set MARQ_REPLICATION_FACTOR to at most the number of"
                    " brokers"
                )
            raise error(f"topic {name} could not be created: {text[0] if text else error.__name__}")

    async def _await(self, names: list[str]) -> dict[str, _Found]:
        """Describe topics that were just made: for a moment a broker may not know them yet."""
        until = time.monotonic() + self._settings.connect_timeout_ms / 1000
        while True:
            found = await self._describe(names)
            missing = [name for name in names if name not in found]
            if not missing:
                return found
            if time.monotonic() > until:
                raise UnknownTopicOrPartitionError(f"{missing} did not appear after they were made")
            await asyncio.sleep(_PAUSE_S)

    async def _describe(self, names: list[str]) -> dict[str, _Found]:
        partitions = await self._partitions(names)
        if not partitions:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in partitions]
        responses = await self._admin.describe_configs(resources)
        return {
            name: _Found(partitions[name], {entry[0]: entry[1] for entry in entries})
            for response in responses
            for code, _, _, name, entries in response.resources
            if not _raise(code, name)
        }

    async def _partitions(self, names: list[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for topic in await self._admin.describe_topics(names):
            if not _raise(topic["error_code"], topic["topic"]):
                counts[topic["topic"]] = len(topic["partitions"])
        return {name: count for name, count in counts.items() if count}

    def _check(self, found: Mapping[str, _Found], room: int) -> None:
        names = self._settings.names
        for name in (names.messages, names.markers, names.dead_letters):
            self._require(found, name, "cleanup.policy", "delete", lambda value: value == "delete")
        self._require(found, names.queues, "cleanup.policy", "compact", lambda value: value == "compact")
        for name in (names.markers, names.queues):
            self._require(found, name, "message.timestamp.type", _APPENDED, lambda value: value == _APPENDED)
        for name in (names.markers, names.dead_letters):
            self._require(found, name, _LIMIT, str(room), lambda value: int(value) >= room)
        if found[names.queues].partitions != 1:
            raise ConfigError(
                f"topic {names.queues} has {found[names.queues].partitions} partitions, but marq needs 1: definitions "
                "of queues count in the order in which they were written. Delete the topic and start again: it is made "
                "anew, workers write their queues.toml into it, and only changes made at run time must be made again"
            )

    def _require(
        self, found: Mapping[str, _Found], topic: str, setting: str, needed: str, fits: Callable[[str], bool]
    ) -> None:
        value = found[topic].config.get(setting, "")
        if not fits(value):
            raise ConfigError(
                f"topic {topic}: {setting} is {value}, but marq needs {needed}. Change it with: kafka-configs.sh"
                f" --bootstrap-server {self._settings.bootstrap_servers} --alter --entity-type topics"
                f" --entity-name {topic} --add-config {setting}={needed}"
            )


def _raise(code: int, topic: str) -> bool:
    """Whether a topic is unknown; raises for every other error."""
    error: Any = for_code(code)
    if error is UnknownTopicOrPartitionError or getattr(error, "__name__", "") == "LeaderNotAvailableError":
        return True
    if code:
        raise error(f"topic {topic}")
    return False
