"""The load of a worker's processes is that of the last seconds, and None where it is not known; stopped processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, cast
from unittest.mock import Mock

import pytest
from yarl import URL

from marq.version import VERSION
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.process_usage import UNKNOWN, ProcessUsage, Usage, is_stopped, usage_of
from marq_worker.web.partition_statistics import Statistics
from marq_worker.web.statistics import NamespaceStatistics, worker_statistics

CHILD = 4711


class Machine:
    """A clock, and the CPU time of processes."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = {os.getpid(): 1.0, CHILD: 50.0}
        self.usage = ProcessUsage(lambda: [CHILD], self.read, lambda: self.now_s)

    def read(self, pid: int) -> Usage | None:
        return Usage(self.cpu_s[pid], 7 << 20) if pid in self.cpu_s else None

    def pass_by(self, seconds: float, **cpu_s: float) -> None:
        self.now_s += seconds
        self.cpu_s[os.getpid()] += cpu_s.get("own", 0.0)
        self.cpu_s[CHILD] = self.cpu_s.get(CHILD, 0.0) + cpu_s.get("child", 0.0)


def test_the_load_is_that_since_the_last_sample_but_one() -> None:
    machine = Machine()
    assert machine.usage.of(CHILD) == {"cpu": None, "memory_bytes": 7 << 20}
    machine.usage.sample()
    machine.pass_by(5, own=5, child=0)
    machine.usage.sample()
    machine.pass_by(5, own=0, child=5)
    machine.usage.sample()

    # The first sample is forgotten.
    assert machine.usage.of(CHILD)["cpu"] == 1.0
    assert machine.usage.worker()["cpu"] == 0.0
    assert machine.usage.worker()["uptime_seconds"] == 10.0


def test_a_process_that_has_ended_or_just_begun_has_no_load() -> None:
    machine = Machine()
    machine.usage.sample()
    del machine.cpu_s[CHILD]
    assert machine.usage.of(CHILD) == machine.usage.of(None) == {"cpu": None, "memory_bytes": None}
    machine.usage.sample()

    # Another one has its number now, and has used less.
    machine.pass_by(5, child=1)

    assert machine.usage.of(CHILD)["cpu"] == 0.0


def test_a_worker_reports_its_process_and_nothing_is_known_of_one_of_an_older_version() -> None:
    machine, group = Machine(), cast("Any", None)
    handlers = [{"group": "emails", "pid": CHILD}, {"group": "reports", "pid": None}]
    worker = Statistics(TrackerOwners("markers"))

    told = NamespaceStatistics(Mock(), worker, group, lambda: handlers, usage=machine.usage).local()
    older = worker_statistics(URL("http://there:1"), {"queues": {}, "partitions": []})

    assert (told["process"]["version"], told["process"]["memory_bytes"]) == (VERSION, 7 << 20)
    assert [process["memory_bytes"] for process in told["handlers"]] == [7 << 20, None]
    assert (told["process"].keys(), older["process"]) == (UNKNOWN.keys(), UNKNOWN)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_system_tells_the_usage_of_processes_whatever_their_names() -> None:
    own = usage_of(os.getpid())

    assert own is not None
    assert own.cpu_seconds > 0
    assert 1 << 20 < own.memory_bytes < 1 << 40
    assert usage_of(2**31 - 1) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_system_tells_whether_a_signal_has_stopped_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        runs = is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        # Returns when it has stopped.
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = is_stopped(child.pid)
        child.kill()

    assert (runs, stopped, is_stopped(child.pid)) == (False, True, False)
