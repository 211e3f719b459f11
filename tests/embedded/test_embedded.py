"""The embedded broker, for real."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from broker import EmbeddedBroker, ports, probe, settings
from broker.errors import BrokerError
from broker.membership import FIRST_NODE_ID

LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One broker for the tests that leave it running; a directory as users have them."""
    with EmbeddedBroker(tmp_path_factory.mktemp("with space") / "and=sign") as broker:
        yield broker


async def send(broker: EmbeddedBroker, topic: str, value: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        await producer.send_and_wait(topic, value)


async def first_value(broker: EmbeddedBroker, topic: str) -> bytes | None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    async with consumer:
        record = await consumer.getone()
        value: bytes | None = record.value
        return value


async def create(broker: EmbeddedBroker, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()


async def test_a_topic_can_be_created_as_soon_as_start_returns_and_outlives_a_restart(broker: EmbeddedBroker) -> None:
    address = broker.bootstrap_servers
    await create(broker, "kept")
    await send(broker, "kept", b"before")

    broker.restart()

    assert broker.bootstrap_servers == address
    assert await first_value(broker, "kept") == b"before"


async def test_what_was_acknowledged_outlives_kill_9(broker: EmbeddedBroker) -> None:
    await create(broker, "killed")
    await send(broker, "killed", b"before")

    broker.kill()
    assert not broker.running
    broker.start()

    assert await first_value(broker, "killed") == b"before"


async def test_a_topic_that_nobody_created_stays_absent(broker: EmbeddedBroker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        await admin.describe_topics(["misspelt"])
        assert "misspelt" not in await admin.list_topics()
    finally:
        await admin.close()


def test_a_paused_broker_takes_connections_and_answers_nothing(broker: EmbeddedBroker) -> None:
    host, port = ports.split_address(broker.bootstrap_servers)

    broker.pause()
    while_paused = probe.is_ready(host, port, FIRST_NODE_ID, limit_seconds=0.2)
    broker.resume()

    assert not while_paused
    assert probe.is_ready(host, port, FIRST_NODE_ID, limit_seconds=LIMIT_SECONDS)


def test_a_paused_broker_can_be_stopped() -> None:
    with EmbeddedBroker() as broker:
        broker.pause()
        broker.stop(LIMIT_SECONDS)

        assert not broker.running


def test_start_and_stop_can_be_repeated_and_close_takes_the_temporary_data_away() -> None:
    broker = EmbeddedBroker()
    broker.start()
    pid, directory = broker.pid, broker.data_directory
    assert broker.start().pid == pid

    broker.close()
    broker.close()
    broker.stop()
    broker.kill()

    assert broker.pid is None
    assert not directory.exists()


def test_a_second_broker_on_the_same_data_says_so(broker: EmbeddedBroker) -> None:
    second = EmbeddedBroker(broker.data_directory)

    with pytest.raises(BrokerError, match=r"another broker uses .*: stop that one or choose another directory"):
        second.start()

    assert broker.running


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        with pytest.raises(BrokerError) as error:
            EmbeddedBroker(address=address).start()

    assert f"{address} is in use: set MARQ_BOOTSTRAP_SERVERS to another host:port, or stop what" in str(error.value)


def test_a_free_port_that_is_taken_before_the_broker_has_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        choices = [server.getsockname()[1], *(ports.free_port("127.0.0.1") for _ in range(3))]
        remaining = iter(choices)
        monkeypatch.setattr(ports, "free_port", lambda host: next(remaining))
        monkeypatch.setattr(ports, "is_free", lambda host, port: True)

        with EmbeddedBroker() as broker:
            assert broker.bootstrap_servers == f"127.0.0.1:{choices[2]}"


def test_a_setting_that_kafka_refuses_ends_the_start_with_its_reason() -> None:
    with pytest.raises(BrokerError) as error:
        EmbeddedBroker(properties={"num.io.threads": "many"}).start()

    assert "one of its settings is wrong" in str(error.value)
    assert "num.io.threads" in str(error.value)


def test_a_heap_that_java_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_BROKER_HEAP", "lots")

    with pytest.raises(BrokerError, match=r"set MARQ_BROKER_HEAP to e\.g\. 512m"):
        EmbeddedBroker().start()


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BrokerError, match=r"cannot write its directory.*make room there"):
        EmbeddedBroker(tmp_path / "file").start()


def test_a_start_that_takes_too_long_leaves_no_process() -> None:
    broker = EmbeddedBroker()

    with pytest.raises(BrokerError, match=r"not ready within 0\.01 s"):
        broker.start(limit_seconds=0.01)

    assert not broker.running


@pytest.mark.parametrize("address", ["9092", "localhost", "a:b", ":9092", "a:0", "a:65536", "a:1,b:2"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BrokerError, match="is not an address"):
        EmbeddedBroker(address=address)


def test_before_its_first_start_a_broker_has_no_address() -> None:
    with pytest.raises(BrokerError, match="no address before its first start"):
        _ = EmbeddedBroker().bootstrap_servers


def test_a_broker_does_not_outlive_a_program_that_got_kill_9() -> None:
    program = (
        "import sys; from broker import EmbeddedBroker; b = EmbeddedBroker().start(); "
        "print(b.pid, b.data_directory, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=PIPE) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()

        parent.kill()
        # The watchdog has the program's stderr: its end is the sign that the watchdog has done its work.
        _, errors = parent.communicate(timeout=LIMIT_SECONDS)

    assert errors == b""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert not Path(directory.decode()).exists()


def test_python_m_broker_serves_until_sigterm(tmp_path: Path) -> None:
    address = f"127.0.0.1:{ports.free_port('127.0.0.1')}"
    command = [sys.executable, "-m", "broker", "--data", str(tmp_path)]
    environment = {**os.environ, "MARQ_BOOTSTRAP_SERVERS": address}
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE) as server:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, b"")
        assert any(line.startswith(f"Kafka 4.3.1 on {address}".encode()) for line in lines)
        assert probe.is_ready(*ports.split_address(address), FIRST_NODE_ID)

        server.send_signal(signal.SIGTERM)

        assert server.wait(LIMIT_SECONDS) == 0
    assert ports.is_free(*ports.split_address(address))


def test_settings_reach_java_as_they_are() -> None:
    text = settings.render({"path": " C:\\data", "name": "dätä"})

    assert text == "path=\\ C:\\\\data\nname=d\\u00e4t\\u00e4\n"
