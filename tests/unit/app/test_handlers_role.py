"""What a worker checks and says of its handlers before it runs any."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marq.settings.definitions import Definitions
from marq.wire.errors import ConfigError
from marq_worker.check.queues import judge_handlers
from marq_worker.config.queues import QueuesFile
from marq_worker.handlers.handler_groups import HandlerGroup, check_transactional, handler_groups
from marq_worker.handlers.handlers_role import check, overridden, part_of_group, publication, unpublished
from marq_worker.handlers.loaded_handlers import load_modules
from tests.unit.app.definitions import defined

MAIL = """
    import marq

    @marq.handler("emails", concurrency=3)
    def send(message): ...
"""


@pytest.fixture
def make_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def make(source: str = MAIL, name: str = "mail_of_the_test") -> ModuleType:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(textwrap.dedent(source), name, "exec"), module.__dict__)
        return module

    return make


def checked(definitions: Definitions, own: dict[str, str] | None = None) -> None:
    check(definitions, handler_groups(definitions, own or {}), own or {})


def test_a_module_that_can_not_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match="module 'nowhere_at_all' can't be imported: there is no such module"):
        load_modules(("nowhere_at_all",))


def test_what_is_said_of_decorated_handlers_is_said_once(make_module: Callable[..., ModuleType]) -> None:
    make_module()
    said = {queue: queue_handlers.document for queue, queue_handlers in load_modules(("mail_of_the_test",)).items()}
    document = {"handler": "mail_of_the_test:send", "concurrency": 3}

    confirmed = {b"confirmed:emails": {}}
    assert publication(Definitions(), said, ["mail_of_the_test"]) == confirmed | {b"handler:emails": document}
    assert publication(defined(handler__emails=document), said, ["mail_of_the_test"]) == confirmed


def test_what_our_modules_say_no_more_is_removed_and_what_others_say_stays() -> None:
    definitions = defined(
        handler__emails={"handler": "services.mail:send", "project": "shop"},
        handler__letters={"handler": "services.post.letters:send", "project": "shop"},
        handler__orders={"handler": "services_of_others:handle", "project": "shop"},
        handler__bills={"handler": "services.mail:send", "project": "billing"},
        handler__sms={"handler": "services.mail:send"},
        file__reports={"handler": "services.mail:report", "project": "shop"},
    )

    assert publication(definitions, {}, ["services.mail", "services.post"], "shop") == {
        b"handler:emails": None,
        b"handler:letters": None,
    }
    # then: another project without a name may have a module of the same name
    assert publication(definitions, {}, ["services.mail", "services.post"]) == {}


def test_a_handler_of_a_queue_of_another_project_is_refused_with_both_names() -> None:
    theirs = defined(file__emails={"project": "shop"})
    ours = {"emails": {"handler": "tasks:send"}}

    with pytest.raises(
        ConfigError, match="handler tasks:send: queue 'emails' is defined by project 'shop' and by project 'billing'"
    ):
        publication(theirs, ours, ["tasks"], "billing")
    assert publication(theirs, ours, ["tasks"], "shop") == {
        b"confirmed:emails": {},
        b"handler:emails": {"handler": "tasks:send", "project": "shop"},
    }


def test_projects_that_share_a_group_are_refused_with_both_names(make_module: Callable[..., ModuleType]) -> None:
    make_module()
    definitions = defined(
        file__emails={"handler": "mail_of_the_test:send", "group": "background", "project": "shop"},
        file__bills={"handler": "tasks:bill", "group": "background", "project": "billing"},
    )

    groups = handler_groups(definitions, {}, project="shop")

    with pytest.raises(
        ConfigError, match="'background' has queue 'emails' of project 'shop' and queue 'bills' of project 'billing'"
    ):
        check(definitions, groups, {})


def test_a_queue_with_a_handler_in_the_file_and_another_in_code_has_two(make_module: Callable[..., ModuleType]) -> None:
    make_module()
    own = {"emails": "mail_of_the_test:send"}

    with pytest.raises(ConfigError, match=r"queue 'emails' has two handlers: mail:post .* and mail_of_the_test:send"):
        checked(defined(file__emails={"handler": "mail:post"}), own)
    checked(defined(file__emails={"handler": "mail_of_the_test:send"}), own)


def test_settings_of_a_decorator_are_checked_together_with_those_of_marq_toml(
    make_module: Callable[..., ModuleType],
) -> None:
    make_module()
    definitions = defined(
        handler__emails={"handler": "mail_of_the_test:send", "lease": 60}, file__emails={"max_lease": 30}
    )

    with pytest.raises(
        ConfigError,
        match=r"queue 'emails': max_lease = 30 \(marq.toml\) is shorter than lease = 60 \(the handler's code\)",
    ):
        checked(definitions, {"emails": "mail_of_the_test:send"})


def test_a_setting_that_marq_toml_overrides_is_named_with_both_values() -> None:
    decorated = {"emails": {"handler": "mail:send", "max_attempts": 3, "lease": 60, "concurrency": 5}}
    definitions = defined(
        defaults={"lease": 10},
        handler__emails=decorated["emails"],
        file__emails={"max_attempts": 7, "lease": 60},
        change__emails={"concurrency": 1},
    )

    # then: equal values are no conflict, and [defaults] are weaker than the decorator
    assert overridden(definitions, decorated) == [
        "queue 'emails': concurrency = 1 (changed at run time) overrides concurrency = 5 of @marq.handler (mail:send)",
        "queue 'emails': max_attempts = 7 (marq.toml) overrides max_attempts = 3 of @marq.handler (mail:send)",
    ]
    assert overridden(defined(defaults={"lease": 10}, handler__emails=decorated["emails"]), decorated) == []


def test_settings_of_a_decorator_whose_module_no_worker_lists_are_named(make_module: Callable[..., ModuleType]) -> None:
    make_module()
    definitions = defined(file__emails={"handler": "mail_of_the_test:send"})
    groups = handler_groups(definitions, {})

    [text] = unpublished(groups, {})

    assert text.startswith(
        "queue 'emails': the settings of @marq.handler (mail_of_the_test:send) have no effect: concurrency"
    )
    assert "MARQ_HANDLERS does not list the module 'mail_of_the_test'" in text
    assert unpublished(groups, {"emails"}) == []


TYPED = """
    from dataclasses import dataclass
    import marq

    @dataclass
    class Report:
        day: str

    @marq.handler("reports", type="daily")
    def daily(report: Report): ...

    @marq.handler("reports", type="raw")
    def raw(message): ...

    @marq.handler("bills")
    def bill(report: Report): ...
"""


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"queue": "bills", "value": '{"day": "monday"}'}, None),
        ({"queue": "reports", "type": "daily", "value": '{"day": "monday"}'}, None),
        ({"queue": "reports", "type": "raw", "value": "anything"}, None),
        ({"queue": "elsewhere", "value": "anything"}, None),
        ({"queue": "bills", "value": '{"day": 5}'}, "schedule 's': its value .* 'bills': .*day: string_type"),
        ({"queue": "reports", "type": "daily"}, "schedule 's': its value can't be decoded by the handler of"),
        ({"queue": "reports", "type": "weekly"}, "no handler for messages of type 'weekly'; .* 'daily', 'raw'"),
        ({"queue": "reports"}, "schedule 's': queue 'reports': no handler for a message without"),
    ],
)  # fmt: skip
def test_values_of_schedules_that_no_handler_can_decode_are_refused_at_the_start(
    make_module: Callable[..., ModuleType], schedule: dict[str, Any], said: str | None
) -> None:
    make_module(TYPED)
    handlers = load_modules(("mail_of_the_test",))
    documents = {queue: queue_handlers.document for queue, queue_handlers in handlers.items()}
    definitions = Definitions().after(publication(Definitions(), documents, ["mail_of_the_test"]))
    definitions.fold(b"schedule-file:s", {"cron": "@daily", **schedule})
    own = {"bills": "mail_of_the_test:bill"}
    groups = handler_groups(
        definitions, own, types={queue: queue_handlers.types for queue, queue_handlers in handlers.items()}
    )

    if said is None:
        check(definitions, groups, own)
    else:
        with pytest.raises(ConfigError, match=said):
            check(definitions, groups, own)
        # then: what was defined at run time keeps no worker from starting
        definitions.fold(b"schedule-file:s", None)
        definitions.fold(b"schedule:s", {"cron": "@daily", **schedule})
        check(definitions, groups, own)


def test_check_finds_what_would_keep_a_worker_from_starting(make_module: Callable[..., ModuleType]) -> None:
    make_module()
    modules = ("mail_of_the_test",)
    two = QueuesFile(Path("marq.toml"), {}, {"emails": {"handler": "json:loads"}})
    listed = QueuesFile(Path("marq.toml"), {}, {})
    unlisted = QueuesFile(Path("marq.toml"), {}, {"emails": {"handler": "mail_of_the_test:send"}})

    [problem] = judge_handlers(Definitions(), two, modules)
    assert (problem.level, "queue 'emails' has two handlers: json:loads in marq.toml" in problem.found) == (
        "PROBLEM",
        True,
    )
    assert [finding.level for finding in judge_handlers(Definitions(), listed, modules)] == ["OK"]
    [warning] = judge_handlers(Definitions(), unlisted, ())
    assert (warning.level, "have no effect: concurrency" in warning.found) == ("WARNING", True)


def test_a_group_of_which_only_a_part_has_handlers_here_is_refused_with_what_to_do(
    make_module: Callable[..., ModuleType],
) -> None:
    make_module()
    send = {"handler": "mail_of_the_test:send", "group": "background"}
    definitions = defined(
        file__emails=send,
        file__reports={"group": "background"},
        handler__orders={"handler": "other:handle", "group": "background"},
    )

    with pytest.raises(
        ConfigError,
        match=r"group 'background': .*handlers for 'emails', but none for 'orders', 'reports', .*"
        r"MARQ_HANDLERS does not list the modules of 'orders' \(other:handle\)",
    ):
        checked(definitions)


def test_a_group_whose_other_handlers_may_have_been_removed_is_not_refused(
    make_module: Callable[..., ModuleType],
) -> None:
    make_module()
    definitions = defined(
        file__emails={"handler": "mail_of_the_test:send", "group": "background"},
        handler__orders={"handler": "other:handle", "group": "background"},
    )

    checked(definitions)

    [group] = handler_groups(definitions, {}).values()
    text = part_of_group(group, ["orders"], definitions)
    assert "MARQ_HANDLERS does not list the modules of 'orders' (other:handle)" in text
    assert "expires after 15 min, or with `marq queue NAME --forget`" in text


def test_a_handler_that_can_not_be_imported_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="queue 'emails': its handler 'nowhere_at_all:send' can't be imported"):
        checked(defined(file__emails={"handler": "nowhere_at_all:send"}))


@pytest.mark.parametrize("said", [{"transactional": True}, {"delivery": "at-most-once"}])
def test_a_group_is_transactional_if_one_of_its_queues_is(said: dict[str, Any]) -> None:
    often = {"handler": "json:loads"}
    once = {**often, **said}
    before = defined(
        file__emails=often, file__reports={**often, "group": "other"}, file__sms={**once, "group": "other"}
    )
    groups = handler_groups(before, {})

    assert {name: group.transactional for name, group in groups.items()} == {"handlers": False, "other": True}
    assert HandlerGroup.read(json.loads(json.dumps(groups["other"].document()))) == groups["other"]
    checked(before)
    # Another process runs it when that changes; the one that was started before refuses to.
    after = defined(file__emails=once)
    assert handler_groups(after, {})["handlers"] != groups["handlers"]
    with pytest.raises(ConfigError, match="queue 'emails' is transactional, but this process was started before"):
        check_transactional(groups["handlers"], after)
    check_transactional(handler_groups(after, {})["handlers"], after)


def test_a_group_with_an_ordered_queue_reads_committed_records() -> None:
    often = {"handler": "json:loads"}
    ordered = {**often, "ordering": "key"}
    [group] = handler_groups(defined(file__emails=often, file__sms=ordered), {}).values()

    assert (group.committed, group.transactional) == (True, False)
    assert group.serving("messages", group.queues).ordered
    assert HandlerGroup.read(json.loads(json.dumps(group.document()))) == group
    # A queue that becomes ordered gets another process.
    assert handler_groups(defined(file__sms=often), {}) != handler_groups(defined(file__sms=ordered), {})
