"""The conditions of fault scenarios: clusters, proxies, clocks and disks."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic
from aiokafka.errors import KafkaError

from lab.faults.conditions import BrokerCluster, ConditionError, Proxy, SmallDisk, WallClock
from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings
from tests.worker.harness import eventually

LIMIT_SECONDS = 180.0
Connection = tuple[StreamReader, StreamWriter]


async def make_topic(servers: str, name: str) -> None:
    async with admin_client(ClientSettings.read(servers, environment={})) as admin:
        answer = await admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=3)])
        assert [error[1] for error in answer.topic_errors] == [0]


@pytest.mark.verify
async def test_a_cluster_takes_writes_without_one_node_and_refuses_them_without_two() -> None:
    cluster = BrokerCluster()
    try:
        await asyncio.to_thread(cluster.start)
        await make_topic(cluster.bootstrap_servers, "kept")
        leader = await eventually(lambda: cluster.leader_of("kept", 0), lambda found: found is not None)
        assert leader is not None
        options = {"bootstrap_servers": cluster.bootstrap_servers, "acks": "all", "request_timeout_ms": 10_000}

        cluster.kill(leader)
        async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer:
            kept = await asyncio.wait_for(producer.send_and_wait("kept", b"without one"), LIMIT_SECONDS)
        assert kept.offset == 0
        await eventually(lambda: cluster.leader_of("kept", 0), lambda found: found in cluster.running)

        async with AIOKafkaProducer(**options) as producer:
            cluster.kill(min(cluster.running))
            with pytest.raises((KafkaError, TimeoutError)):
                await asyncio.wait_for(producer.send_and_wait("kept", b"without two"), LIMIT_SECONDS)
    finally:
        await asyncio.to_thread(cluster.close)


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of an echo server."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server, Proxy() as proxy:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy.forward_to(f"127.0.0.1:{server.server_address[1]}")
        yield proxy
        server.shutdown()


@asynccontextmanager
async def connection_to(proxy: Proxy) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def echo(connection: Connection, data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), LIMIT_SECONDS)


async def test_a_proxy_passes_all_and_delays_each_direction(proxy: Proxy) -> None:
    much = bytes(range(256)) * 8192
    async with connection_to(proxy) as connection:
        assert await echo(connection, much) == much

        proxy.delay(0.2)
        began = time.monotonic()
        await echo(connection, b"late")

    assert time.monotonic() - began >= 0.4


async def test_a_proxy_that_is_cut_ends_connections_and_refuses_new_ones_until_it_is_restored(proxy: Proxy) -> None:
    async with connection_to(proxy) as connection:
        await echo(connection, b"before")

        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(connection[0].read(1), LIMIT_SECONDS)
    with pytest.raises(ConnectionRefusedError):
        async with connection_to(proxy):
            pass
    proxy.restore()

    async with connection_to(proxy) as connection:
        assert await echo(connection, b"after") == b"after"


async def test_a_proxy_that_is_frozen_keeps_and_takes_connections_and_forwards_nothing(proxy: Proxy) -> None:
    async with connection_to(proxy) as old:
        await echo(old, b"before")

        proxy.freeze("to client")
        async with connection_to(proxy) as new:
            answers = [asyncio.create_task(echo(old, b"held")), asyncio.create_task(echo(new, b"new"))]
            answered, _ = await asyncio.wait(answers, timeout=0.5)
            proxy.restore()

            assert not answered
            assert await asyncio.gather(*answers) == [b"held", b"new"]


def test_a_clock_that_cannot_be_moved_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConditionError, match="apt-get install faketime"):
        WallClock(tmp_path / "clock", libraries=[f"{tmp_path}/*/libfaketime.so.1"])


def test_a_disk_that_cannot_be_mounted_names_the_missing_privilege(tmp_path: Path) -> None:
    with pytest.raises(ConditionError, match="the right to mount a tmpfs"), SmallDisk(tmp_path, mount="false"):
        pass
