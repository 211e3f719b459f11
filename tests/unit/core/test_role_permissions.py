from __future__ import annotations

import pytest

from marq.kafka.role_permissions import ROLES, Permission, ResourceType, Tools, consumer, grants, sender, worker
from marq.wire.names import Names

NAMES = Names("shop")
TOOLS = Tools("kafka:9092")


def operations(permissions: list[Permission], name: str) -> set[str]:
    return {permission.operation for permission in permissions if permission.name == name}


def test_a_sender_may_write_messages_and_nothing_else() -> None:
    written = {permission.name for permission in sender(NAMES) if permission.operation == "Write"}

    assert written == {NAMES.messages}
    assert not [permission for permission in sender(NAMES) if permission.kind is not ResourceType.TOPIC]


def test_only_workers_have_permissions_on_changelog_dead_letters_and_tracker_ids() -> None:
    allowed_ids = {"worker": {NAMES.transactional_ids}, "transactional-consumer": {NAMES.start_ids}}
    for role, needed in ROLES.items():
        permissions = needed(NAMES, ())
        is_worker = role == "worker"
        assert bool(operations(permissions, NAMES.changelog)) is is_worker
        assert ("Write" in operations(permissions, NAMES.dead_letters)) is is_worker
        ids = {permission.name for permission in permissions if permission.kind is ResourceType.TRANSACTIONAL_ID}
        # A consumer must not be able to fence a tracker.
        assert ids == allowed_ids.get(role, set())


def test_a_worker_needs_what_its_roles_need() -> None:
    tracker = worker(NAMES, ["own"], backlog=False, handlers=False, handled_topics=["own"])
    counting = worker(NAMES, ["own"], handlers=False)
    handlers = worker(NAMES, ["own"], tracker=False, handled_topics=["own"])

    assert "Read" in operations(tracker, NAMES.messages)
    assert operations(tracker, "own") == {"Read"}
    assert [permission.operation for permission in counting if permission.name == NAMES.backlog] == ["Read"]
    assert operations(counting, "own") == {"Read"}
    assert "Read" in operations(handlers, NAMES.messages)
    assert operations(handlers, "own") == {"Describe", "DescribeConfigs", "Read"}
    assert not operations(handlers, NAMES.changelog)
    at_most_once = set(worker(NAMES, transactional=True)) - set(worker(NAMES))
    assert at_most_once == {Permission(ResourceType.TRANSACTIONAL_ID, "shop-start-", "Write", prefixed=True)}


def test_groups_are_granted_by_prefix() -> None:
    groups = [
        permission
        for permission in consumer(NAMES)
        if permission.kind is ResourceType.GROUP and permission.operation == "Read"
    ]

    assert {(group.name, group.prefixed) for group in groups} == {
        ("shop.queue.", True),
        ("shop.group.", True),
    }


def test_resources_with_the_same_operations_share_a_command() -> None:
    permissions = [
        Permission(ResourceType.TOPIC, name, operation)
        for name in ("a", "b")
        for operation in ("Read", "DescribeConfigs")
    ]

    assert grants(permissions, "User:x", TOOLS) == [
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --add --allow-principal User:x --operation DescribeConfigs"
            " --operation Read --topic a --topic b"
        )
    ]


@pytest.mark.parametrize("operation", ["Read", "Write"])
def test_what_includes_describe_is_granted_without_it(operation: str) -> None:
    [command] = grants(
        [Permission(ResourceType.TOPIC, "a", "Describe"), Permission(ResourceType.TOPIC, "a", operation)],
        "User:x",
        TOOLS,
    )

    assert "Describe" not in command


def test_a_prefix_and_a_login_are_in_the_command() -> None:
    right = Permission(ResourceType.TRANSACTIONAL_ID, "shop-tracker-", "Write", prefixed=True)

    assert grants([right], "User:a b", Tools("kafka:9092", secured=True)) == [
        (
            "kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties --add --allow-principal"
            " 'User:a b' --operation Write --transactional-id shop-tracker- --resource-pattern-type prefixed"
        )
    ]


def test_nothing_to_grant_needs_no_command() -> None:
    assert grants([], "User:x", TOOLS) == []
