"""Runs the commands that marq advises, as an administrator would: kafka-topics.sh, kafka-configs.sh, kafka-acls.sh.

The embedded broker comes without Kafka's shell scripts: their options are read here, strictly, and sent as the scripts
would send them.
"""

from __future__ import annotations

import argparse
import shlex
from itertools import product

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

from tests.worker.harness import admin, eventually

_OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Alter": 7, "Describe": 8, "DescribeConfigs": 10}
_PATTERNS = {"literal": 3, "prefixed": 4}
_TOPIC, _GROUP, _CLUSTER, _TRANSACTIONAL_ID = 2, 3, 4, 5
_ANY_HOST, _ALLOW, _SET_BY_HAND = "*", 3, 1


async def run(command: str, servers: str) -> None:
    """Run one command line; ``servers`` is the administrator's address, which replaces the command's."""
    tool, *options = shlex.split(command)
    async with admin(servers) as client:
        await _TOOLS[tool](client, options)


def _parser(*flags: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--bootstrap-server", required=True)
    parser.add_argument("--command-config", choices=["admin.properties"])
    for flag in flags:
        parser.add_argument(flag, action="store_true", required=True)
    return parser


async def _topics(admin: AIOKafkaAdminClient, options: list[str]) -> None:
    await (_add_partitions if "--alter" in options else _create_topic)(admin, options)


async def _add_partitions(admin: AIOKafkaAdminClient, options: list[str]) -> None:
    parser = _parser("--alter")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    found = parser.parse_args(options)
    answer = await admin.create_partitions({found.topic: NewPartitions(found.partitions)})
    assert [error[1] for error in answer.topic_errors] == [0], answer
    await _has_partitions(admin, found.topic, found.partitions)


async def _has_partitions(admin: AIOKafkaAdminClient, topic: str, count: int) -> None:
    """Wait until the broker knows of what it has confirmed."""
    await eventually(lambda: admin.describe_topics([topic]), lambda found: len(found[0]["partitions"]) == count)


async def _create_topic(admin: AIOKafkaAdminClient, options: list[str]) -> None:
    parser = _parser("--create")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--replication-factor", type=int, required=True)
    parser.add_argument("--config", action="append", default=[])
    found = parser.parse_args(options)
    config = dict(setting.split("=", 1) for setting in found.config)
    topic = NewTopic(found.topic, found.partitions, found.replication_factor, topic_configs=config)
    answer = await admin.create_topics([topic])
    assert [error[1] for error in answer.topic_errors] == [0], answer
    await _has_partitions(admin, found.topic, found.partitions)


async def _configs(admin: AIOKafkaAdminClient, options: list[str]) -> None:
    parser = _parser("--alter")
    parser.add_argument("--entity-type", choices=["topics"], required=True)
    parser.add_argument("--entity-name", required=True)
    parser.add_argument("--add-config", required=True)
    found = parser.parse_args(options)
    name, _, value = found.add_config.partition("=")
    resource = ConfigResource(ConfigResourceType.TOPIC, found.entity_name)
    resource.configs = {**await _set_by_hand(admin, found.entity_name), name: value}
    (answer,) = await admin.alter_configs([resource])
    assert [error[0] for error in answer.resources] == [0], answer
    # The broker applies a change after it confirms it; the next change has to see this one, or would undo it.
    await eventually(lambda: _set_by_hand(admin, found.entity_name), lambda entries: entries.get(name) == value)


async def _set_by_hand(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (described,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for entry in described.resources[0][4] if entry[3] == _SET_BY_HAND}


async def _acls(admin: AIOKafkaAdminClient, options: list[str]) -> None:
    parser = _parser("--add")
    parser.add_argument("--allow-principal", action="append", required=True)
    parser.add_argument("--operation", action="append", choices=_OPERATIONS, required=True)
    parser.add_argument("--resource-pattern-type", choices=_PATTERNS, default="literal")
    parser.add_argument("--topic", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--transactional-id", action="append", default=[])
    parser.add_argument("--cluster", action="store_true")
    found = parser.parse_args(options)
    resources = [(_TOPIC, name) for name in found.topic] + [(_GROUP, name) for name in found.group]
    resources += [(_TRANSACTIONAL_ID, name) for name in found.transactional_id]
    resources += [(_CLUSTER, "kafka-cluster")] if found.cluster else []
    assert resources, f"{options} name no resource"
    pattern = _PATTERNS[found.resource_pattern_type]
    for (kind, name), principal, operation in product(resources, found.allow_principal, found.operation):
        acl = (kind, name, pattern, principal, _ANY_HOST, _OPERATIONS[operation], _ALLOW)
        answer = await admin._send_to_controller(CreateAclsRequest(*acl))
        assert [error[0] for error in answer.creation_responses] == [0], answer
    # The broker applies them after it confirms them, the last one last.
    await eventually(
        lambda: admin._send_to_controller(DescribeAclsRequest(*acl)), lambda described: described.resources
    )


_TOOLS = {"kafka-topics.sh": _topics, "kafka-configs.sh": _configs, "kafka-acls.sh": _acls}
