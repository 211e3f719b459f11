"""The permissions of the principal in use, by role."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from marq.kafka.role_permissions import ROLES, Permission, ResourceType, grants, principal, tools, worker
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.names import Names
from marq_worker.config.settings import AppSettings, Role
from marq_worker.findings import CheckFinding, fine, problem

#: The role that runs trackers and handlers.
WORKER = "worker"
#: Bits of the allowed operations, by their numbers in Kafka's protocol.
_OPERATIONS = {3: "Read", 4: "Write", 5: "Create", 8: "Describe", 10: "DescribeConfigs"}
#: The bits of a broker that does not report permissions.
UNKNOWN = -(2**31)
#: The allowed operations on topics or groups, by name; None if unknown.
Operations = dict[str, frozenset[str] | None]


def operations(bits: int) -> frozenset[str] | None:
    """Return the operations of a broker's answer, None if it does not report them."""
    if bits == UNKNOWN:
        return None
    return frozenset(name for bit, name in _OPERATIONS.items() if bits >> bit & 1)


@dataclass(frozen=True)
class Allowed:
    """Permissions on topics and groups, as far as known, and on transactional ids by their prefix."""

    topics: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    groups: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    transactional_ids: Mapping[str, bool | None] = field(default_factory=dict)

    def lacks(self, wanted: Permission, every: Collection[str]) -> bool:
        """Return whether a permission is known to be missing.

        Every group in ``every`` must have a prefixed permission. Among other groups, one that has it is enough, because
        services may be granted theirs group by group.
        """
        if wanted.kind is ResourceType.TRANSACTIONAL_ID:
            return self.transactional_ids.get(wanted.name) is False
        if wanted.kind is ResourceType.TOPIC:
            allowed = self.topics.get(wanted.name)
            return allowed is not None and wanted.operation not in allowed
        known = {
            name: wanted.operation in allowed
            for name, allowed in self.groups.items()
            if allowed is not None and (name.startswith(wanted.name) if wanted.prefixed else name == wanted.name)
        }
        if known.keys() & every:
            return not all(known[name] for name in known.keys() & every)
        return bool(known) and not any(known.values())


@dataclass(frozen=True, slots=True)
class Use:
    """What a worker uses, and the queues' own topics."""

    own_topics: Collection[str] = ()
    tracker: bool = True
    backlog: bool = True
    handlers: bool = False
    handled_topics: Collection[str] = ()
    #: Groups whose queues have handlers, by their Kafka names.
    handled_groups: Collection[str] = ()
    #: A queue with a handler is transactional.
    transactional: bool = False
    #: Clients of SQS may use any queue.
    sqs: bool = False
    #: A queue sets `partitions`, so trackers must know the positions of groups.
    limited_partitions: bool = False

    @classmethod
    def of(cls, definitions: Definitions, names: Names, settings: AppSettings) -> Use:
        """Return the use of a worker with these settings and definitions."""
        roles = settings.roles
        queues = {queue: definitions.settings(queue) for queue in definitions.names()}
        handled = {
            queue: queue_settings
            for queue, queue_settings in queues.items()
            if queue_settings.handler and Role.HANDLERS in roles
        }
        return cls(
            own_topics=[queue_settings.topic for queue_settings in queues.values() if queue_settings.topic is not None],
            tracker=Role.TRACKER in roles,
            backlog=settings.count_waiting,
            handlers=bool(handled),
            sqs=Role.SQS in roles,
            limited_partitions=any(queue_settings.partitions is not None for queue_settings in queues.values()),
            transactional=any(queue_settings.transactional for queue_settings in handled.values()),
            handled_topics=[
                queue_settings.topic for queue_settings in handled.values() if queue_settings.topic is not None
            ],
            handled_groups=sorted({names.named_group(definitions.group(queue) or "") for queue in handled}),
        )


def missing(client: ClientSettings, role: str, use: Use, allowed: Allowed) -> list[Permission]:
    """Return the permissions that a role needs and the principal lacks."""
    if role == WORKER:
        needed = worker(
            client.names,
            use.own_topics,
            tracker=use.tracker,
            backlog=use.backlog,
            handlers=use.handlers or (use.tracker and use.limited_partitions),
            handled_topics=use.handled_topics,
            transactional=use.transactional,
            sqs=use.sqs,
        )
        return [permission for permission in needed if allowed.lacks(permission, use.handled_groups)]
    # A service need not use all queues: a queue's own topic counts if anything is allowed on it.
    topics = [topic for topic in use.own_topics if allowed.topics.get(topic) != frozenset()]
    return [permission for permission in ROLES[role](client.names, topics) if allowed.lacks(permission, ())]


def judge_permissions(client: ClientSettings, roles: Iterable[str], use: Use, allowed: Allowed) -> list[CheckFinding]:
    """Judge the permissions for these roles; for other roles only report that they suffice."""
    asked, user = list(roles), principal(client)
    lacking = {role: missing(client, role, use, allowed) for role in ROLES}
    findings = [
        problem(
            f"permissions as {role}",
            f"{user} lacks {', '.join(map(str, sorted(set(lacking[role]))))}",
            advice="an administrator grants exactly these with",
            commands=grants(lacking[role], user, tools(client)),
        )
        for role in asked
        if lacking[role]
    ]
    enough = [role for role, denied in lacking.items() if not denied]
    if enough:
        unseen = [topic for topic, operations in allowed.topics.items() if operations is None]
        limits = f", as far as can be seen without {', '.join(unseen)}" if unseen else ""
        findings.append(fine("permissions", f"{user} has all permissions that a {' or a '.join(enough)} needs{limits}"))
    return findings
