"""What a drain takes: memory of each process, and bytes that are written to Kafka for each message."""

from __future__ import annotations

from bench.bars import Bar
from bench.load import QUEUE
from bench.rows.drain import filled
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker
from marq.core.names import Names

CONSUMER_MIB, WORKER_MIB = 250.0, 400.0
#: Markers and changelog, of the payload.
MOST_OF_PAYLOAD = 1.3
MIB = float(1 << 20)


def drained(bench: Bench) -> Figures:
    prefix, _ = filled(bench)
    names, count = Names(prefix), bench.size.messages
    with BenchWorker(bench.servers, prefix, bench.folder) as worker:
        worker.wait_until_owner()
        figures = measured("bench.clients.drain_marq", bench.servers, prefix, str(count), "run")
        worker.wait_until_drained(QUEUE, count)
        found = {
            "consumer_peak_mib": figures["peak_bytes"] / MIB,
            "worker_peak_mib": worker.memory("VmHWM") / MIB,
        }
    # The worker has ended: what it writes last is there.
    topics = {"messages": names.messages, "markers": names.markers, "changelog": names.changelog}
    written = {name: bench.log_bytes(topic) / count for name, topic in topics.items()}
    of_payload = (written["markers"] + written["changelog"]) / bench.size.value_bytes
    return {
        **found,
        **{f"{name}_bytes_per_message": found for name, found in written.items()},
        "markers_and_changelog_of_payload": of_payload,
    }


def bars(medians: Medians) -> list[Bar]:
    found = medians["marq run"]
    return [
        Bar("memory of a consumer, at the most", found["consumer_peak_mib"], CONSUMER_MIB, "MiB"),
        Bar("memory of a worker, at the most", found["worker_peak_mib"], WORKER_MIB, "MiB"),
        Bar("markers and changelog", found["markers_and_changelog_of_payload"], MOST_OF_PAYLOAD, "times the payload"),
    ]


MEMORY = Row(
    "memory",
    "a drain, handler per message: the most memory of each process, and what the broker's logs hold after it",
    {"marq run": drained},
    bars,
    runs=3,
)
