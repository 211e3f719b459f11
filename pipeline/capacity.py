"""Computes a plan: the arithmetic of :data:`pipeline.planning.FORMULAS`, in the same order. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.planning import CONSTANTS, Line, Plan, Target
from pipeline.profiles import Profile
from pipeline.spans import DAY_MS, show_ms

#: Partitions that Marq makes by default, and workers that are enough for a takeover.
LEAST_PARTITIONS, LEAST_WORKERS = 4, 2
DEAD_LETTERS_DAYS = 30
#: Partitions beyond which a RocksDB for each was not measured.
MANY_PARTITIONS = 100
_DAY_S = 86_400


def spread(total: float, profiles: Sequence[Profile]) -> dict[str, float]:
    """Return a rate of all queues as rates of each, by the shares that were measured; evenly where none was."""
    measured = sum(profile.rate_mean for profile in profiles)
    if not measured:
        return {profile.queue: total / len(profiles) for profile in profiles}
    return {profile.queue: total * profile.rate_mean / measured for profile in profiles if profile.rate_mean}


def plan(profiles: Sequence[Profile], target: Target, *, guess: bool = False) -> Plan:
    """Return what a target needs, of queues with these profiles."""
    wanted = [profile for profile in profiles if profile.queue in target.rates]
    model = _Model(wanted, target)
    model.load()
    model.processes()
    model.topics()
    model.disks()
    model.worker()
    return Plan(target, wanted, model.lines, model.warnings(), guess)


def _c(name: str) -> float:
    return CONSTANTS[name].value


def _record_bytes(profile: Profile) -> float:
    return profile.size_bytes + len(profile.queue.encode()) + _c("record_frame")


def _row_bytes(profile: Profile) -> float:
    # The name is in the lease, and it is the record's key.
    return _c("row_frame") + 2 * len(profile.queue.encode()) + profile.size_bytes


class _Model:
    """Adds line to line; later ones use earlier ones."""

    def __init__(self, profiles: Sequence[Profile], target: Target) -> None:
        self.profiles = profiles
        self.target = target
        self.lines: list[Line] = []
        self._found: dict[str, float] = {}

    def _add(self, key: str, value: float, **inputs: float) -> float:
        self.lines.append(Line(key, value, inputs))
        self._found[key] = value
        return value

    def _sum(self, of_message: Callable[[Profile], float]) -> float:
        """Return a figure of one message, a second: over all queues by their rates."""
        return sum(self.target.rates[each.queue] * of_message(each) for each in self.profiles)

    def load(self) -> None:
        """What happens a second, and how much of it is there at a time."""
        rate = self._add("rate", sum(self.target.rates.values()))
        deliveries = self._add("deliveries", self._sum(lambda each: each.deliveries), rate=rate)
        delays = self._sum(lambda each: each.delayed_share)
        again = max(0.0, deliveries - rate)
        due = self._add("due", again + delays, redeliveries=again, delayed=delays)
        renewals = self._sum(lambda each: each.deliveries * each.renewals)
        self._add(
            "markers", 2 * deliveries + renewals + due + delays,
            deliveries=deliveries, renewals=renewals, facts=due, delays=delays,
        )  # fmt: skip
        at_work = self._sum(lambda each: each.deliveries * each.run_ms / 1000)
        headroom = self.target.headroom
        self._add("concurrency", math.ceil(at_work * headroom), at_work=at_work, headroom=headroom)
        waiting = self._sum(lambda each: each.delayed_share * each.delay_ms / 1000)
        given = self.target.delayed
        delayed = self._add("delayed", waiting if given is None else given, measured=waiting)
        held = self._sum(lambda each: each.deliveries * each.hold_ms / 1000)
        self._add("open", held + delayed, held=held, delayed=delayed)
        written = self._sum(lambda each: each.deliveries * each.rows_share)
        self._add("rows", written + delays, of_deliveries=written, delays=delays)

    def processes(self) -> None:
        """Workers, consumers, partitions."""
        found, headroom = self._found, self.target.headroom
        # Of an ACQUIRE and of its end, as the most are of these kinds.
        records = self._sum(lambda each: 2 * each.deliveries / self._batch(each, LEAST_PARTITIONS))
        cores = self._add(
            "tracker_cores",
            found["markers"] * _c("marker_cpu") + records * _c("record_cpu") + found["rows"] / _c("rows_rate"),
            markers=found["markers"], marker_cpu=_c("marker_cpu"), records=records, record_cpu=_c("record_cpu"),
            rows=found["rows"], rows_rate=_c("rows_rate"),
        )  # fmt: skip
        by_due = found["due"] / _c("due_rate")
        workers = self._add(
            "workers", max(LEAST_WORKERS, math.ceil(headroom * cores), math.ceil(headroom * by_due)),
            least=LEAST_WORKERS, cores=cores, due=found["due"], due_rate=_c("due_rate"), headroom=headroom,
        )  # fmt: skip
        read = found["rate"] + found["due"]
        consumers = self._add(
            "consumers", max(1, math.ceil(headroom * read / _c("consumer_rate"))),
            records=read, consumer_rate=_c("consumer_rate"), headroom=headroom,
        )  # fmt: skip
        # A marker's partition has the values of what is acquired, too.
        arriving = self._sum(lambda each: (each.deliveries + each.delayed_share) * _record_bytes(each))
        by_bytes = math.ceil(headroom * arriving / _c("partition_rate"))
        self._add(
            "partitions", max(LEAST_PARTITIONS, workers, consumers, by_bytes),
            least=LEAST_PARTITIONS, workers=workers, consumers=consumers, bytes_per_second=arriving,
            partition_rate=_c("partition_rate"), headroom=headroom,
        )  # fmt: skip

    def topics(self) -> None:
        """The disk that each topic takes, with all of its copies."""
        target, found, copies = self.target, self._found, self.target.replication
        first = self._sum(lambda each: (1 - each.delayed_share) * _record_bytes(each))
        again = self._sum(
            lambda each: (each.deliveries - 1 + each.delayed_share) * (_record_bytes(each) + _c("copy_headers"))
        )
        kept = target.retention_ms / 1000
        self._add(
            "messages_disk", (first + again) * kept * copies,
            first_bytes_per_second=first, copies_bytes_per_second=again, retention_s=kept, replication=copies,
        )  # fmt: skip
        markers, kept = self._sum(self._marker_bytes), target.markers_retention_ms / 1000
        self._add(
            "markers_disk", markers * kept * copies,
            bytes_per_second=markers, retention_s=kept, replication=copies,
        )  # fmt: skip
        row = self._sum(_row_bytes) / found["rate"]
        week = found["rows"] * row * 7 * DAY_MS / 1000
        tail = min(found["partitions"] * _c("segment"), week)
        self._add(
            "changelog_disk", (2 * found["open"] * row + tail) * copies,
            open=found["open"], row_bytes=row, segments_bytes=tail, replication=copies,
        )  # fmt: skip
        dead = self._sum(lambda each: each.dead_share * (_record_bytes(each) + 2 * _c("copy_headers")))
        self._add(
            "dead_letters_disk", dead * DEAD_LETTERS_DAYS * _DAY_S * copies,
            bytes_per_second=dead, days=DEAD_LETTERS_DAYS, replication=copies,
        )  # fmt: skip

    def disks(self) -> None:
        """The disks to buy."""
        found, full = self._found, _c("disk_full")
        used = sum(found[name] for name in ("messages_disk", "markers_disk", "changelog_disk", "dead_letters_disk"))
        self._add("broker_disk", used / full, used=used, disk_full=full)
        row = self._sum(_row_bytes) / found["rate"]
        self._add("worker_disk", 2 * found["open"] * row / full, open=found["open"], row_bytes=row, disk_full=full)

    def worker(self) -> None:
        """Memory of a worker while another one is away, and how soon it is back."""
        found = self._found
        others = max(1, found["workers"] - 1)
        rows, partitions = found["open"] / others, found["partitions"]
        self._add(
            "worker_memory", _c("worker_memory") + partitions * _c("partition_memory") + rows * _c("row_memory"),
            worker_memory=_c("worker_memory"), partitions=partitions, partition_memory=_c("partition_memory"),
            rows=rows, row_memory=_c("row_memory"),
        )  # fmt: skip
        restart, row_time = _c("restart_base"), _c("restart_row")
        self._add("restart", restart + rows * row_time, start=restart, rows=rows, row_time=row_time)
        taken = found["open"] / found["workers"] / others
        self._add("takeover", _c("session") + taken * row_time, session=_c("session"), rows=taken, row_time=row_time)

    def _marker_bytes(self, profile: Profile) -> float:
        """Return the bytes of all markers of one message; a batch's frame is shared by what comes at the same time."""
        names = len(profile.queue.encode()) + len("marq.messages")
        frames = _c("batch_frame") + _c("marker_frame") + names
        frame = frames / self._batch(profile, self._found["partitions"])
        # Behind the frame: lease, from_offset, a time, a length, the value; an offset; a lease; attempt and cause.
        acquire, end, renewal, fact = frame + 24 + profile.size_bytes, frame + 4, frame + 8, frame + 9
        again = (profile.deliveries - 1) * (fact + _c("copy_headers"))
        delay = profile.delayed_share * (frame + 28 + profile.size_bytes + fact)
        return profile.deliveries * (acquire + end + profile.renewals * renewal) + again + delay

    def _batch(self, profile: Profile, partitions: float) -> float:
        """Return how many markers of a queue share a record."""
        return max(1.0, self.target.rates[profile.queue] * profile.deliveries / partitions * _c("batch_time"))

    def warnings(self) -> list[str]:
        """Say what is beyond what was measured, and which leases are shorter than the work."""
        found = self._found
        said = [
            f"queue {each.queue}: 1 of 100 runs takes {show_ms(each.run_p99_ms)} or longer, its lease is"
            f" {show_ms(each.lease_ms)}, so these live by renewal alone"
            for each in self.profiles
            if each.run_p99_ms > each.lease_ms
        ]
        if found["delayed"] and not any(each.delayed_share for each in self.profiles):
            said.append("how many delayed messages are due a second was not measured: workers are planned without them")
        rows, most = found["open"] / max(1, found["workers"] - 1), _c("measured_rows")
        if rows > most:
            said.append(f"{rows:,.0f} open messages of a worker are more than the {most:,.0f} that were measured")
        if found["partitions"] > MANY_PARTITIONS:
            said.append(f"{found['partitions']:,.0f} partitions: so many RocksDBs in a worker were not measured")
        return said
