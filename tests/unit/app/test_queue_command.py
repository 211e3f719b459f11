"""What the options of the command ``queue`` say, and how it shows settings."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import AsyncMock

import pytest
from click.testing import CliRunner

from marq.settings.definitions import Definitions
from marq.settings.effective_settings import queue_document
from marq.settings.queue import CHECKS
from marq.wire.errors import BrokerUnavailable, ConfigError
from marq.wire.names import Names
from marq_worker.commands import queue as command
from marq_worker.commands.queue import lines, read_changes
from tests.unit.app.definitions import defined


def test_values_are_written_as_in_queues_toml() -> None:
    changes = read_changes(
        [
            "lease=60",
            " max_attempts = 3 ",
            "backoff={base=1,factor=2,max=10,jitter=true}",
            "dead_letter=false",
            "group=background",
            'topic="shop.orders"',
            "handler=shop.orders:handle",
            "partitions=all",
            "ordering=key",
            'on_dead_letter="block"',
            "start=latest",
        ],
        ["concurrency"],
    )

    assert changes == {
        "lease": 60,
        "max_attempts": 3,
        "backoff": {"base": 1, "factor": 2, "max": 10, "jitter": True},
        "dead_letter": False,
        "group": "background",
        "topic": "shop.orders",
        "handler": "shop.orders:handle",
        "partitions": "all",
        "ordering": "key",
        "on_dead_letter": "block",
        "start": "latest",
        "concurrency": None,
    }
    assert read_changes(["partitions=2"], []) == {"partitions": 2}
    assert read_changes(["delivery=at-most-once", "expired=dead-letter"], []) == {
        "delivery": "at-most-once",
        "expired": "dead-letter",
    }


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("priority=high", "--set: priority: expected a whole number from 1 to 9, or false, not 'high'"),
        ("limits.rate=10/s", "--set: limits.rate: unknown key; write limits = { rate = … }"),
        ("limits={", "--set limits={: expected a value as in marq.toml: "),
        ("lease=soon", "--set lease=soon: expected a duration such as 90s"),
    ],
)
def test_an_error_of_a_value_names_the_setting_and_what_it_expects(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        read_changes([assignment], [])


def test_durations_are_also_written_with_units() -> None:
    assert read_changes(["lease=1h30m", "delay=0.5s", "max_lease=7d"], []) == {
        "lease": 5_400,
        "delay": 0.5,
        "max_lease": 604_800,
    }
    with pytest.raises(ConfigError, match="--set lease=1x: expected a duration such as 90s, 15m, 1h30m or 7d"):
        read_changes(["lease=1x"], [])


def test_all_values_start_in_one_column() -> None:
    settings = [line for line in lines(queue_document("emails", Definitions(), Names())) if line.endswith("  default")]

    assert len(settings) > 10
    assert len({len(line) for line in settings}) == 1


def test_errors_and_breakers_can_be_set_too_and_read_as_they_are_written() -> None:
    said = ["max_attempts=unlimited", 'errors={"a.B"=[1,5],ValueError="reject"}', "breaker={window=8}", "backoff=[1,5]"]

    changes = read_changes(said, [])

    assert changes == {
        "max_attempts": "unlimited",
        "errors": {"a.B": [1, 5], "ValueError": "reject"},
        "breaker": {"window": 8},
        "backoff": [1, 5],
    }
    shown = "\n".join(lines(queue_document("emails", defined(change__emails=changes), Names())))
    assert '"unlimited"' in shown
    assert '{ "a.B" = { delays = [1, 5], jitter = false }, ValueError = "reject" }' in shown
    assert "{ failure_rate = 0.5, window = 8, reset_timeout = 30 }" in shown


def test_a_removed_handler_is_shown() -> None:
    shown = queue_document("emails", Definitions(), Names())
    report = {"handler": "mail:send", "seconds": 400.0}

    assert any("no worker has run its handler mail:send" in line for line in lines(shown | {"removed_handler": report}))
    assert not any("handler mail" in line for line in lines(shown | {"removed_handler": None}))


@pytest.mark.parametrize(("keys", "said"), [
    (None, "  blocked keys: unknown, because no worker runs"),
    ({"complete": True, "count": 2, "first": []}, "  blocked keys: 2"),
    ({"complete": True, "count": 1_020, "first": []}, "  blocked keys: 1,020; 20 of them, with the most attempts"),
    ({"complete": False, "count": 0, "first": []}, "  blocked keys: 0; incomplete: a worker did not respond"),
])  # fmt: skip
def test_blocked_keys_are_counted_for_a_queue_with_ordering(keys: dict[str, Any] | None, said: str) -> None:
    shown = queue_document("orders", Definitions(), Names())

    assert any(line.startswith(said) for line in lines(shown | {"blocked_keys": keys}))
    assert not any("blocked" in line for line in lines(shown))


def test_waiting_keys_are_counted_for_a_queue_with_limits() -> None:
    shown = queue_document("orders", Definitions(), Names())
    keys = {"waiting": 1_020, "at_limit": 20, "busiest": []}

    assert "  keys in the trackers' handlers: 1,020 wait, 20 at a limit" in lines(shown | {"keys": keys})
    assert not any("keys" in line for line in lines(shown))


@pytest.mark.parametrize(
    ("assignments", "unset", "said"),
    [
        (["lease"], [], "--set lease: expected KEY=VALUE"),
        (["lease=soon"], [], "--set lease=soon: expected a duration such as"),
        (["lease=1\nmax_attempts=2"], [], "expected one value"),
        (["lease=1", "lease=2"], [], "--set lease: the key is given twice"),
        (["lease=1"], ["lease"], "--unset lease: the key is given twice"),
        ([], ["lease", "lease"], "--unset lease: the key is given twice"),
        (["lese=1"], [], "--set: lese: unknown key"),
        (["dead_letter=0"], [], "--set: dead_letter: expected true or false"),
        (["group='"], [], "--set group='"),
        ([], ["lese"], "--unset lese: unknown key; expected one of lease,"),
    ],
)
def test_a_mistake_is_named(assignments: list[str], unset: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_changes(assignments, unset)

    assert said in str(caught.value)


def test_settings_are_shown_with_where_they_come_from() -> None:
    definitions = defined(
        defaults={"lease": 20},
        handler__emails={"handler": "shop:send"},
        file__emails={"group": "background"},
        change__emails={"backoff": {"jitter": False}},
    )

    shown = queue_document("emails", definitions, Names())

    assert (shown["defined"], shown["group"], shown["consumer_group"]) == (True, "background", "marq.group.background")
    origins = {key: setting["from"] for key, setting in shown["settings"].items()}
    assert origins == dict.fromkeys(CHECKS, "default") | {
        "lease": "defaults", "backoff": "change", "group": "file", "handler": "handler",
    }  # fmt: skip
    assert lines(shown)[0] == "queue emails: group background (marq.group.background)"
    assert lines(shown)[1].split() == ["lease", "20", "[defaults]", "of", "marq.toml"]


def test_an_undefined_queue_is_shown_as_such() -> None:
    shown = queue_document("emails", Definitions(), Names())

    assert shown["defined"] is False
    assert lines(shown)[0] == "queue emails: a group of its own (marq.queue.emails); not defined"


def test_a_queue_on_few_partitions_is_shown_with_where_it_is_sent_and_read() -> None:
    definitions = Definitions()
    definitions.fold(b"placement:emails", {"sends": [3, 7], "reads": None})
    moving = queue_document("emails", definitions, Names())
    definitions.fold(b"placement:emails", {"sends": [3, 7], "reads": [3, 7]})
    moved = queue_document("emails", definitions, Names())

    assert lines(moving)[1] == "  messages are sent to partitions 3, 7; still read in all"
    assert lines(moved)[1] == "  messages are sent to partitions 3, 7"
    assert moved["partitions"] == {"sent_to": (3, 7), "read": (3, 7)}


class TwoChanges:
    """The queues of a broker that is lost after the second change."""

    def __init__(self) -> None:
        self.definitions = SimpleNamespace(names=lambda: {"a", "b", "c"})
        self.paused: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    def __getitem__(self, queue: str) -> Any:
        return SimpleNamespace(paused=queue in self.paused)

    async def pause(self, queue: str, duration_s: float | None) -> Any:
        if len(self.paused) == 2:
            raise BrokerUnavailable("the broker is gone")
        self.paused.add(queue)
        return self[queue]


@pytest.mark.parametrize("as_json", [False, True])
def test_queues_that_were_paused_before_an_error_are_named(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setattr(command, "ensure_topics", AsyncMock())
    monkeypatch.setattr(command, "Queues", SimpleNamespace(of=lambda client: TwoChanges()))

    ended = CliRunner().invoke(command.pause, ["a", "b", "c", *(["--json"] if as_json else [])])

    assert (ended.exit_code, ended.stderr) == (1, "marq: the broker is gone\n")
    if as_json:
        named = [row["queue"] for row in json.loads(ended.stdout)]
    else:
        named = [line.split()[1].rstrip(":") for line in ended.stdout.splitlines()]
    assert named == ["a", "b"]


def test_an_error_for_the_first_queue_prints_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = TwoChanges()
    queues.paused = {"x", "y"}
    monkeypatch.setattr(command, "ensure_topics", AsyncMock())
    monkeypatch.setattr(command, "Queues", SimpleNamespace(of=lambda client: queues))

    ended = CliRunner().invoke(command.pause, ["a", "--json"])

    assert (ended.exit_code, ended.stdout) == (1, "")
