from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from demo.journal import Journal, JournalTail, What


def test_a_tail_reads_what_is_new(tmp_path: Path) -> None:
    tail = JournalTail(tmp_path / "journal")
    with Journal(tmp_path / "journal") as journal:
        journal.note(What.HANDLED, 3, 1, 0, 17)

        first, second = tail.read(), tail.read()

    assert [entry[:5] for entry in first] == [(What.HANDLED, 3, 1, 0, 17)]
    assert second == []


def test_a_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tail = JournalTail(path)
    assert tail.read() == []

    path.write_text("acked 3 1 0 17 1000\nacked 4 1 0 1")
    first = tail.read()
    with path.open("a") as file:
        file.write("8 1001\n")
    second = tail.read()

    assert [entry.offset for entry in (*first, *second)] == [17, 18]


def test_what_was_noted_outlives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    program = (
        "import os, signal, sys; from pathlib import Path; from demo.journal import Journal, What\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for number in range(1000): journal.note(What.HANDLED, number, 1, 0, number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    result = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False, timeout=180)

    assert result.returncode == -signal.SIGKILL
    assert [entry.number for entry in JournalTail(path).read()] == list(range(1000))
