"""The life of embedded brokers: they start, stop, restart, and end with the program that started them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from marq_worker.broker import EmbeddedBroker, ports
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.settings import FIRST_NODE_ID
from tests.embedded.records import LIMIT_SECONDS, first_value, send
from tests.worker.harness import make_topic

pytestmark = pytest.mark.verify


async def test_a_topic_can_be_created_as_soon_as_start_returns_and_outlives_a_restart() -> None:
    with EmbeddedBroker() as broker:
        address = broker.bootstrap_servers
        await make_topic(address, "kept", 1)
        await send(broker, "kept", b"before")

        broker.stop()
        broker.start()

        assert broker.bootstrap_servers == address
        assert await first_value(broker, "kept") == b"before"


def test_a_start_may_fail_and_be_repeated_and_a_paused_broker_can_be_stopped() -> None:
    broker = EmbeddedBroker()
    with pytest.raises(BrokerError, match=r"not ready within 0\.01 s"):
        broker.start(limit_seconds=0.01)
    assert not broker.running

    broker.start()
    pid, directory = broker.pid, broker.data_directory
    assert broker.start().pid == pid

    broker.pause()
    broker.stop(LIMIT_SECONDS)
    assert not broker.running
    broker.close()
    broker.close()
    broker.stop()
    broker.kill()

    assert broker.pid is None
    assert not directory.exists()


def test_no_port_is_returned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_ephemeral_start", lambda: ports.LOWEST_PORT + 100)
    monkeypatch.setattr(ports, "_returned", set())

    returned = [ports.free_port("127.0.0.1") for _ in range(50)]

    assert len(set(returned)) == 50


def test_a_free_port_that_is_taken_before_the_broker_has_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        choices = [server.getsockname()[1], *(ports.free_port("127.0.0.1") for _ in range(3))]
        remaining = iter(choices)
        monkeypatch.setattr(ports, "free_port", lambda host: next(remaining))
        monkeypatch.setattr(ports, "bind_error", lambda host, port: None)

        with EmbeddedBroker() as broker:
            assert broker.bootstrap_servers == f"127.0.0.1:{choices[2]}"


def test_a_broker_does_not_outlive_a_program_that_got_kill_9() -> None:
    program = (
        "import sys; from marq_worker.broker import EmbeddedBroker; b = EmbeddedBroker().start(); "
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
    command = [sys.executable, "-m", "marq_worker.broker", "--data", str(tmp_path)]
    environment = {**os.environ, "MARQ_BOOTSTRAP_SERVERS": address}
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE) as server:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, b"")
        assert any(line.startswith(f"Kafka 4.4.0 on {address}".encode()) for line in lines)
        assert ports.is_ready(*ports.split_address(address), FIRST_NODE_ID, limit_seconds=30)

        server.send_signal(signal.SIGTERM)

        assert server.wait(LIMIT_SECONDS) == 0
    assert ports.is_free(*ports.split_address(address))
