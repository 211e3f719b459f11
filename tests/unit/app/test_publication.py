"""The records that a worker writes at its start to publish its queues.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from marq.settings.definitions import Definitions
from marq.wire.errors import ConfigError
from marq.wire.names import Names
from marq_worker.app.publication import check_topics, differences
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


def test_a_topic_that_a_change_gave_to_another_queue_is_refused_with_both_names() -> None:
    known = Definitions()
    known.fold(b"change:emails", {"topic": "orders"})
    mine = file(orders={"topic": "orders"})

    with pytest.raises(ConfigError, match="queues 'emails' and 'orders' would have the same topic 'orders'"):
        check_topics(known.after(differences(known, mine)), Names(), mine)


def test_marqs_own_topics_belong_to_no_queue() -> None:
    mine = file(orders={"topic": "marq.messages"})

    with pytest.raises(ConfigError, match=r"queues.toml: \[queues.orders\]: topic: 'marq.messages' belongs to marq"):
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
