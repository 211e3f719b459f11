"""The records that a worker writes at its start to publish its queues.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from marq.settings.definitions import Definitions
from marq.testing import Broker
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.app.check.queues import look_at_file
from marq_worker.app.publication import check_topics, differences, publish
from marq_worker.config.queues import QueuesFile


def file(defaults: dict[str, object] | None = None, **queues: dict[str, object]) -> QueuesFile:
    return QueuesFile(Path("queues.toml"), defaults or {}, queues)


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


def test_only_what_differs_is_written_and_what_the_file_has_no_more_is_taken_away() -> None:
    known = Definitions().after(differences(Definitions(), file({"lease": 10}, a={"lease": 1}, b={"lease": 2}, c={})))

    assert differences(known, file(a={"lease": 1}, b={"lease": 4})) == {
        b"defaults": None,
        b"file:b": {"lease": 4},
        b"file:c": None,
    }


def test_what_others_said_is_left_alone() -> None:
    known = Definitions()
    known.fold(b"change:emails", {"lease": 1})
    known.fold(b"handler:emails", {"handler": "m:f"})

    assert differences(known, file()) == {}


def test_two_queues_of_a_group_that_name_one_topic_are_refused_with_both_names() -> None:
    known = Definitions()
    known.fold(b"change:emails", {"topic": "orders", "group": "shop"})
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
    known.fold(b"schedule-file:gone", {"queue": "a", "cron": "* * * * *"})
    known.fold(b"schedule-file:same", {"queue": "b", "cron": "* * * * *"})
    known.fold(b"schedule:same", {"enabled": False})
    known.fold(b"schedule:made", {"queue": "c", "cron": "* * * * *"})
    schedules = {"same": {"queue": "b", "cron": "* * * * *"}, "new": {"queue": "d", "cron": "* * * * *"}}

    found = differences(known, QueuesFile(Path("queues.toml"), {}, {}, schedules))

    assert found == {b"schedule-file:gone": None, b"schedule-file:new": schedules["new"]}


async def test_a_worker_does_not_start_with_a_file_that_breaks_the_order_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Broker(queues={"orders": {"ordering": "key"}}) as broker, broker.producer() as producer:
        await producer.send("orders", b"x", ordering_key="k")
        changed = file(orders={"ordering": "key", "partitions": 1})
        monkeypatch.setattr("marq_worker.app.check.queues.definition_log", lambda _: broker.queues._follower._log)

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
