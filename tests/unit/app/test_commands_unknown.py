"""What commands say of unknown queues."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from marq.settings.client import ClientSettings
from marq.wire.errors import Forbidden, UnknownQueue
from marq_worker.cli import cli
from marq_worker.commands import unknown

CLIENT = ClientSettings.read("127.0.0.1:1", {})


class Letters:
    """Stands in for the dead letters of a namespace whose only queue is emails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def check_known(self, queue: str) -> None:
        if self.error is not None:
            raise self.error
        if queue != "emails":
            raise UnknownQueue(queue, "emails", "To send messages there anyway, ...")


async def test_an_unknown_queue_is_named_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    await unknown.note_about(Letters(), "emails")
    await unknown.note_about(Letters(), "emials")

    assert capsys.readouterr().err == (
        "marq: queue 'emials' is unknown: it has no definition, no consumer and no messages. Did you mean 'emails'?\n"
    )


async def test_a_search_that_is_not_allowed_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    await unknown.note_about(Letters(Forbidden("no")), "emials")

    assert capsys.readouterr().err == ""


async def test_a_message_to_a_queue_without_a_consumer_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def names(client: ClientSettings) -> set[str]:
        return {"emails"}

    monkeypatch.setattr(unknown, "defined_or_consumed", names)

    await unknown.note_if_no_consumer(CLIENT, "emails")
    await unknown.note_if_no_consumer(CLIENT, "emials")
    await unknown.note_if_no_consumer(CLIENT, "x")

    assert capsys.readouterr().err == (
        "marq: queue 'emials' has no definition and no consumer, so its messages wait for one; did you mean 'emails'?\n"
        "marq: queue 'x' has no definition and no consumer, so its messages wait for one\n"
    )


async def test_a_sender_that_may_not_see_consumers_gets_no_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def names(client: ClientSettings) -> set[str]:
        raise Forbidden("no")

    monkeypatch.setattr(unknown, "defined_or_consumed", names)

    await unknown.note_if_no_consumer(CLIENT, "emials")

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("duration", ["0", "366d"])
def test_a_pause_that_is_too_short_or_long_is_refused_with_its_option(duration: str) -> None:
    ended = CliRunner().invoke(cli, ["pause", "emails", "--for", duration])

    assert (ended.exit_code, ended.output) == (
        1, f"marq: --for {duration}: expected a duration above 0, to 365d\n",
    )  # fmt: skip
