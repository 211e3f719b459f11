"""What commands look at again and again, what their options say, and what they say in the end."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiokafka.errors import GroupAuthorizationFailedError

from marq.admin.purge import Purged
from marq.admin.replay import Replayed, Start
from marq.kafka.group_members import DescribedGroup
from marq.wire.errors import BrokerUnavailable, ConfigError, Forbidden
from marq.wire.markers import Source
from marq_worker.commands import purge, replay, state
from marq_worker.commands.command import Interrupted
from marq_worker.commands.terminal import looked

LIMIT_S = 60.0


Answer = dict[str, int] | Exception


class Looks:
    """Looks with these answers; the one after the last never ends."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.over = asyncio.Event()

    async def look(self) -> dict[str, int]:
        if not self.answers:
            self.over.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def watched(self) -> None:
        """Watch until all answers were given, and interrupt."""
        watching = asyncio.create_task(looked(self.look, print, watch=0.001, as_json=True))
        async with asyncio.timeout(LIMIT_S):
            over = asyncio.create_task(self.over.wait())
            await asyncio.wait([watching, over], return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            with pytest.raises(Interrupted, match=r"^$"):
                await watching


async def test_watch_prints_a_document_per_line_and_an_outage_once_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = BrokerUnavailable("no Kafka broker could be used at b:9092")

    await Looks({"look": 1}, away, away, {"look": 2}, away, {"look": 3}).watched()

    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{"look": 1}, {"look": 2}, {"look": 3}]
    assert err == 2 * f"marq: {away}; waiting for it, until Ctrl-C\n"


@pytest.mark.parametrize(
    "answers",
    [[BrokerUnavailable("nothing listens")], [{"look": 1}, Forbidden("no right")], [{"look": 1}, ConfigError("no")]],
)
async def test_a_first_failure_or_a_permanent_one_ends_a_watch(answers: list[Answer]) -> None:
    looks = Looks(*answers)

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises((BrokerUnavailable, ConfigError)):
            await looked(looks.look, print, watch=0.001, as_json=True)

    assert not looks.answers


async def test_without_watch_the_command_looks_once() -> None:
    shown: list[dict[str, int]] = []

    assert await looked(Looks({"look": 1}).look, shown.append, watch=None, as_json=False) == {"look": 1}
    assert shown == [{"look": 1}]


def test_a_purge_says_what_it_ended() -> None:
    found = Purged(waiting=1_200, redelivery=3, delayed=0, dead_letters=1)

    text = purge.said("emails", found, complete=True, dry_run=False)

    assert text == "queue 'emails': 1,204 messages purged (1,200 waiting, 3 for redelivery, 1 dead-lettered)"
    one = Purged(waiting=1)
    assert purge.said("emails", one, complete=True, dry_run=False) == "queue 'emails': 1 message purged (1 waiting)"
    assert "would be purged" in purge.said("emails", found, complete=True, dry_run=True)
    assert "there were none" in purge.said("emails", Purged(), complete=True, dry_run=False)


def test_a_replay_says_how_it_is_gone_on_with() -> None:
    found = Replayed("abc", messages=5, unfinished=1)

    assert "1 are unfinished" in replay.said("emails", found, dry_run=False)
    # The start stays the same as time passes.
    start = Start(1_896_076_800_007)
    text = replay.interrupted_after(3, found, start)
    assert "at least 3 of 5 messages are delivered again" in text
    assert text.endswith("continue with --since 2030-01-31T08:00:00.007+00:00 --id abc")
    assert replay.read_start("2030-01-31T08:00:00.007+00:00", None) == start
    place = Start(place=(Source("marq.messages", 3), 120))
    assert replay.further(place, "abc") == "--from marq.messages/3/120 --id abc"


def test_a_replay_begins_at_a_time_or_at_a_place() -> None:
    assert replay.read_start(None, "marq.messages/3/120") == Start(place=(Source("marq.messages", 3), 120))
    assert replay.read_start("2030-01-31T08:00:00+00:00", None) == Start(1_896_076_800_000)
    # Before all messages that Kafka can have.
    assert replay.read_start("999999d", None) == replay.read_start("0001-01-01T00:00:00+00:00", None) == Start(0)
    age = replay.read_start("2h", None)
    assert age.time_ms is not None
    assert age.place is None


@pytest.mark.parametrize(
    ("since", "place", "said"),
    [
        (None, None, "give --since"),
        ("2h", "marq.messages/3/120", "give --since"),
        ("soon", None, "--since soon: expected a duration"),
        ("2030-01-31T08:00:00", None, "a time with a time zone"),
        (None, "marq.messages", "topic/partition/offset"),
    ],
)
def test_a_start_that_is_none_is_named(since: str | None, place: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay.read_start(since, place)


async def test_an_unknown_group_is_not_a_group_without_partitions() -> None:
    admin = SimpleNamespace()

    with pytest.raises(GroupAuthorizationFailedError):
        await state._group(admin, DescribedGroup("marq-app", error=30))
