"""Permissions on a cluster with ACLs: those that each role needs, commands that grant them, errors for missing ones.

Read and Write include Describe, as in Kafka's authorizer. Groups and transactional ids are granted by prefix, because
they come and go with queues and partitions.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from marq.settings.client import ClientSettings
from marq.wire.errors import Forbidden
from marq.wire.names import Names

#: The file with an administrator's login, for clusters that need one.
COMMAND_CONFIG = "admin.properties"


class ResourceType(StrEnum):
    """The resource of a permission; the values are the options of kafka-acls.sh."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, order=True)
class Permission:
    """One operation on one resource, or with ``prefixed`` on all resources whose names begin with ``name``."""

    kind: ResourceType
    name: str
    operation: str
    prefixed: bool = False

    def __str__(self) -> str:
        of = "" if self.kind is ResourceType.CLUSTER else f" {self.name}{'*' if self.prefixed else ''}"
        return f"{self.operation} on {self.kind}{of}"


# --- roles ------------------------------------------------------------------------------------------------------------


def sender(names: Names, own_topics: Iterable[str] = ()) -> list[Permission]:
    """Return the permissions of a service that only sends; ``own_topics`` are those of its queues."""
    return [*_every_role(names, own_topics), *_topics("Write", [names.messages, *own_topics])]


def consumer(names: Names, own_topics: Iterable[str] = ()) -> list[Permission]:
    """Return the permissions of a service that consumes, for all queues without handlers."""
    return [
        *_every_role(names, own_topics),
        *_topics("Read", [names.messages, *own_topics]),
        *_topics("Write", [names.markers]),
        *_groups("Read", names.group(""), names.named_group("")),
        # Only to warn when no tracker runs.
        Permission(ResourceType.GROUP, names.app_id, "Describe"),
    ]


def transactional_consumer(names: Names, own_topics: Iterable[str] = ()) -> list[Permission]:
    """Return the permissions of a service that consumes with ``transactional=True``."""
    return [
        *consumer(names, own_topics),
        Permission(ResourceType.TRANSACTIONAL_ID, names.start_ids, "Write", prefixed=True),
    ]


def delayer(names: Names, own_topics: Iterable[str] = ()) -> list[Permission]:
    """Return the permissions of a service that sends, delays, cancels and reschedules messages."""
    return [*sender(names, own_topics), *_topics("Write", [names.markers]), *_topics("Read", [names.markers])]


def redriver(names: Names, own_topics: Iterable[str] = ()) -> list[Permission]:
    """Return the permissions to read, redrive and delete dead letters."""
    return [*_every_role(names, ()), *_topics("Read", [names.dead_letters]), *_topics("Write", [names.markers])]


def worker(
    names: Names,
    own_topics: Iterable[str] = (),
    *,
    tracker: bool = True,
    backlog: bool = True,
    handlers: bool = True,
    handled_topics: Iterable[str] = (),
    transactional: bool = False,
    sqs: bool = False,
) -> list[Permission]:
    """Return the permissions of a worker by its roles; ``handled_topics`` belong to queues with handlers.

    ``backlog``: as a tracker it counts waiting messages. ``transactional``: some handlers' queues are transactional.
    ``sqs``: clients of SQS send, receive and delay through it.
    """
    permissions = _every_role(names, handled_topics if handlers else ()) + _topics("Write", [names.queues])
    if tracker:
        permissions += [
            # ACQUIREs leave payloads in the records of messages.
            *_topics("Read", [names.markers, names.changelog, names.messages, *own_topics]),
            *_topics("Write", [names.markers, names.changelog]),
            *_topics("Write", [names.messages, names.dead_letters, names.quarantine]),
            # Faust asks for the changelog's creation at every start, although it exists.
            *(
                Permission(ResourceType.TOPIC, names.changelog, operation)
                for operation in ("Create", "DescribeConfigs")
            ),
            Permission(ResourceType.GROUP, names.app_id, "Read"),
            Permission(ResourceType.TRANSACTIONAL_ID, names.transactional_ids, "Write", prefixed=True),
        ]
    if tracker and backlog:
        permissions.append(Permission(ResourceType.GROUP, names.backlog, "Read"))
    if handlers:
        permissions += [
            *_topics("Read", [names.messages, *handled_topics]),
            *_topics("Write", [names.markers]),
            *_groups("Read", names.named_group("")),
            # To resume from the positions of consumers when one of their queues gets a handler.
            *_groups("Describe", names.group("")),
        ]
    if handlers and transactional:
        permissions.append(Permission(ResourceType.TRANSACTIONAL_ID, names.start_ids, "Write", prefixed=True))
    if sqs:
        permissions += [*transactional_consumer(names, own_topics), *delayer(names, own_topics)]
    return permissions


#: By name; each takes the namespace's names and the topics that belong to queues.
ROLES: Mapping[str, Callable[[Names, Iterable[str]], list[Permission]]] = {
    "worker": worker,
    "consumer": consumer,
    "transactional-consumer": transactional_consumer,
    "sender": sender,
    "delayer": delayer,
    "redriver": redriver,
}


def _every_role(names: Names, own_topics: Iterable[str]) -> list[Permission]:
    topics = [names.messages, names.markers, names.dead_letters, names.quarantine, names.queues, *own_topics]
    return [*_topics("Describe", topics), *_topics("DescribeConfigs", topics), *_topics("Read", [names.queues])]


def _topics(operation: str, names: Iterable[str]) -> list[Permission]:
    return [Permission(ResourceType.TOPIC, name, operation) for name in names]


def _groups(operation: str, *prefixes: str) -> list[Permission]:
    return [Permission(ResourceType.GROUP, prefix, operation, prefixed=True) for prefix in prefixes]


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tools:
    """Command lines of Kafka's scripts; ``secured`` if the cluster at ``servers`` needs a login or TLS."""

    servers: str
    secured: bool = False

    def create_topic(self, name: str, partitions: int, replicas: int, config: Mapping[str, str]) -> str:
        settings = [part for setting, value in config.items() for part in ("--config", f"{setting}={value}")]
        size = ["--partitions", str(partitions), "--replication-factor", str(replicas)]
        return self._line("kafka-topics.sh", "--create", "--topic", name, *size, *settings)

    def alter_topic(self, name: str, setting: str, value: str) -> str:
        what = ["--entity-type", "topics", "--entity-name", name]
        return self._line("kafka-configs.sh", "--alter", *what, "--add-config", f"{setting}={value}")

    def add_partitions(self, name: str, partitions: int) -> str:
        return self._line("kafka-topics.sh", "--alter", "--topic", name, "--partitions", str(partitions))

    def allow(self, principal: str, operations: Sequence[str], resource: Sequence[str], *, prefixed: bool) -> str:
        """Return the command that allows operations; ``resource`` is, for example, ("--topic", "marq.messages")."""
        allowed = [part for operation in operations for part in ("--operation", operation)]
        pattern = ["--resource-pattern-type", "prefixed"] if prefixed else []
        return self._line("kafka-acls.sh", "--add", "--allow-principal", principal, *allowed, *resource, *pattern)

    def _line(self, tool: str, *options: str) -> str:
        login = ["--command-config", COMMAND_CONFIG] if self.secured else []
        return shlex.join([tool, "--bootstrap-server", self.servers, *login, *options])


def grants(permissions: Iterable[Permission], principal: str, tools: Tools) -> list[str]:
    """Return the fewest commands that grant exactly these permissions."""
    by_resource: dict[tuple[ResourceType, str, bool], set[str]] = {}
    for permission in permissions:
        resource = (permission.kind, permission.name, permission.prefixed)
        by_resource.setdefault(resource, set()).add(permission.operation)
    alike: dict[tuple[ResourceType, bool, tuple[str, ...]], list[str]] = {}
    for (kind, name, prefixed), operations in by_resource.items():
        if operations & {"Read", "Write"}:
            operations.discard("Describe")
        alike.setdefault((kind, prefixed, tuple(sorted(operations))), []).append(name)
    return [
        tools.allow(
            principal,
            operations,
            ["--cluster"] if kind is ResourceType.CLUSTER else [part for name in names for part in (f"--{kind}", name)],
            prefixed=prefixed,
        )
        for (kind, prefixed, operations), names in alike.items()
    ]


# --- refusals ---------------------------------------------------------------------------------------------------------


def principal(settings: ClientSettings) -> str:
    """Return our principal according to the settings; with a certificate or a token the broker may use another."""
    unknown = "ANONYMOUS" if settings.sasl_token_provider is None else "PRINCIPAL"
    return f"User:{settings.sasl_username or unknown}"


def tools(settings: ClientSettings) -> Tools:
    """Return how an administrator's commands reach the same cluster."""
    return Tools(settings.bootstrap_servers, settings.security_protocol != "PLAINTEXT")


def missing_permissions(settings: ClientSettings, permissions: Iterable[Permission]) -> Forbidden:
    """Return the error for permissions that this client's principal does not have."""
    missing = sorted(set(permissions))
    lines = "".join(f"\n    {line}" for line in grants(missing, principal(settings), tools(settings)))
    return Forbidden(
        f"{principal(settings)} lacks permission for {', '.join(map(str, missing))} at {settings.bootstrap_servers}. An"
        f" administrator grants it with:{lines}\n(`marq check` finds all that is missing)"
    )


def refused(
    settings: ClientSettings, error: BaseException, operation: str = "Describe", topic: str | None = None
) -> Forbidden | None:
    """Return the error for a missing permission, None for any other; we tried ``operation`` on ``topic``."""
    names, subject = settings.names, _subject(error)
    if isinstance(error, GroupAuthorizationFailedError):
        permission = Permission(ResourceType.GROUP, subject or names.named_group(""), "Read", prefixed=not subject)
    elif isinstance(error, TransactionalIdAuthorizationFailed):
        ids = names.start_ids if subject.startswith(names.start_ids) else names.transactional_ids
        permission = Permission(ResourceType.TRANSACTIONAL_ID, ids, "Write", prefixed=True)
    elif isinstance(error, TopicAuthorizationFailedError):
        permission = Permission(ResourceType.TOPIC, topic or subject or names.messages, operation)
    elif isinstance(error, ClusterAuthorizationFailedError) and topic:
        # An idempotent producer may start if it may write to any topic.
        permission = Permission(ResourceType.TOPIC, topic, "Write")
    elif isinstance(error, ClusterAuthorizationFailedError):
        # Brokers before 2.8 always ask for this one.
        permission = Permission(ResourceType.CLUSTER, "kafka-cluster", "IdempotentWrite")
    else:
        return None
    return missing_permissions(settings, [permission])


def _subject(error: BaseException) -> str:
    """Return the name of the forbidden resource in aiokafka's error: of several the first, "" for none."""
    subject = error.args[0] if error.args else ""
    if isinstance(subject, set | frozenset | list | tuple):
        subject = next(iter(sorted(subject)), "")
    return subject if isinstance(subject, str) else ""
