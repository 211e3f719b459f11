"""Capacity planning: the resources for a target load, computed from queue profiles and measured constants.

The model is deliberately simple: rates times bytes, rates times seconds (Little's law), and measurements of Marq in
:data:`CONSTANTS`. It leaves out the processor time of handlers and brokers, and compression. Loads beyond the measured
sizes get a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import PipelineError, unknown_queue
from pipeline.profiles import Profile, Target
from pipeline.spans import DAY_MS, show_ms

MIB, GIB = 1 << 20, 1 << 30
#: Marq's default number of partitions, and the fewest workers that survive the loss of one.
LEAST_PARTITIONS, LEAST_WORKERS = 4, 2
DEAD_LETTERS_DAYS = 30
#: More RocksDB instances than this in one worker were never measured.
MANY_PARTITIONS = 100
_DAY_S = DAY_MS // 1_000


@dataclass(frozen=True)
class Constant:
    """A measured or documented number: ``source`` says where it comes from, ``command`` measures it again."""

    value: float
    unit: str
    what: str
    source: str
    command: str = ""


_BENCH = "lab/bench/results/2026-11-21T123923.json"
_MILLION = "lab/bench/results/delays-2026-11-21T214929.json"
_TEN_MILLION = "lab/bench/results/delays-2026-11-21T223020.json"
_DELAYS = f"{_MILLION} and {_TEN_MILLION}"
_MAKE_DELAYS = "make delays PENDING=10000000"

# With 1,000,000 and 10,000,000 delayed messages: peak memory, and seconds until a killed worker delivers again.
_FEW_BYTES, _MANY_BYTES, _MORE_ROWS = 594.71 * MIB, 2978.52 * MIB, 9_000_000
_FEW_SECONDS, _MANY_SECONDS = 5.36, 44.08
_PARTITION_BYTES, _MEASURED_PARTITIONS = 24 * MIB, 4
_ROW_BYTES = (_MANY_BYTES - _FEW_BYTES) / _MORE_ROWS
_ROW_SECONDS = (_MANY_SECONDS - _FEW_SECONDS) / _MORE_ROWS
_WORKER_BYTES = _FEW_BYTES - _MEASURED_PARTITIONS * _PARTITION_BYTES - 1_000_000 * _ROW_BYTES
_RESTART = f"{_DELAYS}: restart_seconds 5.36 and 44.08"

#: Every number that the model takes from measurements or from Kafka.
CONSTANTS: Mapping[str, Constant] = {
    "marker_cpu": Constant(
        0.66 / 800_000, "s", "worker processor time per marker that leaves no row",
        f"{_BENCH}: tracker_cpu_seconds 0.66 for 400,000 messages, two markers each", "make bench",
    ),
    "record_cpu": Constant(
        1 / 98_000, "s", "worker processor time per record of the markers topic, measured on a prototype",
        "docs/decisions/0001: 98,000 single markers a second",
    ),
    "rows_rate": Constant(
        55_228, "rows/s", "rows that one worker opens per second, with the broker on the same 2 cores",
        f"{_TEN_MILLION}: known_per_second", _MAKE_DELAYS,
    ),
    "due_rate": Constant(
        5_000, "rows/s", "due messages that one worker sends per second without delay; higher rates were not measured",
        f"{_TEN_MILLION}: rate, lateness_p99_ms 228", _MAKE_DELAYS,
    ),
    "consumer_rate": Constant(
        156_038, "messages/s", "messages that one consumer process reads and acks per second with an empty handler",
        f"{_BENCH}: marq.rate", "make bench",
    ),
    "row_memory": Constant(
        _ROW_BYTES, "bytes", "worker memory per open or delayed message",
        f"{_DELAYS}: pending_peak_mib 594.71 and 2978.52", _MAKE_DELAYS,
    ),
    "worker_memory": Constant(
        _WORKER_BYTES, "bytes", "memory of a worker without rows and RocksDB",
        f"{_DELAYS}: pending_peak_mib minus rows and 4 partitions", "make delays",
    ),
    "partition_memory": Constant(
        _PARTITION_BYTES, "bytes", "RocksDB cache and write buffers per markers partition",
        "docs/operations/topics.md, Partition counts",
    ),
    "restart_base": Constant(
        _FEW_SECONDS - 1_000_000 * _ROW_SECONDS, "s", "time until a killed worker delivers again, with an empty table",
        _RESTART, "make delays",
    ),
    "restart_row": Constant(
        _ROW_SECONDS, "s", "additional restart time per open or delayed message", _RESTART, _MAKE_DELAYS
    ),
    "measured_rows": Constant(10_000_000, "rows", "most rows measured in one worker", _TEN_MILLION, _MAKE_DELAYS),
    "record_frame": Constant(15, "bytes", "Kafka's overhead per record in a large batch", "Kafka's record format 2"),
    "batch_frame": Constant(76, "bytes", "Kafka's overhead for a batch of one record", "Kafka's record format 2"),
    "marker_frame": Constant(31, "bytes", "frame of a marker batch without names", "docs/protocol.md, Frame"),
    "batch_time": Constant(
        0.005, "s", "time within which markers of a queue and partition share a batch",
        "an estimate: batches grow under load",
    ),
    "row_frame": Constant(110, "bytes", "key and lease of a row without names and value", "marq/core/storage/rows.py"),
    "copy_headers": Constant(
        150, "bytes", "headers of a redelivery or dead letter", "docs/protocol.md, The message record"
    ),
    "partition_rate": Constant(10 * MIB, "bytes/s", "planned load of a partition", "usual practice with Kafka"),
    "segment": Constant(GIB, "bytes", "part of a partition that is not compacted", "Kafka's segment.bytes"),
    "session": Constant(
        10, "s", "time until a dead worker's partitions move", "docs/operations/settings.md, MARQ_SESSION_TIMEOUT"
    ),
    "disk_full": Constant(0.7, "", "planned disk usage", "a choice"),
}  # fmt: skip

#: The quantities of a plan: description and unit.
QUANTITIES: Mapping[str, tuple[str, str]] = {
    "rate": ("messages sent", "/s"),
    "deliveries": ("deliveries", "/s"),
    "due": ("redeliveries and delayed messages that workers send", "/s"),
    "markers": ("markers", "/s"),
    "concurrency": ("messages processed at the same time", ""),
    "delayed": ("delayed messages at any time", ""),
    "open": ("open messages in the lease table", ""),
    "rows": ("rows written", "/s"),
    "tracker_cores": ("processor of all workers", "cores"),
    "workers": ("workers", ""),
    "consumers": ("consumer processes of a group", ""),
    "partitions": ("partitions of messages and of markers", ""),
    "messages_disk": ("disk of the messages topic", "bytes"),
    "markers_disk": ("disk of the markers topic", "bytes"),
    "changelog_disk": ("disk of the changelog", "bytes"),
    "dead_letters_disk": ("disk of 30 days of dead letters", "bytes"),
    "broker_disk": ("disk of all brokers", "bytes"),
    "worker_disk": ("disk of each worker", "bytes"),
    "worker_memory": ("memory of each worker", "bytes"),
    "restart": ("time until a killed worker delivers again", "s"),
    "takeover": ("time until others deliver for a dead worker", "s"),
}


def target_rates(total: float | None, by_queue: Mapping[str, float], known: Sequence[Profile]) -> dict[str, float]:
    """Return the rate of each queue: as requested, else as in its busiest minute."""
    names = [profile.queue for profile in known]
    for queue in by_queue:
        if queue not in names:
            raise PipelineError(f"{unknown_queue(queue, names, '--rate')}; for a new queue give --size and --run")
    if total is not None:
        # Divided by the measured shares, or evenly if none was measured.
        measured = sum(profile.rate_mean for profile in known)
        if not measured:
            return {name: total / len(names) for name in names}
        return {profile.queue: total * profile.rate_mean / measured for profile in known if profile.rate_mean}
    busiest = {profile.queue: profile.rate_peak for profile in known if profile.rate_peak > 0}
    return {**busiest, **by_queue}


def _c(name: str) -> float:
    return CONSTANTS[name].value


def _name_bytes(profile: Profile) -> int:
    return len(profile.queue.encode())


def _record_bytes(profile: Profile) -> float:
    return profile.size_bytes + _name_bytes(profile) + _c("record_frame")


class Plan:
    """What a target needs, for queues with these profiles: a value for each of :data:`QUANTITIES`, and warnings.

    ``guess``: the profiles were not measured.
    """

    def __init__(self, profiles: Sequence[Profile], target: Target, *, guess: bool = False) -> None:
        self.profiles = [profile for profile in profiles if profile.queue in target.rates]
        self.target = target
        self.guess = guess
        #: Computed one after the other; later ones use earlier ones.
        self.values: dict[str, float] = {}
        self._traffic()
        self._processes()
        self._topics()
        self._machines()
        self.warnings = self._warnings()

    def document(self) -> dict[str, Any]:
        """Return the plan for ``json.dumps``."""
        lines = [
            {"key": key, "what": what, "unit": unit, "value": self.values[key]}
            for key, (what, unit) in QUANTITIES.items()
        ]
        return {
            "version": 1,
            "guess": self.guess,
            "target": asdict(self.target),
            "queues": [asdict(profile) for profile in self.profiles],
            "plan": lines,
            "warnings": self.warnings,
            "constants": {name: asdict(constant) for name, constant in CONSTANTS.items()},
        }

    def _total(self, per_message: Callable[[Profile], float]) -> float:
        """Return a quantity per second over all queues."""
        return sum(self.target.rates[profile.queue] * per_message(profile) for profile in self.profiles)

    def _traffic(self) -> None:
        """Compute what happens per second, and how much of it exists at any time."""
        values = self.values
        rate = values["rate"] = sum(self.target.rates.values())
        deliveries = values["deliveries"] = self._total(lambda p: p.deliveries)
        delays = self._total(lambda p: p.delayed_share)
        due = values["due"] = max(0.0, deliveries - rate) + delays
        renewals = self._total(lambda p: p.deliveries * p.renewals)
        # Per delivery an ACQUIRE, its end and its renewals; per message that a worker sends a fact; and DELAYs.
        values["markers"] = 2 * deliveries + renewals + due + delays
        running = self._total(lambda p: p.deliveries * p.run_ms / 1000)
        values["concurrency"] = math.ceil(running * self.target.headroom)
        measured = self._total(lambda p: p.delayed_share * p.delay_ms / 1000)
        values["delayed"] = measured if self.target.delayed is None else self.target.delayed
        # The time until the row is closed, including backoff.
        values["open"] = self._total(lambda p: p.deliveries * p.hold_ms / 1000) + values["delayed"]
        values["rows"] = self._total(lambda p: p.deliveries * p.rows_share) + delays

    def _processes(self) -> None:
        """Compute workers, consumers and partitions."""
        values, headroom = self.values, self.target.headroom
        # Counts the ACQUIRE and the end of each delivery, the most frequent markers.
        records = self._total(lambda p: 2 * p.deliveries / self._batch(p, LEAST_PARTITIONS))
        cores = values["markers"] * _c("marker_cpu") + records * _c("record_cpu") + values["rows"] / _c("rows_rate")
        values["tracker_cores"] = cores
        # Each worker uses one core, and sends only so many messages on time.
        for_due = math.ceil(headroom * values["due"] / _c("due_rate"))
        workers = values["workers"] = max(LEAST_WORKERS, math.ceil(headroom * cores), for_due)
        # Each group reads the whole topic.
        read = values["rate"] + values["due"]
        consumers = values["consumers"] = max(1, math.ceil(headroom * read / _c("consumer_rate")))
        # Messages partitions hold each delivery, and markers partitions the delayed messages.
        arriving = self._total(lambda p: (p.deliveries + p.delayed_share) * _record_bytes(p))
        for_bytes = math.ceil(headroom * arriving / _c("partition_rate"))
        values["partitions"] = max(LEAST_PARTITIONS, workers, consumers, for_bytes)

    def _topics(self) -> None:
        """Compute the disk space of each topic, all replicas included."""
        target, values, replication = self.target, self.values, self.target.replication
        headers = _c("copy_headers")
        first = self._total(lambda p: (1 - p.delayed_share) * _record_bytes(p))
        again = self._total(lambda p: (p.deliveries - 1 + p.delayed_share) * (_record_bytes(p) + headers))
        values["messages_disk"] = (first + again) * target.retention_ms / 1000 * replication
        markers = self._total(self._marker_bytes)
        values["markers_disk"] = markers * target.markers_retention_ms / 1000 * replication
        row = self._row_bytes()
        # The active segment of each partition is not compacted; at most it has the rows of a week.
        segments = min(values["partitions"] * _c("segment"), values["rows"] * row * 7 * _DAY_S)
        # Half of the other rows may be outdated.
        values["changelog_disk"] = (2 * values["open"] * row + segments) * replication
        # Dead letters have no retention.
        dead = self._total(lambda p: p.dead_share * (_record_bytes(p) + 2 * headers))
        values["dead_letters_disk"] = dead * DEAD_LETTERS_DAYS * _DAY_S * replication

    def _machines(self) -> None:
        """Compute disks, the memory of a worker while another is down, and recovery times."""
        values, full = self.values, _c("disk_full")
        used = sum(values[name] for name in ("messages_disk", "markers_disk", "changelog_disk", "dead_letters_disk"))
        values["broker_disk"] = used / full
        # Each worker keeps the whole table, twice until RocksDB has compacted it.
        values["worker_disk"] = 2 * values["open"] * self._row_bytes() / full
        others = max(1, values["workers"] - 1)
        rows = values["open"] / others
        rocksdb = values["partitions"] * _c("partition_memory")
        values["worker_memory"] = _c("worker_memory") + rocksdb + rows * _c("row_memory")
        values["restart"] = _c("restart_base") + rows * _c("restart_row")
        taken = values["open"] / values["workers"] / others
        values["takeover"] = _c("session") + taken * _c("restart_row")

    def _row_bytes(self) -> float:
        # The queue name occurs twice: in the lease and in the record key.
        total = self._total(lambda p: _c("row_frame") + 2 * _name_bytes(p) + p.size_bytes)
        return total / self.values["rate"]

    def _marker_bytes(self, profile: Profile) -> float:
        """Return the bytes of all markers of one message; simultaneous markers share a batch frame."""
        frames = _c("batch_frame") + _c("marker_frame") + _name_bytes(profile) + len("marq.messages")
        frame = frames / self._batch(profile, self.values["partitions"])
        # After the frame: lease, from_offset, a time, a length; an offset; a lease; attempt and cause.
        acquire, end, renewal, fact = frame + 24, frame + 4, frame + 8, frame + 9
        # Only the ACQUIREs of messages that a tracker has sent have their headers and values.
        copy = _c("copy_headers") + profile.size_bytes
        again = (profile.deliveries - 1) * (fact + copy)
        delay = profile.delayed_share * (frame + 28 + profile.size_bytes + fact + copy)
        return profile.deliveries * (acquire + end + profile.renewals * renewal) + again + delay

    def _batch(self, profile: Profile, partitions: float) -> float:
        """Return how many markers of a queue share a record."""
        return max(1.0, self.target.rates[profile.queue] * profile.deliveries / partitions * _c("batch_time"))

    def _warnings(self) -> list[str]:
        """Return what exceeds the measurements, and leases that are shorter than the work."""
        values, most = self.values, _c("measured_rows")
        texts = [
            f"queue {profile.queue}: 1 of 100 runs takes {show_ms(profile.run_p99_ms)} or longer, its lease is"
            f" {show_ms(profile.lease_ms)}: such runs depend on renewal"
            for profile in self.profiles
            if profile.run_p99_ms > profile.lease_ms
        ]
        if values["delayed"] and not any(profile.delayed_share for profile in self.profiles):
            texts.append("the rate of due delayed messages was not measured: workers are planned without them")
        rows = values["open"] / max(1, values["workers"] - 1)
        if rows > most:
            texts.append(f"{rows:,.0f} open messages of a worker are more than the {most:,.0f} that were measured")
        if values["partitions"] > MANY_PARTITIONS:
            texts.append(f"{values['partitions']:,.0f} partitions: this many RocksDBs in a worker were not measured")
        return texts
