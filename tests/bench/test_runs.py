"""Benchmarks at their smallest size, on a real broker with real workers: they run to their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from bench import delays
from bench.clients.drain_marq import WAYS
from bench.load import fill
from bench.rows import scale, send, tracker
from bench.rows.drain import native
from bench.settings import Size
from bench.starts import PROBES, Victims, one_round
from bench.suite import Bench, measured
from bench.worker import BenchWorker
from broker.embedded import EmbeddedBroker

pytestmark = pytest.mark.verify


@pytest.fixture
def bench(broker: EmbeddedBroker, tmp_path: Path) -> Bench:
    return Bench(broker.bootstrap_servers, tmp_path, Size(4_000, 1, frozenset()), print, broker)


@pytest.mark.parametrize("way", ["send_many", "send"])
def test_sending_is_measured(bench: Bench, way: str) -> None:
    assert send.send(bench, way)["messages_per_second"] > 0


def test_a_tracker_writes_and_deletes_each_row(bench: Bench) -> None:
    figures = tracker.written(bench)

    assert figures["markers_per_second"] > 0
    assert figures["changelog_bytes_per_message"] > 200


def test_two_consumers_and_two_workers_share_the_work(bench: Bench) -> None:
    figures = scale.drained(bench, 2)

    assert 0.5 <= figures["largest_share"] < 1
    assert min(figures.values()) > 0


@pytest.mark.parametrize("client", ["drain_confluent", "drain_aiokafka", "drain_share"])
def test_a_peer_drains_a_topic_and_what_it_was_given_is_deleted(bench: Bench, client: str) -> None:
    # It checks by itself that each message came, and none twice.
    assert native(bench, client)["rate"] > 0

    prefix = bench._prefixes[0]
    bench.clear()
    admin = AdminClient({"bootstrap.servers": bench.servers})
    assert not [topic for topic in admin.list_topics(timeout=60).topics if topic.startswith(prefix)]


@pytest.mark.parametrize(("client", "at_a_time"), [("drain_confluent", "100"), ("drain_share", "2")])
def test_a_peer_works_on_messages_that_take_time(bench: Bench, client: str, at_a_time: str) -> None:
    assert native(bench, client, ("1", at_a_time))["rate"] > 0


@pytest.mark.parametrize(("way", "start"), [*((way, "marked") for way in WAYS), ("run", "transactional")])
async def test_marq_drains_by_every_way(servers: str, prefix: str, way: str, start: str) -> None:
    await fill(servers, prefix, 1_000, 200)

    # It checks by itself that each message came, and none twice.
    assert measured("bench.clients.drain_marq", servers, prefix, "1000", way, start)["rate"] > 0


async def test_a_kill_loses_nothing_and_redeliveries_behind_an_open_transaction_come(
    servers: str, prefix: str, tmp_path: Path
) -> None:
    with BenchWorker(servers, prefix, tmp_path) as worker:
        figures = await Victims(servers, prefix, tmp_path, "transactional", 2.0).run(worker, 1, lambda line: None)
        late = await one_round(servers, prefix, "open, member restarted")

    assert figures["kills"] == 1
    assert figures["sent"] > 0
    assert figures["lost"] == 0
    assert len(late) == PROBES


async def test_messages_that_wait_are_measured(servers: str, tmp_path: Path) -> None:
    size = delays.Size(pending=3_000, rate=50, seconds=2, partitions=2)

    figures = await delays.measure(servers, tmp_path, size, say=print)

    assert min(min(found) for name, found in figures.items() if "lateness" not in name) > 0
    assert {len(found) for found in figures.values()} == {1}
    assert len(delays.bars(figures)) == 4
