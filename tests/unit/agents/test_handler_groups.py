"""Which groups' handlers a worker runs, by what is defined."""

from __future__ import annotations

import json

from marq_worker.handlers.handler_groups import HandledQueue, HandlerGroup, handler_groups
from tests.unit.app.definitions import defined

SEND = {"handler": "mail:send"}


def test_queues_without_handlers_make_no_group() -> None:
    assert handler_groups(defined(file__emails={"lease": 5}, file__reports={"group": "background"}), {}) == {}


def test_queues_with_handlers_and_no_group_are_together() -> None:
    definitions = defined(file__emails=SEND, file__reports={"handler": "reports:make", "concurrency": 2, "topic": "r"})

    groups = handler_groups(definitions, {})

    assert groups == {
        "handlers": HandlerGroup(
            "handlers", {"emails": HandledQueue("mail:send", 64), "reports": HandledQueue("reports:make", 2, "r")}
        )
    }
    assert groups["handlers"].topics == {"reports": "r"}


def test_each_group_has_a_process_of_its_own() -> None:
    definitions = defined(file__emails=SEND, file__reports={**SEND, "group": "slow"})

    assert {name: list(group.queues) for name, group in handler_groups(definitions, {}).items()} == {
        "handlers": ["emails"],
        "slow": ["reports"],
    }


def test_a_decorated_handler_is_run_by_workers_that_have_its_module_only() -> None:
    definitions = defined(handler__emails={"handler": "mail:send", "concurrency": 3})

    assert handler_groups(definitions, {}) == {}
    groups = handler_groups(definitions, {"emails": "mail:send"})
    assert groups["handlers"].queues == {"emails": HandledQueue("mail:send", 3)}


def test_a_worker_runs_the_handlers_of_its_own_project_only() -> None:
    # given: queues of a project, of one without a name, and one that only a change at run time defines
    definitions = defined(
        file__emails={**SEND, "project": "shop"},
        handler__orders={"handler": "mail:order", "project": "shop"},
        change__orders=SEND,
        file__plain=SEND,
        change__created=SEND,
    )

    def run_by(project: str | None) -> dict[str, list[str]]:
        groups = handler_groups(definitions, {}, project=project)
        return {name: list(group.queues) for name, group in groups.items()}

    assert run_by("shop") == {"handlers": ["created"], "handlers.shop": ["emails", "orders"]}
    assert run_by("billing") == {"handlers": ["created"]}
    assert run_by("") == {"handlers": ["created", "plain"]}
    # then: a worker in an empty directory does not fail to import what others define
    assert run_by(None) == {"handlers": ["created"]}
    # and: what it publishes itself is in the group of its project from the start
    new = defined(file__own={"lease": 5})
    assert list(handler_groups(new, {"own": "mail:send"}, project="shop")) == ["handlers.shop"]


def test_a_handler_that_was_changed_at_run_time_is_run_by_every_worker() -> None:
    definitions = defined(handler__emails=SEND, change__emails={"handler": "mail:send_twice"})

    for own in ({}, {"emails": "mail:send"}):
        assert handler_groups(definitions, own)["handlers"].queues["emails"].handler == "mail:send_twice"


def test_a_change_of_another_setting_leaves_the_decorated_handler() -> None:
    definitions = defined(handler__emails=SEND, change__emails={"concurrency": 5})

    assert handler_groups(definitions, {"emails": "mail:send"})["handlers"].queues == {
        "emails": HandledQueue("mail:send", 5)
    }


def test_a_group_can_be_told_to_its_process() -> None:
    group = HandlerGroup(
        "slow", {"emails": HandledQueue("mail:send", 3), "orders": HandledQueue("m:o", 1, "topic")}, ("common",)
    )

    assert HandlerGroup.read(json.loads(json.dumps(group.document()))) == group


def test_limits_of_an_ordered_queue_need_no_new_process() -> None:
    ordered = {**SEND, "ordering": "key"}
    limited = {**ordered, "limits": {"concurrency": 2}}

    assert handler_groups(defined(file__emails=limited), {}) == handler_groups(defined(file__emails=ordered), {})


def test_a_group_reads_the_partitions_of_its_queues_and_a_move_needs_no_new_process() -> None:
    # given
    definitions = defined(
        file__emails=SEND,
        file__reports=SEND,
        placement__emails={"sends": [3], "reads": None},
        placement__reports={"sends": [2], "reads": [2]},
    )
    [group] = handler_groups(definitions, {}).values()
    assert group.serving("messages", group.queues, definitions).reads == {}

    # when: a minute after a queue was defined, only its own partitions are read
    definitions.fold(b"placement:emails", {"sends": [3], "reads": [3]})

    # then: its process reads the others no more, and no handler is interrupted
    assert handler_groups(definitions, {})["handlers"] == group
    assert group.serving("messages", group.queues, definitions).reads == {"messages": (2, 3)}


def test_a_worker_of_an_older_version_may_tell_more_of_a_queue() -> None:
    group = HandlerGroup("slow", {"emails": HandledQueue("mail:send", 3)})
    document = group.document()
    document["queues"]["emails"] |= {"reads": [1, 3], "limited": True}

    assert HandlerGroup.read(json.loads(json.dumps(document))) == group
