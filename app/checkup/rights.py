"""The rights of the principal in use, by role."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from app.checkup.findings import Finding, fine, problem
from config.settings import AppSettings, Role
from marq.core.definitions import Definitions
from marq.core.names import Names
from marq.core.rights import ROLES, Kind, Right, grants, worker
from marq.rights import principal, tools
from marq.settings import ClientSettings

#: The role of those who may be asked for that runs trackers and handlers.
WORKER = "worker"
#: Bits of the operations that a broker says are allowed, by their numbers in Kafka's protocol.
_OPERATIONS = {3: "Read", 4: "Write", 5: "Create", 8: "Describe", 10: "DescribeConfigs"}
#: What a broker says that does not tell.
UNKNOWN = -(2**31)


def operations(bits: int) -> frozenset[str] | None:
    """Return the operations that a broker's answer stands for, None when it does not tell."""
    if bits == UNKNOWN:
        return None
    return frozenset(name for bit, name in _OPERATIONS.items() if bits >> bit & 1)


@dataclass(frozen=True)
class Allowed:
    """What is allowed on each topic and group, as far as it is known, and on transactional ids by their beginning."""

    topics: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    groups: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    transactional_ids: Mapping[str, bool | None] = field(default_factory=dict)

    def lacks(self, right: Right, every: Collection[str]) -> bool:
        """Whether a right is known to be missing; ``every``: groups that all need the one that goes by prefix.

        Of other groups one with the right is enough: services may have theirs one by one.
        """
        if right.kind is Kind.TRANSACTIONAL_ID:
            return self.transactional_ids.get(right.name) is False
        if right.kind is Kind.TOPIC:
            allowed = self.topics.get(right.name)
            return allowed is not None and right.operation not in allowed
        known = {
            name: right.operation in allowed
            for name, allowed in self.groups.items()
            if allowed is not None and (name.startswith(right.name) if right.prefixed else name == right.name)
        }
        if known.keys() & every:
            return not all(known[name] for name in known.keys() & every)
        return bool(known) and not any(known.values())


@dataclass(frozen=True, slots=True)
class Use:
    """What a worker does with the installation, and what topics there are beside the installation's own."""

    own_topics: Collection[str] = ()
    tracker: bool = True
    census: bool = True
    handlers: bool = False
    handled_topics: Collection[str] = ()
    #: Groups whose queues have handlers, by their Kafka names.
    handled_groups: Collection[str] = ()
    #: Whether some queue lives on few partitions, so that a tracker has to know how far groups have read.
    spread: bool = False

    @classmethod
    def of(cls, definitions: Definitions, names: Names, settings: AppSettings) -> Use:
        """Return that of a worker with these settings, when these are the definitions."""
        roles = settings.roles
        queues = {queue: definitions.settings(queue) for queue in definitions.names()}
        handled = {queue: each for queue, each in queues.items() if each.handler and Role.HANDLERS in roles}
        return cls(
            own_topics=[each.topic for each in queues.values() if each.topic is not None],
            tracker=Role.TRACKER in roles,
            census=settings.census,
            handlers=bool(handled),
            spread=any(each.spread is not None for each in queues.values()),
            handled_topics=[each.topic for each in handled.values() if each.topic is not None],
            handled_groups=sorted({names.named_group(definitions.group(queue) or "") for queue in handled}),
        )


def missing(client: ClientSettings, role: str, use: Use, allowed: Allowed) -> list[Right]:
    """Return the rights that a role needs and the principal lacks."""
    if role == WORKER:
        needed = worker(
            client.names,
            use.own_topics,
            tracker=use.tracker,
            census=use.census,
            handlers=use.handlers or (use.tracker and use.spread),
            handled_topics=use.handled_topics,
        )
        return [right for right in needed if allowed.lacks(right, use.handled_groups)]
    # A service need not have all queues: their own topics count if anything is allowed there.
    topics = [topic for topic in use.own_topics if allowed.topics.get(topic) != frozenset()]
    return [right for right in ROLES[role](client.names, topics) if allowed.lacks(right, ())]


def judge_rights(client: ClientSettings, roles: Iterable[str], use: Use, allowed: Allowed) -> list[Finding]:
    """Judge whether the principal may do what these roles need; of the others it is only said."""
    asked, who = list(roles), principal(client)
    lacking = {role: missing(client, role, use, allowed) for role in ROLES}
    findings = [
        problem(
            f"rights as {role}",
            f"{who} lacks {', '.join(map(str, sorted(set(lacking[role]))))}",
            advice="an administrator grants exactly these with",
            commands=grants(lacking[role], who, tools(client)),
        )
        for role in asked
        if lacking[role]
    ]
    enough = [role for role, rights in lacking.items() if not rights]
    if enough:
        unseen = [topic for topic, operations in allowed.topics.items() if operations is None]
        limits = f", as far as can be seen without {', '.join(unseen)}" if unseen else ""
        findings.append(fine("rights", f"{who} may do all that a {' or a '.join(enough)} needs{limits}"))
    return findings
