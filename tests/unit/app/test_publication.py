"""The records that a worker writes at its start to publish its queues.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from marq.settings.definitions import Definitions
from marq.testing import Broker
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.check.queues import judge_file, look_at_file
from marq_worker.config.queues import QueuesFile
from marq_worker.findings import Level
from marq_worker.publication import check_topics, differences, publish
from tests.unit.app.definitions import defined

Document = Mapping[str, object]
Schedules = Mapping[str, Document]


def file(defaults: dict[str, object] | None = None, **queues: dict[str, object]) -> QueuesFile:
    return QueuesFile(Path("queues.toml"), defaults or {}, queues)


def of(
    project: str, defaults: dict[str, object] | None = None, schedules: Schedules | None = None, **queues: Document
) -> QueuesFile:
    """Return the file of a named project."""
    return QueuesFile(Path("marq.toml"), defaults or {}, queues, schedules or {}, project)


def after(*files: QueuesFile) -> Definitions:
    """Return the definitions after workers with these files have started, one after the other."""
    definitions = Definitions()
    for published in files:
        definitions = definitions.after(differences(definitions, published))
    return definitions


def test_at_the_first_start_everything_is_written() -> None:
    assert differences(Definitions(), file({"lease": 10}, emails={"lease": 3}, plain={})) == {
        b"defaults": {"lease": 10},
        b"file:emails": {"lease": 3},
        b"file:plain": {},
    }


def test_a_start_without_a_change_writes_nothing() -> None:
    mine = file({"lease": 10}, emails={"lease": 3}, plain={})
    known = Definitions().after(differences(Definitions(), mine))

    assert differences(known, mine) == {}
    assert differences(Definitions(), file()) == {}


def test_a_project_writes_only_what_differs_and_removes_what_its_file_no_longer_has() -> None:
    known = after(of("shop", {"lease": 10}, a={"lease": 1}, b={"lease": 2}, c={}))

    assert differences(known, of("shop", a={"lease": 1}, b={"lease": 4})) == {
        b"defaults": {"project": "shop"},
        b"defaults:shop": None,
        b"file:b": {"lease": 4, "project": "shop"},
        b"file:c": None,
    }
    assert differences(known, of("shop")) == dict.fromkeys(
        [b"defaults", b"defaults:shop", b"file:a", b"file:b", b"file:c"]
    )


@pytest.mark.parametrize(
    "stray",
    [
        QueuesFile(Path("marq.toml"), {}, {}, present=False),
        QueuesFile(Path("marq.toml"), {}, {}, project="shop", present=False),
        file(),
        of("other"),
        of("other", {"max_attempts": 5}, own={}),
    ],
    ids=["empty directory", "name without a file", "file without a name", "another name", "another project"],
)
@pytest.mark.parametrize("name", ["shop", ""])
def test_a_worker_in_the_wrong_directory_changes_nothing_of_what_others_have_published(
    stray: QueuesFile, name: str
) -> None:
    # given: a project with queues, a schedule and defaults
    schedules: Schedules = {"daily": {"queue": "emails", "cron": "0 9 * * *"}}
    known = after(of(name, {"max_attempts": 3}, schedules, emails={"ordering": "key"}, plain={}))

    # when: a worker with other definitions, or none, starts
    later = known.after(differences(known, stray))

    # then
    assert [later(queue) for queue in ("emails", "plain", "unknown")] == [
        known(queue) for queue in ("emails", "plain", "unknown")
    ]
    assert later.schedules.current == known.schedules.current


def test_each_project_has_defaults_of_its_own_and_the_first_one_those_of_undefined_queues() -> None:
    definitions = after(of("shop", {"lease": 1}, emails={}), of("billing", {"lease": 2}, bills={}))

    assert [definitions(queue).lease_ms for queue in ("emails", "bills", "unknown")] == [1_000, 2_000, 1_000]
    # then: a change of one does not concern the other, and neither has more to write
    changed = after(of("shop", {"lease": 1}, emails={}), of("billing", bills={}), of("shop", {"lease": 3}, emails={}))
    assert [changed(queue).lease_ms for queue in ("emails", "bills", "unknown")] == [3_000, 30_000, 3_000]
    assert (
        differences(changed, of("billing", bills={})) == differences(changed, of("shop", {"lease": 3}, emails={})) == {}
    )


@pytest.mark.parametrize("key", [b"handler:emails", b"change:emails"])
def test_a_later_project_does_not_change_the_defaults_of_queues_that_were_there_before(key: bytes) -> None:
    # given: a queue of a program without a marq.toml, or one that was created at run time
    known = Definitions()
    known.fold(key, {"handler": "tasks:send"})

    later = known.after(differences(known, of("shop", {"max_attempts": 1}, orders={})))

    assert [later(queue).max_attempts for queue in ("emails", "unknown", "orders")] == [5, 5, 1]


@pytest.mark.parametrize("key", [b"file:emails", b"handler:emails"])
@pytest.mark.parametrize(
    ("second", "this"),
    [(of("billing", emails={}), "project 'billing'"), (file(emails={}), "this project, which has no name")],
)
def test_a_queue_of_another_project_is_refused_with_both_names_and_what_to_do(
    key: bytes, second: QueuesFile, this: str
) -> None:
    known = Definitions()
    known.fold(key, {"project": "shop"})

    with pytest.raises(ConfigError) as refused:
        differences(known, second)

    text = str(refused.value)
    assert f"queue 'emails' is defined by project 'shop' and by {this}" in text
    assert re.search(r"name this one 'shop' \(.*MARQ_PROJECT\)", text)
    assert "rename the queue" in text
    assert "`marq queue emails --forget`" in text


def test_a_schedule_and_defaults_of_another_project_are_refused_too() -> None:
    known = after(of("shop", {"lease": 3}, {"daily": {"queue": "a", "cron": "* * * * *"}}))

    with pytest.raises(ConfigError, match="schedule 'daily' is defined by project 'shop' and by project 'billing'"):
        differences(known, of("billing", schedules={"daily": {"queue": "b", "cron": "* * * * *"}}))
    with pytest.raises(ConfigError, match=r"\[defaults\]: project 'shop' has published those of this namespace"):
        differences(known, file({"lease": 4}))
    assert differences(known, file({"lease": 3})) == {}


def test_check_says_what_a_start_would_remove_refuse_or_leave() -> None:
    def found(known: Definitions, mine: QueuesFile) -> list[tuple[Level, str]]:
        return [(finding.level, finding.found) for finding in judge_file(known, Names(), mine, published_by=1)]

    [(level, text)] = found(after(of("shop", a={}, b={})), of("shop", a={}))
    assert (level, "queue b (removed)" in text) == (Level.WARNING, True)
    [(level, text)] = found(after(of("shop", a={})), of("billing", a={}))
    assert (level, "by project 'shop' and by project 'billing'" in text) == (Level.PROBLEM, True)
    [(level, text)] = found(after(file(a={})), file())
    assert (level, text) == (
        Level.WARNING,
        "does not define queue a, which no start removes, because they name no project",
    )
    # then: a directory without a file has nothing to say
    assert found(after(file(a={})), QueuesFile(Path("marq.toml"), {}, {}, present=False)) == []


def test_a_project_that_gets_its_name_takes_over_what_it_defines() -> None:
    # given: definitions without a project, of two projects
    known = after(file({"lease": 1}, emails={"lease": 2}, others={}))

    # when: one of the projects gets a name
    named = of("shop", {"lease": 1}, emails={"lease": 2})
    later = known.after(differences(known, named))

    # then
    assert [later.project(queue) for queue in ("emails", "others")] == ["shop", ""]
    assert later.defaults_owner == "shop"
    assert differences(later, named) == {}
    # and: a project that only calls its defaults otherwise must not change those of the other one
    other = known.after(differences(known, of("billing", {"lease": 9}, bills={})))
    assert [other(queue).lease_ms for queue in ("others", "unknown", "bills")] == [1_000, 1_000, 9_000]


async def test_what_a_project_removes_and_what_one_without_a_name_may_have_replaced_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Broker() as broker:
        await publish(broker.queues, Names(), of("shop", a={}, b={}))
        assert not caplog.records
        await publish(broker.queues, Names(), of("shop", a={}))
        await publish(broker.queues, Names(), file(c={}))
        await publish(broker.queues, Names(), QueuesFile(Path("marq.toml"), {}, {}, present=False))
        await publish(broker.queues, Names(), file(c={"lease": 3}))
        await publish(broker.queues, Names(), file())

    unnamed = "queues.toml names no project, so Marq can't tell which definitions are its own: it"
    assert [(record.levelname, record.message.partition(". Set")[0]) for record in caplog.records] == [
        ("WARNING", "project shop removed definitions that marq.toml no longer has: queue b"),
        ("WARNING", f"{unnamed} replaced queue c"),
        ("WARNING", f"{unnamed} kept queue c"),
    ]


async def test_a_start_logs_what_it_publishes_and_not_what_it_removes_as_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "marq")
    schedule = {"queue": "a", "cron": "@daily", "value": "x"}
    async with Broker() as broker:
        await publish(broker.queues, Names(), of("shop", {"lease": 3}, {"hi": schedule}, a={}))
        await publish(broker.queues, Names(), of("shop", {"lease": 3}, a={}))
        await publish(broker.queues, Names(), QueuesFile(Path("/srv/marq.toml"), {}, {}, present=False))

    assert [record.message for record in caplog.records if record.name.startswith("marq")] == [
        "marq.toml published: [defaults] of project shop, queue a, schedule hi, [defaults]",
        "project shop removed definitions that marq.toml no longer has: schedule hi",
        "/srv/marq.toml does not exist: this worker publishes no settings but those in its handlers' code",
    ]


def test_what_others_said_is_left_alone() -> None:
    known = defined(change__emails={"lease": 1}, handler__emails={"handler": "m:f"})

    assert differences(known, file()) == {}


def test_two_queues_of_a_group_that_name_one_topic_are_refused_with_both_names() -> None:
    known = defined(change__emails={"topic": "orders", "group": "shop"})
    mine = file(orders={"topic": "orders", "group": "shop"})

    with pytest.raises(ConfigError, match="queue 'emails': topic 'orders' is also that of queue 'orders' in the same"):
        check_topics(known.after(differences(known, mine)), Names(), mine)


def test_two_handlers_of_one_topic_need_groups() -> None:
    mine = file(orders={"topic": "orders", "handler": "m:f"}, audit={"topic": "orders", "handler": "m:g"})

    with pytest.raises(ConfigError, match=r"in the same group 'handlers'.*as in group = .audit."):
        check_topics(mine.definitions, Names(), mine)


def test_marqs_own_topics_belong_to_no_queue() -> None:
    mine = file(orders={"topic": "marq.messages"})

    with pytest.raises(ConfigError, match=r"queues.toml: queue 'orders': topic 'marq.messages' belongs to marq"):
        check_topics(mine.definitions, Names(), mine)


def test_schedules_of_the_file_are_published_and_those_that_it_has_no_more_taken_away() -> None:
    known = Definitions()
    known.fold(b"schedule-file:gone", {"queue": "a", "cron": "* * * * *", "project": "shop"})
    known.fold(b"schedule-file:same", {"queue": "b", "cron": "* * * * *", "project": "shop"})
    known.fold(b"schedule-file:other", {"queue": "b", "cron": "* * * * *"})
    known.fold(b"schedule:same", {"enabled": False})
    known.fold(b"schedule:made", {"queue": "c", "cron": "* * * * *"})
    schedules: Schedules = {"same": {"queue": "b", "cron": "* * * * *"}, "new": {"queue": "d", "cron": "* * * * *"}}

    found = differences(known, of("shop", schedules=schedules))

    assert found == {
        b"defaults": {"project": "shop"},
        b"schedule-file:gone": None,
        b"schedule-file:new": {**schedules["new"], "project": "shop"},
    }


async def test_a_worker_does_not_start_with_a_file_that_breaks_the_order_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Broker(queues={"orders": {"ordering": "key"}}) as broker, broker.producer() as producer:
        await producer.send("orders", b"x", ordering_key="k")
        changed = file(orders={"ordering": "key", "partitions": 1})
        monkeypatch.setattr("marq_worker.check.queues.definition_log", lambda _: broker.queues._follower._log)

        with pytest.raises(ConfigError, match=r"^queues.toml: queue 'orders': partitions can't change .*1 waiting"):
            await publish(broker.queues, Names(), changed)
        findings = await look_at_file(broker._settings, broker.queues.definitions, changed, published_by=1)

        assert [finding.found.startswith("queue 'orders': partitions can't change") for finding in findings][-1]
        assert broker.queues["orders"].partitions == "all"
        await publish(broker.queues, Names(), file(orders={"ordering": "key", "lease": 5}))
        assert broker.queues["orders"].lease == 5


async def test_a_start_that_a_queue_kept_when_it_left_its_topic_is_not_in_the_way() -> None:
    async with Broker() as broker:
        broker.create_topic("shop-orders")
        await broker.queues.change("audit", topic="shop-orders", start="latest")
        await broker.queues.change("audit", topic=None)

        await publish(broker.queues, Names(), file(emails={"lease": 5}))

        assert broker.queues["emails"].lease == 5
        with pytest.raises(ConfigError, match=r'queue \'search\': start = "latest" \(marq.toml\) has no effect'):
            await publish(broker.queues, Names(), file(search={"start": "latest"}))
