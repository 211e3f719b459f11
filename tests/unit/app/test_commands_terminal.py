"""How commands end: by Ctrl-C on a real terminal, at a closed pipe, and with hostile texts."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError, MarqError, MessageTooLarge
from marq_worker.commands import send
from marq_worker.commands.command import BROKEN_PIPE, INTERRUPTED, Interrupted, ending
from marq_worker.commands.confirmation import confirm, typing
from marq_worker.findings import problem
from tests.terminal import Terminal

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ClientSettings.read("kafka:9092", {"prefix": "shop"}, environment={})
COMMAND = """
import asyncio, sys
from marq_worker.commands.command import ending
async def drain():
    print("draining", flush=True)
    await asyncio.sleep(3600)
async def peek():
    print("message" * 100_000)
async def queues():
    print("few")
sys.exit(ending(lambda: asyncio.run({}())))
"""


def command(name: str) -> list[str]:
    return [sys.executable, "-c", COMMAND.format(name)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("arguments", "waits_with", "said"),
    [
        (["-c", COMMAND.format("drain")], "draining", "earlier requests may still be carried out"),
        (["-m", "faust", "-A", "app", "web-password"], "Password: ", "no password was read"),
    ],
    ids=["drain", "web-password"],
)
def test_ctrl_c_ends_a_command(tmp_path: Path, arguments: list[str], waits_with: str, said: str) -> None:
    with Terminal([sys.executable, *arguments], environment(), tmp_path) as terminal:
        terminal.shows(waits_with)

        assert terminal.interrupted() == INTERRUPTED

    assert f"marq: interrupted: {said}" in terminal.shown
    assert "Traceback" not in terminal.shown


def test_ctrl_c_while_something_is_typed_ends_with_what_was_done_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: signal.raise_signal(signal.SIGINT)))

    with pytest.raises(Interrupted, match=r"^nothing was changed$"):
        confirm("Purge?", CLIENT, yes=False)
    with pytest.raises(Interrupted, match=r"^3 messages were sent$"), typing("3 messages were sent"):
        signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before


def test_a_password_from_a_closed_standard_input_is_refused_as_too_short(tmp_path: Path) -> None:
    process = subprocess.run(
        ["sh", "-c", 'exec "$0" -m faust -A app web-password <&-', sys.executable],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180,
    )  # fmt: skip

    assert process.returncode == 1
    assert "the password is too short" in process.stderr
    assert "Traceback" not in process.stderr


def test_an_abandoned_response_is_not_an_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("peek"), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()

    _, errors = process.communicate(timeout=180)

    assert process.returncode == BROKEN_PIPE
    assert errors == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("name", ["peek", "queues"])
def test_an_answer_that_a_full_disk_does_not_take_is_said_in_a_sentence(tmp_path: Path, name: str) -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            command(name), cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=180,
            check=False,
        )  # fmt: skip

    assert process.returncode == 1
    assert process.stderr.startswith(b"marq: the output could not be written: No space left on device")
    assert b"Traceback" not in process.stderr
    assert b"Exception ignored" not in process.stderr


def test_a_question_names_the_namespace_and_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: "y\n"))

    confirm("Purge?", CLIENT, yes=False)

    assert capsys.readouterr().err == "Purge? (shop at kafka:9092) [y/N] "


def test_without_standard_input_there_is_no_question_and_without_output_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(MarqError, match="nothing was changed; pass --yes"):
        confirm("Purge?", CLIENT, yes=False)
    with pytest.raises(ConfigError, match="standard input is closed"):
        send._all(20)

    monkeypatch.setattr(sys, "stdout", None)
    assert ending(lambda: 1) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_asking_the_workers_reports_an_unreachable_broker(tmp_path: Path) -> None:
    address = {"MARQ_BOOTSTRAP_SERVERS": "127.0.0.1:1", "MARQ_CONNECT_TIMEOUT": "1"}

    process = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "app", "delayed", "emails"],
        cwd=tmp_path, env={**environment(), **address}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip

    assert (process.returncode, process.stdout) == (1, "")
    assert "nothing listens at 127.0.0.1:1" in process.stderr
    assert "Traceback" not in process.stderr


def test_what_others_wrote_neither_moves_the_cursor_nor_forges_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise MarqError("queue 'a': no \x1b[2J\u202e\r\nmarq: all is well")

    assert ending(fails) == 1
    assert capsys.readouterr().err == "marq: queue 'a': no �[2J���marq: all is well\n"
    finding = problem("trackers", "1: evil\x1b[2J\nOK       all is well", advice="run\x9b", commands=["a\x1b", "b"])
    assert str(finding) == "PROBLEM  trackers: 1: evil�[2J�OK       all is well. Run�:\n         a�\n         b"


def test_lines_are_sent_in_batches() -> None:
    lines = [b"a", b"", b"c" * 20, b"d\re"] * 3_000

    pieces = list(send.pieces_of(io.BytesIO(b"\n".join(lines)), 20))

    assert [line for piece in pieces for line in piece] == lines
    assert len(pieces) == 3


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"more\n"])
def test_a_line_that_can_be_no_message_is_named_and_not_cut(end: bytes) -> None:
    with pytest.raises(MessageTooLarge, match="line 2 has more than 20 bytes"):
        list(send.pieces_of(io.BytesIO(b"a\n" + b"b" * 21 + end), 20))
