"""The topics of the namespace: existing or to be created, and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from marq.kafka.role_permissions import principal, tools
from marq.kafka.topics import commands_to_make, planned
from marq.settings.client import ClientSettings
from marq.settings.topic_configs import FOR_EVER, RETENTION, Rule, TopicFacts, broken_rules, rules, wrong_partitions
from marq.wire.names import Names
from marq_worker.findings import CheckFinding, fine, problem, warning

MIN_IN_SYNC = "min.insync.replicas"
RETENTION_BYTES = "retention.bytes"
_ONE_REPLICA = "with one replica, a broker's downtime stops its partitions, and a failed disk loses messages"


def topics_of(names: Names, *, changelog: bool) -> list[str]:
    """Return the topics of a namespace; ``changelog``: with that of the lease table."""
    shared = [names.messages, names.markers, names.dead_letters, names.quarantine, names.queues]
    return [*shared, *([names.changelog] if changelog else [])]


def judge_missing(
    client: ClientSettings,
    found: Mapping[str, TopicFacts],
    refusals: Mapping[str, str],
    brokers: int,
    *,
    too_many_replicas: bool = False,
) -> Iterator[CheckFinding]:
    """Judge missing topics; ``refusals``: why each could not be created, "" if it could."""
    plans = planned(client, found)
    listed = ", ".join(refusals)
    if not listed:
        return
    forbidden = sorted({refusal for refusal in refusals.values() if refusal})
    if forbidden:
        yield problem(
            "topics",
            f"missing: {listed}; {principal(client)} can't create them ({'; '.join(forbidden)})",
            advice="an administrator creates them with",
            commands=commands_to_make(client, [plans[name] for name in refusals]),
        )
    else:
        yield warning("topics", f"missing: {listed}", advice="the first worker or client that starts creates them")
    replicas = client.replication_factor
    if too_many_replicas:
        yield problem(
            "topics",
            f"they would be created with {replicas} replicas (MARQ_REPLICATION_FACTOR), more than there are brokers",
            expected=f"at most {brokers}",
            advice=f"set MARQ_REPLICATION_FACTOR={brokers}, or add brokers",
        )
    elif brokers > 1 and replicas == 1:
        yield warning(
            "topics",
            f"they would be created with one replica (MARQ_REPLICATION_FACTOR=1), on {brokers} brokers",
            advice=f"set MARQ_REPLICATION_FACTOR={min(3, brokers)} before the first start: {_ONE_REPLICA}",
        )


def judge_topics(
    client: ClientSettings, found: Mapping[str, TopicFacts], brokers: int, *, changelog: bool
) -> list[CheckFinding]:
    findings = [
        *_judge_rules(client, found, changelog=changelog),
        *(problem("topics", wrong) for wrong in wrong_partitions(client.names, found)),
        *(finding for name, facts in found.items() for finding in _judge_replicas(client, name, facts, brokers)),
        *_judge_retention(client, found),
    ]
    return findings or [fine("topics", f"{len(found)} of {client.names.prefix}, with the settings that marq needs")]


def _judge_rules(client: ClientSettings, found: Mapping[str, TopicFacts], *, changelog: bool) -> Iterator[CheckFinding]:
    if client.names.messages not in found:
        return
    wanted = rules(client.names, found[client.names.messages].limit_bytes, changelog=changelog)
    for broken in broken_rules(wanted, found):
        yield problem(
            f"topic {broken.rule.topic}",
            f"{broken.rule.setting} is {broken.value or 'not set'}",
            expected=f"{broken.rule.needed}{' or more' if broken.rule.at_least else ''}",
            advice="change it with",
            commands=[tools(client).alter_topic(broken.rule.topic, broken.rule.setting, broken.rule.needed)],
        )


def _judge_replicas(client: ClientSettings, name: str, facts: TopicFacts, brokers: int) -> Iterator[CheckFinding]:
    subject, least = f"topic {name}", int(facts.config.get(MIN_IN_SYNC, "1"))
    if facts.replicas and least > facts.replicas:
        yield problem(
            subject,
            f"{MIN_IN_SYNC} is {least}, but a partition has {facts.replicas} replicas: nothing can be written",
            expected=f"at most {facts.replicas}",
            advice="change it with",
            commands=[tools(client).alter_topic(name, MIN_IN_SYNC, str(max(facts.replicas - 1, 1)))],
        )
    elif facts.replicas == 1 and brokers > 1:
        yield warning(
            subject,
            f"a partition has one replica, on {brokers} brokers",
            expected=f"{min(3, brokers)} replicas",
            advice=f"add replicas with kafka-reassign-partitions.sh: {_ONE_REPLICA}",
        )
    elif facts.replicas > 2 and least == 1:
        yield warning(
            subject,
            f"{MIN_IN_SYNC} is 1: a confirmed write can be lost with one broker",
            expected="2",
            advice="change it with",
            commands=[tools(client).alter_topic(name, MIN_IN_SYNC, "2")],
        )


def _judge_retention(client: ClientSettings, found: Mapping[str, TopicFacts]) -> Iterator[CheckFinding]:
    name = client.names.markers
    if name not in found:
        return
    wanted = [
        Rule(name, RETENTION, str(client.markers_retention_ms), at_least=True),
        Rule(name, RETENTION_BYTES, FOR_EVER),
    ]
    for broken in broken_rules([rule for rule in wanted if rule.setting in found[name].config], found):
        yield warning(
            f"topic {name}",
            f"{broken.rule.setting} is {broken.value}",
            expected=f"{broken.rule.needed}{' or more' if broken.rule.at_least else ' (no limit)'}",
            advice="if all workers are down for longer than markers are kept, they cannot continue. Change it with",
            commands=[tools(client).alter_topic(name, broken.rule.setting, broken.rule.needed)],
        )
