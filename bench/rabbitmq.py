"""A RabbitMQ broker for the benchmark: the one that RABBITMQ_URL names, or a new one if it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.suite import Skipped
from broker import ports

URL = "RABBITMQ_URL"
PROGRAM = "rabbitmq-server"
HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 60.0, 15.0


@contextmanager
def rabbitmq() -> Iterator[str]:
    """Yield the URL of a broker.

    Raises:
        Skipped: none is named, and none can be started.
    """
    if url := os.environ.get(URL):
        yield url
        return
    if shutil.which(PROGRAM) is None:
        raise Skipped(f"no {PROGRAM} is installed, and {URL} is not set")
    with tempfile.TemporaryDirectory(prefix="marq-bench-rabbitmq-", ignore_cleanup_errors=True) as name:
        # The program may switch to another user.
        Path(name).chmod(0o777)
        with _started(Path(name)) as port:
            yield f"amqp://guest:guest@{HOST}:{port}/"


@contextmanager
def _started(folder: Path) -> Iterator[int]:
    port, registry = ports.free_port(HOST), ports.free_port(HOST)
    environment = {**os.environ, **_settings(folder, port, registry)}
    (folder / "enabled_plugins").write_text("[].\n")
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            [PROGRAM], env=environment, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, folder)
        yield port
    finally:
        _stop(process, folder)
        # The broker started it, and it outlives the broker.
        subprocess.run(["epmd", "-port", str(registry), "-kill"], capture_output=True, check=False)


def _settings(folder: Path, port: int, registry: int) -> dict[str, str]:
    return {
        "RABBITMQ_NODENAME": f"marq-bench-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(ports.free_port(HOST)),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "no-settings"),
        "ERL_EPMD_PORT": str(registry),
        "ERL_EPMD_ADDRESS": HOST,
    }


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while ports.is_free(HOST, port):
        if process.poll() is not None or time.monotonic() > until:
            output = (folder / "console").read_text(errors="replace").strip()
            raise Skipped(f"{PROGRAM} does not start here: {output or 'it wrote nothing'}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop the broker; ``process`` may be a shell that only waits for it."""
    pid_file = folder / "pid"
    if pid_file.exists() and process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
