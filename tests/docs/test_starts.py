"""How programs and commands start, and how Ctrl-C ends them before they have begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

LIMIT_S = 120
PROGRAMS = ("examples.run", "examples.consume", "examples.receive", "examples.standalone.processor")
#: Ctrl-C while a program's consumer starts. Background jobs of a shell ignore Ctrl-C.
INTERRUPTED = """
import asyncio, os, runpy, signal, sys, marq
signal.signal(signal.SIGINT, signal.default_int_handler)
async def start(consumer):
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(3600)
marq.Consumer.start = start
sys.argv[1:] = ["jobs"] if sys.argv[1] != "examples.standalone.processor" else []
runpy.run_module(sys.orig_argv[-1], run_name="__main__")
"""


@pytest.mark.verify
def test_ctrl_c_right_after_the_start_of_an_example_prints_no_traceback() -> None:
    started = {
        program: subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, program], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for program in PROGRAMS
    }
    try:
        ends = {
            program: (process.communicate(timeout=LIMIT_S)[1], process.returncode)
            for program, process in started.items()
        }
    finally:
        for process in started.values():
            process.kill()
            process.wait()

    assert ends == dict.fromkeys(PROGRAMS, ("", 0))


def test_commands_run_from_any_directory_that_names_the_checkout(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("faust"), "-W", ROOT, "-A", "app", "queues", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert "Show all queues" in done.stdout
