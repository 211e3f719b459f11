"""Benchmarks at their smallest size, on a real broker with real workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from lab.bench import pipeline
from lab.bench.client import fill
from lab.bench.compare import Tree
from lab.bench.peers import drain
from lab.bench.rows import restarts, throughput, tracker
from lab.bench.rows.drain import RUN, native
from lab.bench.suite import Bench, BenchRow, Measurements, Size, measure
from lab.bench.synthetic_history import TURN
from lab.program import ROOT, measured
from marq.kafka.topics import ensure_topics
from marq_worker.broker.embedded import EmbeddedBroker

pytestmark = pytest.mark.verify


@pytest.fixture
def bench(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(broker.bootstrap_servers, tmp_path, Size(4_000, 1), print, broker)
    yield bench
    bench.end_processes()


def test_topics_have_the_partitions_of_the_size_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_PARTITIONS", "1")

    def partitions(bench: Bench) -> Measurements:
        bench.fill()
        topics = asyncio.run(ensure_topics(bench.client))
        return {"messages": topics.messages_partitions, "markers": topics.markers_partitions}

    outcome = measure(
        BenchRow("row", "what", {"filled": partitions}, warm=0), tmp_path, Size(100, 1, partitions=3), print
    )

    assert outcome.runs == {"filled": [{"messages": 3, "markers": 3}]}, outcome.error


@pytest.mark.parametrize("way", ["send_many", "send"])
def test_sending_is_measured(bench: Bench, way: str) -> None:
    assert throughput.send(bench, way)["messages_per_second"] > 0


def test_a_tracker_writes_and_deletes_each_row(bench: Bench) -> None:
    measurements = tracker.written(bench)

    assert measurements["markers_per_second"] > 0
    assert measurements["changelog_bytes_per_message"] > 200


def test_two_consumers_and_two_workers_share_the_work(bench: Bench) -> None:
    measurements = throughput.scale(bench, 2)

    assert 0.5 <= measurements["largest_share"] < 1
    assert min(measurements.values()) > 0


@pytest.mark.parametrize("peer", ["confluent", "aiokafka", "share"])
def test_a_peer_drains_a_topic_and_its_topics_are_deleted(bench: Bench, peer: str) -> None:
    # The client itself checks that each message came, and none twice.
    assert native(bench, peer)["rate"] > 0

    prefix = bench.names.prefix
    bench.clear()
    admin = AdminClient({"bootstrap.servers": bench.servers})
    assert not [topic for topic in admin.list_topics(timeout=60).topics if topic.startswith(prefix)]


@pytest.mark.parametrize(("peer", "at_a_time"), [("confluent", 100), ("share", 2)])
def test_a_peer_works_on_messages_that_take_time(bench: Bench, peer: str, at_a_time: int) -> None:
    assert native(bench, peer, (1, 1), (at_a_time,))["rate"] > 0


def test_a_row_of_another_tree_is_measured_on_this_broker(bench: Bench, tmp_path: Path) -> None:
    measurements = Tree("here", ROOT, tmp_path).measure(bench, "drain", RUN)

    assert measurements["rate"] > 0
    assert measurements["markers_and_changelog_of_payload"] > 0
    assert measurements["all_cpu_seconds"] > measurements["cpu_seconds"]


@pytest.mark.parametrize("way", ["run", "run_batch", "iterate"])
async def test_marq_drains_by_every_way(servers: str, prefix: str, way: str) -> None:
    await fill(servers, prefix, 1_000, 200)

    # The client itself checks that each message came, and none twice.
    assert measured(drain, "marq", servers, prefix, 1_000, 0, 1, (way,))["rate"] > 0


async def test_delayed_messages_are_measured(bench: Bench) -> None:
    bench.size = Size(3_000, partitions=2)

    measurements = await restarts.delay(bench, rate=50, seconds=2)

    assert min(value for name, value in measurements.items() if "lateness" not in name) > 0
    assert len(restarts.delays_bars({"marq": measurements})) == 4


async def test_kills_of_a_worker_with_open_leases_are_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_SESSION_TIMEOUT", "6")
    bench.size = Size(2_000, partitions=2)

    measurements = await restarts.recover(bench)

    assert len(restarts.recovery_bars({"marq": measurements})) == 4
    assert min(value for name, value in measurements.items() if "over_session" not in name) > 0
    # No worker can own the partitions of a killed one before its session ends, and part of that had passed.
    assert measurements["takeover_seconds"] > 3


@pytest.mark.skipif(os.environ.get("SPARK") == "skip", reason="SPARK=skip: tests on Spark are left out")
@pytest.mark.timeout(1_200)  # three starts of Spark
def test_the_pipeline_finds_the_truth_of_a_history(bench: Bench) -> None:
    bench.size = Size(5 * TURN)

    measurements = pipeline.measure(bench)

    assert measurements["markers"] > 2 * 5 * TURN
    assert len(pipeline.bars({"tenth": measurements, "all": measurements})) == 4
