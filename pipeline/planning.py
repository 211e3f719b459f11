"""What a plan is made of: a target, measured figures, and the formulas in words; :mod:`pipeline.capacity` computes.

The model is a list of :class:`Line`: each is one figure, with its formula and its inputs in words, so that whoever
doubts one can check it and put his own in its place. It is simple on purpose: rates times bytes, rates times seconds
(Little's law: how many are in a place is how many come a second times how long each stays), and what was measured of
Marq, all of which is in :data:`CONSTANTS`. What it does not know: how long handlers compute, the brokers' processors,
compression (it takes bytes as they are), and anything beyond the sizes that were measured, which becomes a warning.

Headroom is one factor on all rates where processes are counted, 2 unless another one is asked for. Disks are to be full
to 70 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.errors import PipelineError
from pipeline.profiles import Profile
from pipeline.spans import DAY_MS

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Constant:
    """A figure of Marq's or Kafka's; ``source`` says where it stands, ``command`` what measures it anew."""

    value: float
    unit: str
    what: str
    source: str
    command: str = ""


_BENCH = "bench/results/2026-11-21T123923.json"
_MILLION = "bench/results/delays-2026-11-21T214929.json"
_TEN_MILLION = "bench/results/delays-2026-11-21T223020.json"
_DELAYS = f"{_MILLION} and {_TEN_MILLION}"

# Of 1,000,000 and of 10,000,000 messages that wait: the most memory, and seconds until a killed worker delivers.
_FEW_BYTES, _MANY_BYTES, _MORE_ROWS = 594.71 * MIB, 2978.52 * MIB, 9_000_000
_FEW_SECONDS, _MANY_SECONDS = 5.36, 44.08
_PARTITION_BYTES, _MEASURED_PARTITIONS = 24 * MIB, 4
_ROW_BYTES = (_MANY_BYTES - _FEW_BYTES) / _MORE_ROWS
_ROW_SECONDS = (_MANY_SECONDS - _FEW_SECONDS) / _MORE_ROWS

#: All that the model takes from measurements and from Kafka: nowhere else is there a figure of this kind.
CONSTANTS: Mapping[str, Constant] = {
    "marker_cpu": Constant(
        0.66 / 800_000,
        "s",
        "processor time of a worker for a marker that leaves no row",
        f"{_BENCH}: tracker_cpu_seconds 0.66 for 400,000 messages, two markers each",
        "make bench",
    ),
    "record_cpu": Constant(
        1 / 98_000,
        "s",
        "processor time of a worker for a record of the markers topic, as a prototype needed it",
        "docs/decisions/0001: 98,000 single markers a second",
    ),
    "rows_rate": Constant(
        55_228,
        "rows/s",
        "rows that one worker opens a second, the broker on the same 2 cores",
        f"{_TEN_MILLION}: known_per_second",
        "make delays PENDING=10000000",
    ),
    "due_rate": Constant(
        5_000,
        "rows/s",
        "due messages that one worker sends a second in time; more was not measured",
        f"{_TEN_MILLION}: rate, lateness_p99_ms 228",
        "make delays PENDING=10000000",
    ),
    "consumer_rate": Constant(
        156_038,
        "messages/s",
        "messages that a consumer process reads and acks a second, its handler doing nothing",
        f"{_BENCH}: marq.rate",
        "make bench",
    ),
    "row_memory": Constant(
        _ROW_BYTES,
        "bytes",
        "memory of a worker for each open or delayed message that it owns",
        f"{_DELAYS}: pending_peak_mib 594.71 and 2978.52",
        "make delays PENDING=10000000",
    ),
    "worker_memory": Constant(
        _FEW_BYTES - _MEASURED_PARTITIONS * _PARTITION_BYTES - 1_000_000 * _ROW_BYTES,
        "bytes",
        "memory of a worker without rows and without RocksDB",
        f"{_DELAYS}: what rows and 4 partitions leave of pending_peak_mib",
        "make delays",
    ),
    "partition_memory": Constant(
        _PARTITION_BYTES,
        "bytes",
        "cache and write buffers of RocksDB for each markers partition",
        "docs/operations.md, Partitions",
    ),
    "restart_base": Constant(
        _FEW_SECONDS - 1_000_000 * _ROW_SECONDS,
        "s",
        "kill -9 of a worker until it delivers again, with an empty table",
        f"{_DELAYS}: restart_seconds 5.36 and 44.08",
        "make delays",
    ),
    "restart_row": Constant(
        _ROW_SECONDS,
        "s",
        "the same, for each open or delayed message",
        f"{_DELAYS}: restart_seconds 5.36 and 44.08",
        "make delays PENDING=10000000",
    ),
    "measured_rows": Constant(
        10_000_000, "rows", "the most of one worker that was measured", _TEN_MILLION, "make delays PENDING=10000000"
    ),
    "record_frame": Constant(15, "bytes", "Kafka's own of a record in a large batch", "Kafka's record format 2"),
    "batch_frame": Constant(76, "bytes", "Kafka's own of a record alone in its batch", "Kafka's record format 2"),
    "marker_frame": Constant(31, "bytes", "head and frame of a marker batch, but names", "docs/protocol.md, Frame"),
    "batch_time": Constant(
        0.005, "s", "markers of a queue and partition within it share a batch", "a guess: batches grow under load"
    ),
    "row_frame": Constant(110, "bytes", "key and lease of a row, but names and value", "marq/core/rows.py"),
    "copy_headers": Constant(150, "bytes", "headers of a copy or dead letter", "docs/protocol.md, The message record"),
    "partition_rate": Constant(10 * MIB, "bytes/s", "what a partition is to take", "usual practice with Kafka"),
    "segment": Constant(GIB, "bytes", "the part of a partition that is not compacted", "Kafka's segment.bytes"),
    "session": Constant(10, "s", "until a dead worker's partitions move", "docs/operations.md, MARQ_SESSION_TIMEOUT"),
    "disk_full": Constant(0.7, "", "how full a disk is to be at most", "a choice"),
}


@dataclass(frozen=True)
class Words:
    """What a figure is, its unit, and how it is computed."""

    what: str
    unit: str
    formula: str


#: The model, in the order in which it is computed.
FORMULAS: Mapping[str, Words] = {
    "rate": Words("messages sent", "/s", "the target's rates together"),
    "deliveries": Words("deliveries", "/s", "rate x deliveries of a message"),
    "due": Words(
        "copies that workers send", "/s", "deliveries after the first ones + rate x share of delayed messages"
    ),
    "markers": Words(
        "markers",
        "/s",
        "for each delivery ACQUIRE, its end, and its renewals; for each copy a fact; for each delayed message a DELAY",
    ),
    "concurrency": Words(
        "messages at work at a time", "", "deliveries x mean run time x headroom: the concurrency of all consumers"
    ),
    "delayed": Words(
        "messages that wait for their time", "", "what is given, else rate x share of delayed messages x mean delay"
    ),
    "open": Words(
        "open messages in the lease table",
        "",
        "deliveries x mean time until closed, backoff included + messages that wait for their time",
    ),
    "rows": Words("rows written", "/s", "deliveries x share of those open for 1 s or longer + delayed messages"),
    "tracker_cores": Words(
        "processor of all workers",
        "cores",
        "markers x time of a marker + their records x time of a record + rows written / rows that a worker opens",
    ),
    "workers": Words(
        "workers",
        "",
        "the most of: 2, so that one can take over; headroom x cores, as each uses one; headroom x copies / copies that"
        " one sends in time",
    ),
    "consumers": Words(
        "consumer processes of a group",
        "",
        "headroom x records of the messages topic / what a process reads and acks, as each group reads the whole topic;"
        " more where handlers compute",
    ),
    "partitions": Words(
        "partitions of messages and of markers",
        "",
        "the most of: 4, Marq's default; workers; consumer processes; headroom x bytes / bytes of a partition",
    ),
    "messages_disk": Words(
        "disk of the messages topic",
        "bytes",
        "(messages + copies with their headers) x (value + queue's name + record frame) x retention x replication",
    ),
    "markers_disk": Words(
        "disk of the markers topic",
        "bytes",
        "(of each delivery ACQUIRE with the value, its end, its renewals; facts; DELAYs with the value; their parts of"
        " the batches' frames) x retention x replication",
    ),
    "changelog_disk": Words(
        "disk of the changelog",
        "bytes",
        "(2 x open messages x row, as half of it may be old + of each partition the segment that is written, at most"
        " the rows of a week) x replication",
    ),
    "dead_letters_disk": Words(
        "disk of 30 days of dead letters",
        "bytes",
        "rate x share of dead messages x record with its headers x 30 days x replication; they are kept for ever",
    ),
    "broker_disk": Words("disk of all brokers", "bytes", "messages + markers + changelog + dead letters, 70 % full"),
    "worker_disk": Words(
        "disk of each worker",
        "bytes",
        "2 x open messages x row, until RocksDB has compacted, 70 % full; each worker keeps the whole table",
    ),
    "worker_memory": Words(
        "memory of each worker",
        "bytes",
        "worker without rows + partitions x RocksDB of one + rows when one worker is away x memory of a row",
    ),
    "restart": Words("a killed worker is back after", "s", "start + its rows x time to read one back"),
    "takeover": Words(
        "others deliver for a dead worker after", "s", "session timeout + rows that each takes over x time to read one"
    ),
}


@dataclass(frozen=True)
class Target:
    """What is planned for: messages a second of each queue, and how long Kafka keeps what.

    Raises:
        PipelineError: a figure makes no sense.
    """

    rates: Mapping[str, float]
    retention_ms: float = 7 * DAY_MS
    markers_retention_ms: float = 7 * DAY_MS
    replication: int = 3
    #: Messages that wait for their time; None: as many as the measured delays make.
    delayed: float | None = None
    headroom: float = 2.0

    def __post_init__(self) -> None:
        if not self.rates:
            raise PipelineError("there is no queue to plan for: give --rate, or run lifecycle when messages were sent")
        for queue, rate in self.rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise PipelineError(f"--rate {rate:g} of queue {queue}: expected more than 0 messages a second")
        if self.replication < 1:
            raise PipelineError(f"--replication {self.replication}: expected 1 or more copies of each partition")
        if not (math.isfinite(self.headroom) and self.headroom >= 1):
            raise PipelineError(f"--headroom {self.headroom:g}: expected a factor of 1 or more, such as 2")
        if self.delayed is not None and self.delayed < 0:
            raise PipelineError(f"--delayed {self.delayed:g}: expected 0 or more messages that wait for their time")


@dataclass(frozen=True)
class Line:
    """One figure of a plan, and the numbers that went in."""

    key: str
    value: float
    inputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> Words:
        return FORMULAS[self.key]


@dataclass(frozen=True)
class Plan:
    """The lines in the order of :data:`FORMULAS`; ``guess``: what queues are like was given, not measured."""

    target: Target
    profiles: Sequence[Profile]
    lines: Sequence[Line]
    warnings: Sequence[str]
    guess: bool

    def __getitem__(self, key: str) -> float:
        return next(line.value for line in self.lines if line.key == key)

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return {
            "version": 1,
            "guess": self.guess,
            "target": asdict(self.target),
            "queues": [asdict(profile) for profile in self.profiles],
            "plan": [{**asdict(line), **asdict(line.words)} for line in self.lines],
            "warnings": list(self.warnings),
            "constants": {name: asdict(constant) for name, constant in CONSTANTS.items()},
        }
