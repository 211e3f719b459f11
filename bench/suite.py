"""What the benchmark is made of: rows, each of which measures some systems in turn on a broker of its own.

A row has a fresh broker, so that it finds the same whether it runs alone or after others. Each of its systems is run
once with fewer messages, unmeasured, before anything counts: the broker's Java has compiled its paths then. Then the
systems take turns, so that what else the machine does meets all of them. Each measurement has topics of its own, which
are deleted after it: the next one finds the disk and the page cache as this one did.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from aiokafka.admin import AIOKafkaAdminClient

from bench.bars import Bar
from bench.settings import Size
from broker import EmbeddedBroker

Figures = dict[str, float]
Medians = Mapping[str, Figures]
Say = Callable[[str], None]

#: Messages of the unmeasured run of each system.
WARM_MESSAGES = 100_000
#: How long one process of a measurement may take.
LIMIT_SECONDS = 300.0
BROKER_HEAP = "1g"
BROKER_PROPERTIES = {
    # What was measured is gone from the disk before the next measurement has filled it again; the default is a minute.
    "log.segment.delete.delay.ms": "500",
}


class Skipped(Exception):
    """A system can't be measured on this machine; the text says why."""


@dataclass
class Bench:
    """What a measurement gets: a broker that runs, a folder for data, the size, and where to say how it goes."""

    servers: str
    folder: Path
    size: Size
    say: Say
    broker: EmbeddedBroker | None = None
    _prefixes: list[str] = field(default_factory=list)

    def prefix(self) -> str:
        """Return a prefix for topics of one measurement; they are deleted when it has ended."""
        self._prefixes.append(f"bench-{uuid.uuid4().hex[:10]}")
        return self._prefixes[-1]

    @property
    def broker_pid(self) -> int:
        """Of the broker's process, for what it takes."""
        assert self.broker is not None
        assert self.broker.pid is not None, "the broker has ended"
        return self.broker.pid

    def log_bytes(self, topic: str) -> int:
        """Return what the broker's log files of a topic's partitions hold."""
        assert self.broker is not None
        files = (self.broker.data_directory / "data").glob(f"{topic}-*/*.log")
        return sum(file.stat().st_size for file in files)

    def clear(self) -> None:
        """Delete all topics and folders of prefixes that were given out."""
        prefixes = tuple(self._prefixes)
        if prefixes:
            asyncio.run(delete_topics(self.servers, prefixes))
            for prefix in prefixes:
                shutil.rmtree(self.folder / prefix, ignore_errors=True)
        self._prefixes.clear()


System = Callable[[Bench], Figures]


def _none_judged(medians: Medians) -> list[Bar]:
    return []


def _nothing_to_add(medians: Medians) -> list[str]:
    return []


@dataclass(frozen=True)
class Row:
    """One comparison: ``systems`` are measured in turn; ``what`` is one sentence.

    Each is measured as often as the size says, ``runs`` times at the most, after one with ``warm`` messages (0: none).
    ``of_messages`` is how many there are for each of the size's; ``broker_properties`` go over those of all rows;
    ``bars`` and ``notes`` (lines to be printed) get the median of each figure of each system that was not skipped.
    """

    name: str
    what: str
    systems: Mapping[str, System]
    bars: Callable[[Medians], list[Bar]] = _none_judged
    notes: Callable[[Medians], list[str]] = _nothing_to_add
    runs: int = 99
    warm: int = WARM_MESSAGES
    of_messages: float = 1.0
    broker_properties: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a row has found. ``error`` says why it ended before its end; then there are no bars."""

    row: Row
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def medians(self) -> dict[str, Figures]:
        return {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in self.runs.items()}


def measure(row: Row, folder: Path, size: Size, say: Say) -> Outcome:
    """Measure a row; an error is said, and ends this row only."""
    outcome = Outcome(row)
    began = time.monotonic()
    say(f"{row.name}: {row.what}")
    try:
        with EmbeddedBroker(heap=BROKER_HEAP, properties={**BROKER_PROPERTIES, **row.broker_properties}) as broker:
            messages = replace(size, messages=round(size.messages * row.of_messages))
            _take_turns(outcome, Bench(broker.bootstrap_servers, folder, messages, say, broker))
        outcome.bars = row.bars(outcome.medians)
        outcome.notes = row.notes(outcome.medians)
    except (Exception, SystemExit) as error:
        outcome.error = "".join(traceback.format_exception(error, limit=-4)).strip()
        say(f"{row.name}: FAILED\n{outcome.error}")
    outcome.seconds = time.monotonic() - began
    say(f"{row.name}: {outcome.seconds:.0f} s")
    return outcome


def _take_turns(outcome: Outcome, bench: Bench) -> None:
    row = outcome.row
    if row.warm:
        smaller = replace(bench, size=replace(bench.size, messages=min(row.warm, bench.size.messages)))
        for name in row.systems:
            _once(outcome, smaller, name)
    runs = min(bench.size.runs, row.runs)
    for turn in range(runs):
        for name in row.systems:
            figures = _once(outcome, bench, name)
            if figures is not None:
                outcome.runs.setdefault(name, []).append(figures)
                bench.say(f"{row.name} {turn + 1}/{runs} {name}: {shown(figures)}")


def _once(outcome: Outcome, bench: Bench, name: str) -> Figures | None:
    if name in outcome.skipped:
        return None
    try:
        return outcome.row.systems[name](bench)
    except Skipped as why:
        outcome.skipped[name] = str(why)
        bench.say(f"{outcome.row.name} {name}: SKIPPED: {why}")
        return None
    finally:
        bench.clear()


def shown(figures: Figures) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {show_number(figure)}" for name, figure in figures.items())


def show_number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def measured(module: str, *arguments: str, limit_seconds: float = LIMIT_SECONDS) -> Figures:
    """Run a module as a process of its own; return the figures that its last line is, as JSON.

    Raises:
        SystemExit: it failed, or took longer than the limit.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"bench: {module} was not done after {limit_seconds} s") from None
    if done.returncode:
        raise SystemExit(f"bench: {module} failed:\n{done.stdout}{done.stderr}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


async def delete_topics(servers: str, prefixes: Sequence[str]) -> None:
    """Delete all topics whose names begin with one of these."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        mine = [name for name in await admin.list_topics() if name.startswith(tuple(prefixes))]
        if mine:
            await admin.delete_topics(mine)
    finally:
        await admin.close()
