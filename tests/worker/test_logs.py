"""What a worker and its handlers log of the messages that go through them: not what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import Namespace, Worker, eventually

SECRET = "7d1c-nobody-may-read-this"
QUEUES = """
[queues.coroutine]
handler = "handlers_of_the_test:coroutine"

[queues.failing]
handler = "failing_handlers:fail"
max_attempts = 2
backoff = [0]
"""
HANDLERS = """
import logging

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import marq

trace.set_tracer_provider(TracerProvider())


@marq.handler("failing")
async def fail(message):
    logging.getLogger("marq.test").info("tried: attempt=%d", message.attempt)
    raise ValueError("no good")
"""


#: The sender's trace, as it is in the header.
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_payloads_are_in_no_line_at_any_level_and_lines_are_json(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, handlers: Handlers
) -> None:
    (handlers.directory / "failing_handlers.py").write_text(HANDLERS)
    settings = {**handlers.environment, "MARQ_LOG_FORMAT": "json", "MARQ_TRACING": "true"}
    worker = new_worker(queues=QUEUES, environment=settings)
    worker.command[-1] = "debug"
    await worker.start().ready()

    secret = {"headers": {"token": SECRET.encode(), "traceparent": f"00-{TRACE}-{SPAN}-01".encode()}}
    async with (
        marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer,
        Namespace(broker.bootstrap_servers, worker.names) as namespace,
    ):
        await producer.send("coroutine", SECRET.encode(), **secret)
        await producer.send("failing", SECRET.encode(), delay=0.5, **secret)
        await producer.send("coroutine", SECRET.encode(), delay=0.5, **secret)
        # Into the quarantine.
        await namespace.mark(SECRET.encode(), partition=0)
        await eventually(lambda: worker.queue("failing"), lambda found: found.get("dead_lettered") == 1)
        await eventually(lambda: worker.queue("coroutine"), lambda found: found.get("acked") == 2)
    await worker.stop()

    log = worker.log()
    assert SECRET not in log
    assert SECRET.encode().hex() not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    failures = [line for line in lines if "failed" in line["message"] and "error" in line]
    assert [(line["queue"], line["attempt"], line["error"]) for line in failures] == [
        ("failing", 1, "ValueError: no good"),
        ("failing", 2, "ValueError: no good"),
    ]
    assert any(line["level"] == "debug" for line in lines)
    # Delayed, and then redelivered: both attempts are in the trace of the sender, each in a span of its own.
    tried = [line for line in lines if line["logger"] == "marq.test"]
    assert [(line["attempt"], line["trace_id"]) for line in tried] == [(1, TRACE), (2, TRACE)]
    assert len({SPAN, *(line["span_id"] for line in tried)}) == 3


async def test_marq_worker_speaks_marq_in_a_few_lines_and_says_that_it_has_stopped(
    new_worker: Callable[..., Worker], handlers: Handlers
) -> None:
    queues = '[queues.coroutine]\nhandler = "handlers_of_the_test:coroutine"\n'
    worker = new_worker(queues=queues, environment=handlers.environment)
    worker.command[1:] = ["-m", "marq_worker", "worker"]
    worker.start()

    async def ready() -> bool:
        return "ready in " in worker.log()

    await eventually(ready)
    await worker.stop()

    lines = worker.log().splitlines()
    assert len(lines) <= 15, lines
    assert "Starting..." not in worker.log()
    assert any("queue coroutine: handlers_of_the_test:coroutine, concurrency 64" in line for line in lines)
    assert "stopped by SIGTERM in " in lines[-1]


async def test_a_start_that_fails_prints_its_error_and_nothing_else(new_worker: Callable[..., Worker]) -> None:
    worker = new_worker(environment={"MARQ_BOOTSTRAP_SERVERS": "127.0.0.1:1", "MARQ_CONNECT_TIMEOUT": "0.5"})
    worker.command[1:] = ["-m", "marq_worker", "worker"]

    code = await worker.start().ended()

    [line] = worker.log().splitlines()
    assert code == 1
    assert line.startswith("marq: no Kafka broker could be used at 127.0.0.1:1")
