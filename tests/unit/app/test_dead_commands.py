"""What the options of the commands about dead letters say, and what they show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import marq
from marq.client.dead_letter import DeadLetter
from marq.dead_letters.dead_letters import Deleted, Redriven
from marq.dead_letters.filters import DeadLetterFilter
from marq.dead_letters.log import Stored
from marq.dead_letters.snapshots import Snapshot
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq.wire.errors import ConfigError
from marq_worker.commands.command import Setup
from marq_worker.commands.dead import _show_letters, ask_and_act, dead, described, read_filters, said
from marq_worker.config.settings import load_settings

CLIENT = ClientSettings.read("kafka:9092", {}, environment={})
ASKED = Snapshot(1_795_327_200_000, {0: 120, 1: 33})
NOTHING: dict[str, Any] = {
    "reason": None, "error": None, "headers": (), "older": None, "newer": None, "identity": None,
}  # fmt: skip


def test_options_are_read_as_filters() -> None:
    filters = read_filters(
        "bad", "Timeout", ["tenant=acme=1", "flag", "empty="], "2h", "2030-01-31T08:00:00+00:00", "marq.messages/0/7"
    )

    assert filters == {
        "reason": "bad",
        "error": "Timeout",
        "header": {"tenant": "acme=1", "flag": None, "empty": ""},
        "older_than": 7_200.0,
        "newer_than": datetime(2030, 1, 31, 8, tzinfo=UTC),
        "id": "marq.messages/0/7",
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"older": "soon"}, "--older soon: expected an age such as"),
        ({"newer": "7w"}, "--newer 7w: expected an age"),
        ({"newer": "-3s"}, "--newer -3s: expected an age"),
        ({"newer": "2030-01-31T08:00:00"}, "a time with a time zone"),
        ({"headers": ["=x"]}, "--header =x: expected NAME or NAME=VALUE"),
        ({"headers": ["a", "a=1"]}, "--header a=1: expected NAME or NAME=VALUE, each name once"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_filters(**{**NOTHING, **options})

    assert text in str(caught.value)


def test_how_far_a_call_came_is_said() -> None:
    assert said(Redriven(5, 5, 4, 1)) == "4 of 5 dead letters redriven, 1 already settled"
    assert said(Deleted(3, 3, 3)) == "3 of 3 dead letters deleted"
    assert said(Deleted(3), dry_run=True) == "3 dead letters would be deleted; nothing was changed"
    assert said(Redriven(9, 4, 2), interrupted=True) == (
        "interrupted: 2 of 9 dead letters redriven. 4 were requested and will still be redriven; repeat the command for"
        " the rest"
    )


class Letters:
    """Dead letters of a known queue, of which a snapshot can be taken."""

    async def snapshot(self) -> Snapshot:
        return ASKED

    async def check_known(self, queue: str) -> None: ...


async def test_where_there_was_nothing_to_ask_about_nothing_is_deleted() -> None:
    calls: list[dict[str, Any]] = []

    async def delete(**options: Any) -> Deleted:
        calls.append(options)
        return Deleted(0)

    document = {"queue": "emails"}
    code = await ask_and_act(
        CLIENT,
        Letters(),
        delete,
        ("Delete", "permanently"),
        document,
        limit=None,
        dry_run=False,
        as_json=False,
        yes=False,
    )  # type: ignore[arg-type]

    assert code == 0
    assert calls == [{"limit": None, "dry_run": True, "as_of": ASKED}]


async def test_a_deletion_is_of_the_letters_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("marq_worker.commands.dead.confirm", lambda question, client, **_: asked.append(question))
    calls: list[dict[str, Any]] = []

    async def delete(*, dry_run: bool = False, **options: Any) -> Deleted:
        calls.append(options)
        return Deleted(726) if dry_run else Deleted(726, 726, 726)

    question = ("Delete", "of queue 'emails' permanently")
    await ask_and_act(CLIENT, Letters(), delete, question, {}, limit=None, dry_run=False, as_json=False, yes=False)  # type: ignore[arg-type]

    assert asked == ["Delete 726 dead letters of queue 'emails' permanently?"]
    assert [call["as_of"] for call in calls] == [ASKED] * 2


def test_a_snapshot_is_read_as_it_was_written_and_ages_are_counted_back_from_it() -> None:
    assert Snapshot.parse(str(ASKED)) == ASKED
    assert Snapshot.parse(str(Snapshot(5, {}))) == Snapshot(5, {})
    for text in ("", "x", "1/x", "1/0", "1/0:1;", "1/0:1,", "1/" + "1:1111111111" * 1_000, "9" * 20 + "/0:1"):
        with pytest.raises(ConfigError, match="not a snapshot"):
            Snapshot.parse(text)

    def letter(partition: int, offset: int, died_ms: int) -> Stored:
        return Stored(partition, offset, 0, b"q", b"", [("marq-dead-lettered-at", b"%d" % died_ms)])

    # An hour after the question nothing else is old enough than was then.
    fits = DeadLetterFilter.read("delete", {"older_than": 60, "as_of": ASKED}, ASKED.at_ms + 3_600_000).fits
    old_ms, young_ms = ASKED.at_ms - 60_000, ASKED.at_ms - 59_999
    assert [fits(letter(0, offset, old_ms)) for offset in (119, 120)] == [True, False]
    # A partition that the topic did not have then.
    assert not fits(letter(9, 0, old_ms))
    assert not fits(letter(0, 0, young_ms))


def test_a_dead_letter_is_shown_with_all_details() -> None:
    headers = [
        ("tenant", b"acme"), ("raw", b"\xff"), ("null", None), ("marq-id", b"marq.messages/0/7"),
        ("marq-attempt", b"5"), ("marq-first-sent", b"1700000000000"), ("marq-reason", b"no good"),
        ("marq-error", b"LookupError: x"),
        ("marq-traceback", b"Traceback: in send"), ("marq-origin", b"marq.messages/1/9"),
        ("marq-dead-lettered-at", b"1700000060000"),
    ]  # fmt: skip
    record = Stored(1, 4, 1_800_000_000_000, b"emails", b"x" * 2_000, headers)

    shown = described(DeadLetter(record, "emails", "marq.dead-letters", None))

    assert shown == {
        "id": "marq.messages/0/7",
        "type": None,
        "queue": "emails",
        "reason": "no good",
        "last_error": "LookupError: x",
        "traceback": "Traceback: in send",
        "attempts": 5,
        "first_sent": "2023-11-14T22:13:20.000+00:00",
        "dead_lettered_at": "2023-11-14T22:14:20.000+00:00",
        "origin": "marq.messages/1/9",
        "partition": 1,
        "offset": 4,
        "bytes": 2_000,
        "value": "x" * 1_024,
        "headers": {"tenant": "acme", "raw": "\ufffd", "null": None},
    }


def letter_of(*headers: tuple[str, bytes]) -> DeadLetter:
    named = [("marq-id", b"marq.messages/0/7"), ("marq-attempt", b"3"), ("marq-dead-lettered-at", b"1700000060000")]
    record = Stored(0, 0, 1_700_000_000_000, b"billing", b'{"order": 2}', [*named, *headers])
    return DeadLetter(record, "billing", "marq.dead-letters", None)


def test_a_dead_letter_is_listed_with_its_error_first_and_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    error = b"ValueError: cannot bill order 2, because its customer has no address"
    reason = b"3 of 3 attempts used: the last time it was released"
    letter = letter_of(("marq-error", error), ("marq-reason", reason), ("marq-traceback", b"Traceback:\n  in bill"))

    _show_letters("billing", [letter], 20, as_json=False, traceback=False)

    assert capsys.readouterr().out.splitlines() == [
        "given up after 3 attempts, last error:",
        "ValueError: cannot bill order 2, because",
        "its customer has no address",
        "  marq.messages/0/7  2023-11-14 22:14:20 UTC  attempts: 3  bytes: 12",
        '  {"order": 2}',
        "",
        "--traceback shows where each of them failed last",
    ]


async def test_a_dead_letter_does_not_say_that_each_attempt_failed_with_its_last_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def bill(message: marq.Message) -> None:
        if message.attempt == 1:
            raise ValueError("cannot bill")
        raise marq.Retry

    async with Broker(queues={"billing": {"max_attempts": 3}}) as broker, broker.producer() as producer:
        await producer.send("billing", b"7")
        await broker.run(marq.handler("billing")(bill))
        async with marq.DeadLetters(bootstrap_servers=broker.address) as dead_letters:
            letters = [letter async for letter in dead_letters.peek("billing")]

    _show_letters("billing", letters, 20, as_json=False, traceback=False)

    assert capsys.readouterr().out.startswith("given up after 3 attempts, last error: ValueError: cannot bill\n")


async def test_dead_letters_are_counted_by_their_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Most have used up their attempts, which does not say what to fix."""

    async def bill(message: marq.Message) -> None:
        raise ValueError(f"cannot bill order {message.value.decode()}")

    async with Broker(queues={"billing": {"max_attempts": 1}}) as broker, broker.producer() as producer:
        await producer.send_many("billing", [b"7", b"8"])
        await broker.run(marq.handler("billing")(bill))
        setup = Setup(load_settings(), ClientSettings.read(broker.address, {}))
        count_all = {"name": None, "limit": None, "count": False, "traceback": False, "delete": False, "dry_run": False}
        code = await dead.callback.__wrapped__(setup, **count_all, **NOTHING, as_json=False, yes=False)  # type: ignore[union-attr]

    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=2) == [
        "billing", "2", "ValueError: cannot bill order N",
    ]  # fmt: skip


def test_a_dead_letter_is_listed_with_its_traceback_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    rejected = letter_of(("marq-reason", b"no such order"), ("marq-traceback", b"Traceback:\n  in \x1b[31mbill"))
    expired = letter_of(("marq-reason", b"its lease ran out"), ("marq-error", b"OSError: down"))

    _show_letters("billing", [rejected, expired], 20, as_json=False, traceback=True)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no such order"
    assert lines[3:5] == ["    Traceback:", "      in \ufffd[31mbill"]
    assert lines[6:8] == ["its lease ran out", "  last error: OSError: down"]
    assert lines[10] == "    no traceback: no exception ended it, or none was kept"


def test_foreign_headers_do_no_harm() -> None:
    headers = [
        ("marq-dead-lettered-at", b"9" * 15),
        ("marq-attempt", b"-1"),
        ("marq-first-sent", b"x"),
        ("marq-reason", b"\xff"),
    ]
    record = Stored(0, 0, 1_700_000_000_000, b"emails", None, headers)

    shown = described(DeadLetter(record, "emails", "marq.dead-letters", None))

    assert (shown["dead_lettered_at"], shown["attempts"], shown["value"]) == ("1970-01-01T00:00:00.000+00:00", 1, "")
    assert (shown["id"], shown["reason"]) == ("marq.dead-letters/0/0", "\ufffd")
