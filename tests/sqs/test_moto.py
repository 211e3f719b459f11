"""moto, an independent server of the SQS API, and the endpoint answer the same calls alike."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import pytest_asyncio

from lab.program import Program
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.broker.ports import free_port
from tests.sqs import environments
from tests.sqs.fifo_script import FifoScript
from tests.sqs.mistakes import DIFFERENCES, QUEUES, mistakes, outcome
from tests.sqs.script import Call, Drain, Script
from tests.sqs.service import Service
from tests.worker.harness import Worker, eventually

# The time limit covers the first test, which also installs the client.
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

#: Scripts that run at the same time, on queues of their own.
SEEDS = (1, 2, 3)
#: Most calls at the same time; a call about a missing queue waits until the endpoint has looked for it.
THREADS = 8


class Services(NamedTuple):
    marq: Service
    moto: Service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def services(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    python = await asyncio.to_thread(environments.python, "judges")
    directory = tmp_path_factory.mktemp("worker")
    ports = free_port("127.0.0.1"), free_port("127.0.0.1")
    worker = Worker(
        broker.bootstrap_servers,
        directory,
        environment={"MARQ_ROLES": "tracker,handlers,web,sqs", "MARQ_SQS_PORT": str(ports[0])},
    )
    command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(ports[1])]
    moto = Program("moto", command, {"PYTHONPATH": ""}, directory / "moto.log")

    async def listens() -> bool:
        moto.check()
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", ports[1])) == 0

    try:
        worker.start()
        moto.start()
        await worker.ready()
        await eventually(listens, lambda ready: ready)
        both = Services(Service(ports[0], "000000000000"), Service(ports[1], "123456789012"))
        yield both
        for service in both:
            service.close()
    finally:
        moto.kill()
        worker.close()


async def test_random_scripts_have_the_same_answers(services: Services) -> None:
    scripts = [kind(seed) for kind in (Script, FifoScript) for seed in SEEDS]
    await asyncio.gather(*[asyncio.to_thread(run, script, services) for script in scripts])


def run(script: Script, services: Services) -> None:
    """Carry out a script on both services, step by step."""
    for number, step in enumerate(script.steps()):
        where = f"{type(script).__name__}({script.seed}), step {number}: {step}"
        match step:
            case Call():
                assert services.marq.call(step) == services.moto.call(step), where
            case Drain():
                messages = services.marq.drain(step)
                assert messages == services.moto.drain(step), where
                assert [message["Body"] for message in messages] == sorted(step.receives), where
                for message in messages:
                    count = message.get("Attributes", {}).get("ApproximateReceiveCount")
                    assert count in (None, str(step.receives[message["Body"]])), where


async def test_mistakes_have_the_same_answers_except_those_listed(services: Services) -> None:
    for queue, service in ((queue, service) for queue in QUEUES for service in services):
        await asyncio.to_thread(service.call, Call("create", "create_queue", None, {"QueueName": queue}))
    calls = list(mistakes())

    def answers(call: Call) -> tuple[str, str]:
        return outcome(services.marq.call(call)), outcome(services.moto.call(call))

    with ThreadPoolExecutor(THREADS) as threads:
        outcomes = await asyncio.to_thread(lambda: list(threads.map(answers, calls)))

    differing = {call.name: answers for call, answers in zip(calls, outcomes, strict=True) if answers[0] != answers[1]}
    assert differing == {name: (difference.marq, difference.moto) for name, difference in DIFFERENCES.items()}
    assert all(marq.startswith("400 ") for marq, _ in outcomes)
