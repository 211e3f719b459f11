"""``pytest -p tests.costs``: what each test file costs, in seconds and in CPU seconds of all its processes.

With pytest-xdist a file must stay in one process (``--dist loadfile``), because CPU time is read from that process and
its descendants when its tests end. CPU time of a descendant that outlives its parent is not counted.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
#: Per file: tests, seconds, CPU seconds.
costs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])


def cpu_seconds() -> float:
    """CPU time of this process, its living descendants and all that they waited for."""
    parents: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        parents[int(fields[1])].append(int(stat.parent.name))
        ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += parents[process]
    return total / TICKS


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    began, used = time.monotonic(), cpu_seconds()
    yield
    cost = costs[item.nodeid.partition("::")[0]]
    cost[0] += 1
    cost[1] += time.monotonic() - began
    cost[2] += cpu_seconds() - used


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(costs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    costs.update(node.workeroutput.get("costs", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("costs per file: tests, seconds, CPU seconds")
    for name, (tests, seconds, cpu) in sorted(costs.items(), key=lambda item: -item[1][1]):
        terminalreporter.line(f"{tests:5.0f} {seconds:8.1f} {cpu:8.1f}  {name}")
    total = [sum(cost[column] for cost in costs.values()) for column in range(3)]
    terminalreporter.line(f"{total[0]:5.0f} {total[1]:8.1f} {total[2]:8.1f}  in all")
