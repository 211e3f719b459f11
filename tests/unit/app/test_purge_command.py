"""What `marq purge` and `marq replay` ask and print, with a count and a purge that need no broker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from click.testing import CliRunner

from marq.admin import purge as purging
from marq.admin import replay as replaying
from marq.admin.purge import Purged
from marq.admin.replay import Progress, Replayed
from marq.core.tracker import Tracker
from marq.kafka.inspector import Waiting
from marq.kafka.topics import Topics
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq_worker.commands import purge as command
from marq_worker.commands import replay as replay_command
from marq_worker.commands.command import INTERRUPTED

P0 = Source("marq.messages", 0)


class Counting:
    """A namespace whose messages are behind more records than a count reads."""

    def __init__(self, found: int) -> None:
        self._found = found

    async def waiting(self, queues: list[str], ends: dict[Source, int] | None = None) -> Waiting:
        return Waiting(Counter({queues[0]: self._found}), complete=False, ends={P0: 1_000_000})

    async def places(self, queues: list[str]) -> dict[str, dict[Source, int]]:
        return {queue: {P0: 0} for queue in queues}

    async def owned(self) -> dict[int, object]:
        return {0: SimpleNamespace(tracker=Tracker(Definitions().settings, 9))}

    async def ranges(self, topic: str) -> dict[Source, range]:
        return {P0: range(5_000_000)}


@pytest.fixture
def purged(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    """The purge that the command calls."""
    purged = AsyncMock(return_value=Purged(waiting=4_000_000))
    monkeypatch.setattr(purging, "purge", purged)
    monkeypatch.setattr(purging, "ensure_topics", AsyncMock(return_value=Topics(1, 1, 10_000, 10_000)))
    monkeypatch.setattr(
        purging, "Queues", SimpleNamespace(of=lambda settings: nullcontext(SimpleNamespace(definitions=None)))
    )
    monkeypatch.setattr(command, "note_if_unknown", AsyncMock())
    return purged


@pytest.fixture(params=[0, 1_000])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the queue's messages the incomplete count found."""
    counting = Counting(request.param)
    monkeypatch.setattr(purging, "Inspector", lambda settings, definitions: counting)
    monkeypatch.setattr(purging, "LogReader", lambda settings, committed: nullcontext(counting))
    return counting._found


def test_a_purge_whose_count_is_incomplete_needs_a_confirmation(purged: AsyncMock, found: int) -> None:
    ended = CliRunner().invoke(command.purge, ["emails"], input="")

    assert ended.exit_code == 1
    assert f"Purge at least {found:,} messages (counting stopped after 1,000,000 records) of queue" in ended.stderr
    purged.assert_not_called()


def test_a_confirmed_purge_ends_all_messages_that_waited(purged: AsyncMock, found: int) -> None:
    ended = CliRunner().invoke(command.purge, ["emails", "--json"], input="y\n")

    assert ended.exit_code == 0
    assert purged.call_args.kwargs["extent"].ends == {P0: 5_000_000}
    document = json.loads(ended.stdout)
    assert (document["waiting"], document["complete"]) == (4_000_000, True)


def test_a_dry_run_says_that_its_count_is_incomplete(purged: AsyncMock, found: int) -> None:
    text, document = (CliRunner().invoke(command.purge, ["emails", "--dry-run", *more]) for more in ((), ("--json",)))

    assert (text.exit_code, document.exit_code) == (1, 1)
    assert f"at least {found:,} messages (counting stopped after 1,000,000 records) would be purged" in text.stdout
    assert json.loads(document.stdout)["complete"] is False
    purged.assert_not_called()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--older", "soon"], "--older soon: expected an age such as 90s"),
        (["--older", "1h", "--dead"], "--older with --dead: run marq dead emails --delete --older 1h instead"),
    ],
)
def test_what_is_purged_by_age_is_understood_or_nothing_is(purged: AsyncMock, options: list[str], said: str) -> None:
    ended = CliRunner().invoke(command.purge, ["emails", *options, "--yes"])

    assert ended.exit_code != 0
    assert said in ended.stderr
    purged.assert_not_called()


def test_the_document_of_an_interrupted_purge_has_no_planned_numbers(purged: AsyncMock, found: int) -> None:
    purged.side_effect = asyncio.CancelledError
    ended = CliRunner().invoke(command.purge, ["emails", "--json", "--yes"])

    assert ended.exit_code == INTERRUPTED
    document = json.loads(ended.stdout)
    assert (document["interrupted"], document["complete"]) == (True, False)
    assert {document[kind] for kind in ("waiting", "redelivery", "delayed", "dead_letters")} == {None}


def test_the_document_of_an_interrupted_replay_has_the_number_of_messages_that_were_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def replay(*_: object, identity: str, progress: Progress | None = None, **options: object) -> Replayed:
        if progress is not None:
            progress(300, 1_000)
            raise asyncio.CancelledError
        return Replayed(identity, messages=1_000, unfinished=2)

    monkeypatch.setattr(replaying, "replay", replay)

    ended = CliRunner().invoke(replay_command.replay, ["emails", "--since", "1h", "--json", "--yes"])

    assert ended.exit_code == INTERRUPTED
    document = json.loads(ended.stdout)
    assert (document["interrupted"], document["messages"], document["unfinished"]) == (True, 300, 2)
