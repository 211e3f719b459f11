"""What a broker's log becomes in an error message."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

import pytest

from marq_worker.broker import EmbeddedBroker, errors
from marq_worker.broker.directory import BrokerDirectory


def test_a_cause_is_found_also_far_above_the_end_of_the_log_of_which_the_message_quotes_the_end() -> None:
    lines = ["ERROR Failed to acquire lock on file .lock", *(f"\tat kafka.Frame{index}" for index in range(100))]

    message = errors.explain("it ended", "\n".join(lines), directory=Path("/data/kafka"), address="")

    assert message.startswith("it ended; another broker uses /data/kafka: stop that one or choose another directory\n")
    assert message.splitlines()[1:] == lines[-errors.LOG_TAIL_LINES :]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.EADDRINUSE,
            "10.0.0.9:80 is in use: set MARQ_BOOTSTRAP_SERVERS to another host:port, or stop what listens",
        ),
        (errno.EADDRNOTAVAIL, "10.0.0.9 is not an address of this machine (no): use one, such as 127.0.0.1"),
        (errno.EACCES, "10.0.0.9:80: this user may not listen there: choose a port above 1023"),
    ],
)
def test_an_address_that_cannot_be_used_is_said_to_be_in_use_only_if_it_is(number: int, said: str) -> None:
    assert said in errors.not_bound("10.0.0.9", 80, OSError(number, "no"))


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free space there"), (errno.EACCES, "choose another directory")],
)
def test_a_directory_that_cannot_be_written_needs_space_only_if_it_is_full(number: int, advice: str) -> None:
    assert f"; {advice} (TMPDIR" in errors.not_written("directory", OSError(number, "no"))


def test_an_address_that_stands_for_all_addresses_is_explained() -> None:
    log = "requirement failed: advertised.listeners cannot use the nonroutable meta-address 0.0.0.0."

    message = errors.explain("it ended", log, directory=Path("/data"), address="0.0.0.0:9092")

    assert message.startswith("it ended; clients cannot connect to 0.0.0.0 or [::]: choose an address of this machine")


def test_an_empty_log_is_explained_by_a_disk_without_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk has no space for the log either."""
    assert "see the end of its log" in errors.explain("it ended", "", directory=tmp_path, address="")

    def on_full_disk(**_: object) -> IO[bytes]:
        return Path("/dev/full").open("wb", buffering=0)

    monkeypatch.setattr("tempfile.TemporaryFile", on_full_disk)

    message = errors.explain("it ended", "", directory=tmp_path, address="")
    assert message.startswith(f"it ended; the disk of {tmp_path} is full: free space there or choose another directory")


def test_a_broker_that_ended_on_a_full_disk_names_its_directory(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path, address="127.0.0.1:9092")
    broker._directory = BrokerDirectory(tmp_path)
    broker._directory.console.write_text("java.io.IOException: No space left on device\n\tat java.io.Write\n")

    assert broker.why_it_ended().startswith(
        f"the broker exited unexpectedly; the disk of {tmp_path} is full: free space there or choose another directory"
    )
