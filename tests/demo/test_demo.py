"""The demo as a user runs it, on a few thousand messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.topics import delete_topics
from marq.kafka.connection import admin_client
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq_worker.broker.embedded import EmbeddedBroker

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600


def command(broker: EmbeddedBroker, folder: Path, **sizes: str) -> tuple[list[str], Mapping[str, str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MARQ_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        # What is left behind would be found here.
        "TMPDIR": str(folder),
        "DEMO_QUEUES": "5",
        # The audit takes as long as the run; one test has it.
        "SPARK": "skip",
        **sizes,
    }
    return [sys.executable, "-m", "lab.demo"], environment


def run(arguments: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes that name a folder: journals, data directories, watchdogs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text:
            found.append(text)
    return found


@pytest.mark.timeout(LIMIT_SECONDS + 10)
def test_each_message_of_a_small_run_is_accounted_for(
    broker: EmbeddedBroker, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = str(tmp_path_factory.mktemp("pipeline") / "data")

    result = run(*command(broker, tmp_path, DEMO_MESSAGES="4000", DEMO_HELD="30", MARQ_PIPELINE_DATA=data, SPARK=""))

    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["sent"], found["acked"], found["dead"], found["lost"]) == (4_000, 3_995, 5, 0)
    assert (found["from_nowhere"], found["false_acks"], found["duplicates_unexplained"]) == (0, 0, 0)
    # 5 messages fail four times and come back, 80 twice; 400 are forgotten. A kill takes some of these deliveries.
    assert found["redelivered_released"] >= 100
    assert found["redelivered_expired"] >= 300
    assert found["held_at_kill"] >= 30
    assert found["rows_at_worker_kill"] > 0
    assert found["open_at_end"] == 0
    assert found["audit"] == "agrees"
    assert f"{data}/report.html" in result.stdout, result.stdout
    assert (Path(data) / "report.html").exists()
    phases = [line.partition("==> ")[2] for line in result.stderr.splitlines() if "==> " in line]
    assert [phase for phase in phases if phase.startswith(("drain", "audit: ", "plots: "))] == [
        "drain: wait until each message is acknowledged or dead-lettered",
        "audit: ingest",
        "audit: lifecycle",
        "audit: audit",
        "plots: stats",
    ]
    assert list(tmp_path.iterdir()) == []
    assert processes_below(tmp_path) == []


def test_a_demo_that_is_stopped_leaves_nothing_behind(broker: EmbeddedBroker, tmp_path: Path) -> None:
    arguments, environment = command(broker, tmp_path, DEMO_MESSAGES="4000")
    with subprocess.Popen(arguments, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Some lines come before: the one that says that all is running.
        for line in process.stderr:
            if "are ready" in line:
                break

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=180)

    assert process.returncode == 130, errors
    assert list(tmp_path.iterdir()) == []
    assert processes_below(tmp_path) == []


def test_an_address_without_a_broker_is_said_in_a_sentence(broker: EmbeddedBroker, tmp_path: Path) -> None:
    result = run(*command(broker, tmp_path, MARQ_BOOTSTRAP_SERVERS="127.0.0.1:1", MARQ_CONNECT_TIMEOUT="1"))

    assert result.returncode == 2
    assert "error: no Kafka broker could be used at 127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_worker_that_does_not_start_is_said_with_the_end_of_its_log(broker: EmbeddedBroker, tmp_path: Path) -> None:
    result = run(*command(broker, tmp_path, MARQ_STOP_TIMEOUT="soon"))

    assert result.returncode == 2
    assert "ended by itself" in result.stderr
    assert "MARQ_STOP_TIMEOUT" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_time_that_runs_out_is_said_with_what_is_missing(broker: EmbeddedBroker, tmp_path: Path) -> None:
    result = run(*command(broker, tmp_path, DEMO_LIMIT="0.5"))

    assert result.returncode == 2
    assert "time ran out before workers and consumers are ready" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_consumer_that_never_held_enough_is_a_failure(broker: EmbeddedBroker, tmp_path: Path) -> None:
    result = run(*command(broker, tmp_path, DEMO_MESSAGES="300", DEMO_HELD="1000"))

    assert result.returncode == 1, result.stdout + result.stderr
    assert "NOT AS PROMISED: the consumer that was killed held" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["lost"] == 0


async def test_the_topics_of_a_run_are_deleted_from_a_broker_that_goes_on(broker: EmbeddedBroker, prefix: str) -> None:
    mine = ClientSettings.read(broker.bootstrap_servers, {"prefix": prefix})
    other = ClientSettings.read(broker.bootstrap_servers, {"prefix": f"{prefix}x"})
    await ensure_topics(mine)
    await ensure_topics(other)

    failure = await delete_topics(mine)

    assert failure is None
    # A broker says that a topic is deleted a moment before it stops listing it.
    async with admin_client(other) as admin, asyncio.timeout(60):
        while any(name.startswith(f"{prefix}.") for name in await admin.list_topics()):
            pass
        left = [name for name in await admin.list_topics() if name.startswith(prefix)]
    assert left
    assert all(name.startswith(f"{prefix}x.") for name in left)
