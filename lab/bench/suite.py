"""Rows of the benchmark: each compares some systems on a broker of its own; their tables, result files and exit code.

A row gets a fresh broker, so that its results do not depend on the rows before it. Each system first runs once with
fewer messages, unmeasured, until the broker's JVM has compiled its hot paths. Then the systems take turns, so that
other load on the machine affects all of them; every second turn is in reverse order (A B B A), so that no system
always follows the same one. Each measurement has its own topics and deletes them afterwards: the next one finds the
disk and the page cache in the same state.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench.client import fill
from lab.program import START_SECONDS, BenchClient, RunError, Worker
from lab.report import terminal_table
from lab.topics import delete_topics
from marq.kafka.topics import Topics, ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker, java
from marq_worker.broker.downloads import VERSION as KAFKA_VERSION

Measurements = dict[str, float]
Medians = Mapping[str, Measurements]
Say = Callable[[str], None]

#: Messages of the unmeasured run of each system.
WARM_MESSAGES = 100_000
BROKER_HEAP = "1g"
BROKER_PROPERTIES = {
    # Deletes topics from the disk before the next measurement has filled it again; Kafka's default is a minute.
    "log.segment.delete.delay.ms": "500"
}
#: The size that the bars apply to.
BARRED_MESSAGES, BARRED_RUNS = 400_000, 5
RESULTS = Path(__file__).with_name("results")
#: Packages whose versions may affect a result.
LIBRARIES = ("aiokafka", "confluent-kafka", "faust-streaming", "rocksdict", "aio-pika", "pyspark")
#: Width of tables in a log.
LOG_COLUMNS = 140
#: Gives each worker of a namespace its own log.
_numbers = count(1)


class UsageError(Exception):
    """A variable of the command has a value that cannot be used; the text says why."""


class Skipped(Exception):
    """A system cannot be measured on this machine; the text says why."""


@dataclass(frozen=True)
class Bar:
    """A limit that ``found`` must not exceed, or (``at_least``) must reach."""

    what: str
    found: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        found = round(self.found, 9)  # sums of CPU times are not exact
        return found >= self.limit if self.at_least else found <= self.limit


@dataclass(frozen=True)
class Size:
    """``messages`` of ``value_bytes`` in ``partitions``; each system is measured ``runs`` times, in turn.

    ``only``: names of rows, or of families of rows; empty for all.
    """

    messages: int = BARRED_MESSAGES
    runs: int = BARRED_RUNS
    only: frozenset[str] = frozenset()
    value_bytes: int = 200
    partitions: int = 4

    @classmethod
    def from_environment(cls) -> Size:
        """Read MESSAGES, RUNS, ONLY, VALUE_BYTES and PARTITIONS; raise UsageError if a value is not valid."""
        numbers = {}
        for name in ("messages", "runs", "value_bytes", "partitions"):
            if text := os.environ.get(name.upper()):
                if not text.isdecimal() or int(text) < 1:
                    raise UsageError(f"{name.upper()} must be a number of at least 1, got {text}")
                numbers[name] = int(text)
        return cls(only=frozenset(filter(None, os.environ.get("ONLY", "").split(","))), **numbers)

    @property
    def is_barred(self) -> bool:
        return self.messages == BARRED_MESSAGES and self.runs >= BARRED_RUNS


@dataclass
class Bench:
    """The environment of one measurement: a running broker, a folder for data, the size, and progress output.

    Its processes run until :meth:`end_processes` or :meth:`clear`, which also deletes its topics.
    """

    servers: str
    folder: Path
    size: Size
    say: Say
    broker: EmbeddedBroker
    _processes: ExitStack = field(default_factory=ExitStack, init=False)
    _topics: ExitStack = field(default_factory=ExitStack, init=False)

    @cached_property
    def client(self) -> ClientSettings:
        """The settings of clients in a namespace that only this measurement uses."""
        client = ClientSettings.read(self.servers, {"prefix": f"bench-{uuid.uuid4().hex[:10]}"}, environment={})
        self._topics.callback(self._delete, client)
        return client

    @property
    def names(self) -> Names:
        return self.client.names

    @property
    def namespace(self) -> tuple[str, str]:
        """The broker's address and the prefix: the first arguments of most clients."""
        return self.servers, self.names.prefix

    def start_worker(self, machine: str = "first", **settings: str) -> Worker:
        """Start a worker; ``machine`` names its data directory, ``settings`` are further environment variables."""
        environment = {
            "MARQ_BOOTSTRAP_SERVERS": self.servers,
            "MARQ_PREFIX": self.names.prefix,
            "MARQ_CONNECT_TIMEOUT": str(START_SECONDS),
            # As on a machine where a worker has run before, modules are compiled.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.folder / "compiled"),
            **settings,
        }
        name, data = f"{self.names.prefix}-{next(_numbers)}", self.folder / self.names.prefix / machine
        worker = Worker(name, self.folder, environment, data=data)
        return self._processes.enter_context(worker)

    def worker(self, **settings: str) -> Worker:
        """Start a worker like :meth:`start_worker`, and wait until it owns all partitions."""
        worker = self.start_worker(**settings)
        worker.wait_until_owned()
        return worker

    def clients(self, *calls: tuple[Any, ...]) -> list[BenchClient]:
        """Start clients, each by its function and arguments; return when each has sent its first line."""
        clients = [self._processes.enter_context(BenchClient(*call)) for call in calls]
        for client in clients:
            client.read()
        return clients

    def fill(self, messages: int = 0, keys: int = 0) -> None:
        """Fill the queue like :func:`lab.bench.client.fill`; with all messages of the size by default."""
        asyncio.run(fill(*self.namespace, messages or self.size.messages, self.size.value_bytes, keys))

    def end_processes(self) -> None:
        """End all workers, in an orderly way, and clients."""
        self._processes.close()

    async def make_topics(self, partitions: int = 0, markers_partitions: int = 0) -> Topics:
        """Create the topics of the namespace, including the changelog."""
        messages = partitions or self.size.partitions
        client = replace(self.client, partitions=messages, markers_partitions=markers_partitions or messages)
        return await ensure_topics(client, changelog=True)

    @property
    def broker_pid(self) -> int:
        assert self.broker.pid is not None, "the broker has ended"
        return self.broker.pid

    def log_bytes(self, topic: str) -> int:
        """Return the size of the log files of a topic's partitions."""
        files = (self.broker.data_directory / "data").glob(f"{topic}-*/*.log")
        return sum(file.stat().st_size for file in files)

    def clear(self) -> None:
        """End all processes; delete the topics and the folder of the namespace."""
        self.end_processes()
        self._topics.close()

    def _delete(self, client: ClientSettings) -> None:
        shutil.rmtree(self.folder / client.names.prefix, ignore_errors=True)
        if failure := asyncio.run(delete_topics(client)):
            raise RunError(failure)


System = Callable[[Bench], Measurements]


@dataclass(frozen=True)
class BenchRow:
    """One comparison: ``systems`` are measured in turn; ``what`` describes it in one sentence."""

    name: str
    what: str
    systems: Mapping[str, System]
    #: Limits, by the medians of the systems that were not skipped.
    bars: Callable[[Medians], list[Bar]] = lambda medians: []
    #: Most measurements of each system; messages of the unmeasured run; factor for the size's number of messages.
    runs: int = 99
    warm: int = WARM_MESSAGES
    of_messages: float = 1.0
    #: Settings on top of BROKER_PROPERTIES.
    broker_properties: Mapping[str, str] = field(default_factory=dict)
    #: Whether the row runs only if ``only`` names it.
    by_name: bool = False

    def is_named(self, name: str) -> bool:
        """Whether this is the row's name or its family's: ``work`` also names ``work-1ms``."""
        return self.name == name or self.name.startswith(f"{name}-")


@dataclass
class RowOutcome:
    """The results of a row; without bars if it failed with an ``error``."""

    row: BenchRow
    runs: dict[str, list[Measurements]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def medians(self) -> dict[str, Measurements]:
        return {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in self.runs.items()}


def measure(row: BenchRow, folder: Path, size: Size, say: Say) -> RowOutcome:
    """Measure a row; an error ends only this row."""
    outcome = RowOutcome(row)
    began = time.monotonic()
    say(f"{row.name}: {row.what}")
    # Whichever program creates the topics of a measurement, unless the row creates them itself.
    os.environ["MARQ_PARTITIONS"] = str(size.partitions)
    try:
        with EmbeddedBroker(heap=BROKER_HEAP, properties={**BROKER_PROPERTIES, **row.broker_properties}) as broker:
            scaled = replace(size, messages=round(size.messages * row.of_messages))
            _take_turns(outcome, Bench(broker.bootstrap_servers, folder, scaled, say, broker))
        outcome.bars = row.bars(outcome.medians)
    except (Exception, SystemExit) as error:
        outcome.error = "".join(traceback.format_exception(error, limit=-4)).strip()
        say(f"{row.name}: FAILED\n{outcome.error}")
    outcome.seconds = time.monotonic() - began
    say(f"{row.name}: {outcome.seconds:.0f} s")
    return outcome


def _take_turns(outcome: RowOutcome, bench: Bench) -> None:
    row = outcome.row
    if row.warm:
        smaller = replace(bench, size=replace(bench.size, messages=min(row.warm, bench.size.messages)))
        for name in row.systems:
            _once(outcome, smaller, name)
    runs, names = min(bench.size.runs, row.runs), list(row.systems)
    for turn in range(runs):
        for name in names[::-1] if turn % 2 else names:
            measurements = _once(outcome, bench, name)
            if measurements is not None:
                outcome.runs.setdefault(name, []).append(measurements)
                pairs = (f"{key.replace('_', ' ')} {format_number(value)}" for key, value in measurements.items())
                bench.say(f"{row.name} {turn + 1}/{runs} {name}: {', '.join(pairs)}")


def _once(outcome: RowOutcome, bench: Bench, name: str) -> Measurements | None:
    if name in outcome.skipped:
        return None
    # Each measurement has a namespace of its own.
    bench = replace(bench)
    try:
        return outcome.row.systems[name](bench)
    except Skipped as why:
        outcome.skipped[name] = str(why)
        bench.say(f"{outcome.row.name} {name}: SKIPPED: {why}")
        return None
    finally:
        bench.clear()


def peak_mib(measurements: Measurements) -> float:
    """Return the highest of the peaks that `Worker.memory_mib` noted."""
    return max(value for name, value in measurements.items() if name.endswith("_peak_mib"))


def format_number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


# --- reports ----------------------------------------------------------------------------------------------------------


def medians_tables(outcome: RowOutcome) -> list[Table]:
    medians = outcome.medians
    runs = max(len(runs) for runs in outcome.runs.values())
    rows = [
        (key.replace("_", " "), *[format_number(found[key]) if key in found else "" for found in medians.values()])
        for key in dict.fromkeys(key for measurements in medians.values() for key in measurements)
    ]
    return [terminal_table(f"{outcome.row.name} ({runs} runs)", ("medians", *medians), rows)]


#: Returns the tables of a row that was measured.
Tables = Callable[[RowOutcome], list[Table]]


def run(rows: Sequence[BenchRow], size: Size, name: str, tables: Tables = medians_tables) -> list[RowOutcome]:
    """Measure rows, print their tables, and write the result to a file whose name begins with ``name``."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_COLUMNS)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="marq-bench-", ignore_cleanup_errors=True) as folder:
        outcomes = [measure(row, Path(folder), size, say) for row in rows]
    show(outcomes, console, tables)
    say(f"all rows: {(time.monotonic() - began) / 60:.1f} minutes")
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": versions(),
        "size": {**asdict(size), "only": sorted(size.only)},
        "load_before": load,
        **kept(outcomes),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}{now:%Y-%m-%dT%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return outcomes


def show(outcomes: Sequence[RowOutcome], console: Console, tables: Tables) -> None:
    """Print the tables of each row, and all bars in one table."""
    for outcome in outcomes:
        if outcome.runs:
            console.print(*tables(outcome), sep="\n")
        for system, reason in outcome.skipped.items():
            console.print(f"{system}: skipped: {reason}", highlight=False)
    bars = [
        (bar.what, f"{bar.limit:,.2f} {bar.unit}", f"{bar.found:,.2f} {bar.unit}", "yes" if bar.met else "NO")
        for outcome in outcomes
        for bar in outcome.bars
    ]
    if bars:
        console.print(terminal_table("", ("bar", "limit", "found", "met"), bars))
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: FAILED: {outcome.error.splitlines()[-1]}", highlight=False)


def exit_code(outcomes: Sequence[RowOutcome]) -> int:
    """Return 1 if a row failed, 2 if a bar is not met."""
    if any(outcome.error for outcome in outcomes):
        return 1
    return 0 if all(bar.met for outcome in outcomes for bar in outcome.bars) else 2


def kept(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return the measurements of all runs, and all bars, as they are written to the result file."""
    fields = ("medians", "runs", "skipped", "error")
    return {
        "rows": {
            outcome.row.name: {
                "what": outcome.row.what,
                "seconds": round(outcome.seconds, 1),
                **{field: getattr(outcome, field) for field in fields},
            }
            for outcome in outcomes
        },
        "bars": [
            {"row": outcome.row.name, **asdict(bar), "met": bar.met} for outcome in outcomes for bar in outcome.bars
        ],
        "failed": [outcome.row.name for outcome in outcomes if outcome.error],
    }


def versions() -> dict[str, str]:
    installed = {"Kafka": KAFKA_VERSION, "Java": str(java.find().version), "Python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
