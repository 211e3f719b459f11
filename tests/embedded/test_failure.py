"""What a broker's log becomes in an error message."""

from __future__ import annotations

from pathlib import Path

from marq_worker.broker import errors


def test_a_cause_is_found_also_far_above_the_end_of_the_log_of_which_the_message_quotes_the_end() -> None:
    lines = ["ERROR Failed to acquire lock on file .lock", *(f"\tat kafka.Frame{index}" for index in range(100))]

    message = errors.explain("it ended", "\n".join(lines), directory=Path("/data/kafka"), address="")

    assert message.startswith("it ended; another broker uses /data/kafka: stop that one or choose another directory\n")
    assert message.splitlines()[1:] == lines[-errors.LOG_TAIL_LINES :]
