"""What the tour goes through: a namespace that has had the demo's load, and of each kind of message some more."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import marq
from lab.demo.run import QUEUES, WORKERS, DemoPlan, make_value
from lab.program import Program, RunError, Worker, recorded, stop_all
from lab.topics import delete_topics
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from tests.browser.serving import Background

#: How long workers and consumers may take to be there, on a machine that is busy.
READY_SECONDS = 100.0
POLL_SECONDS = 0.1
#: Messages of one send_many.
SEND_CHUNK = 2_000
#: Longer than any step takes.
LEASE_SECONDS = 600.0
DELAY_SECONDS = 3_600.0
#: A machine may freeze for this long without losing a lease.
SESSION_SECONDS = 120.0

#: A hostile sender may use such a name and such a value.
HELD = "letters/böse"
HOSTILE = b'{"card": "4111-1111", "name": "<img src=x onerror=alert(1)>"}'
DELAYED, DEAD, WAITING = "reminders", "orders", "nobody's"
#: How many messages there are of each of these.
DELAYED_COUNT, DEAD_COUNT, WAITING_COUNT = 3, 5, 2

_SCHEDULE = """
[schedules.nightly]
queue = "reports"
cron = "0 2 * * *"
"""


class Stage:
    """Workers and clients; the clients run in the background."""

    def __init__(
        self,
        background: Background,
        workers: list[Worker],
        consumers: list[Program],
        settings: ClientSettings,
        plan: DemoPlan,
    ) -> None:
        self.run = background.run
        self.plan = plan
        self._workers = workers
        self._demo_consumers = consumers
        self._servers = settings.bootstrap_servers
        self._prefix = settings.names.prefix
        self._consumers: dict[str, marq.Consumer] = {}
        self._are_ready: set[str] = set()
        self.producer = marq.Producer(self._servers, prefix=self._prefix)

    @property
    def url(self) -> str:
        """Where the pages are."""
        return self._workers[0].url

    @property
    def other_url(self) -> str:
        """Where the same pages are, of another worker."""
        return self._workers[-1].url

    def log(self) -> str:
        """What all workers have written to their logs."""
        return "\n".join(worker.log() for worker in self._workers)

    def receive(self, queue: str, count: int) -> list[marq.Message]:
        """Take so many messages of a queue, and hold them."""
        return self.run(self._receive(queue, count))

    async def _receive(self, queue: str, count: int) -> list[marq.Message]:
        consumer = self._consumers.get(queue)
        if consumer is None:
            options = {"bootstrap_servers": self._servers, "prefix": self._prefix, "session_timeout": SESSION_SECONDS}
            consumer = marq.Consumer(queue, lease=LEASE_SECONDS, **options)
            self._consumers[queue] = consumer
            await consumer.start()
        found: list[marq.Message] = []
        while len(found) < count:
            found += await consumer.receive(max_messages=count - len(found), wait=20)
        return found

    def hold(self) -> marq.Message:
        """Send a message to :data:`HELD`, and hold it."""
        sent = self.run(self.producer.send(HELD, HOSTILE))
        return self.again(HELD, sent.id)

    def again(self, queue: str, identity: str) -> marq.Message:
        """Take a message; others that come first stay held."""
        while True:
            [message] = self.receive(queue, 1)
            if message.id == identity:
                return message

    def prepare(self) -> None:
        """Let the demo's load come and go, and leave some messages of each kind.

        Raises:
            RunError: it took too long.
        """
        self._until(self._ready, READY_SECONDS, "workers and consumers are ready")
        self.run(self.producer.start(), READY_SECONDS)
        self.run(self._send(), self.plan.limit_seconds)
        self._until(self._ended, self.plan.limit_seconds, "each of the demo's messages is acknowledged or dead")
        stop_all(self._demo_consumers)
        self.run(self._leave(), READY_SECONDS)

    def stop(self) -> None:
        for consumer in self._consumers.values():
            self.run(consumer.stop())
        self.run(self.producer.stop())

    def _ready(self) -> bool:
        for consumer in self._demo_consumers:
            self._are_ready.update(event["process"] for event in consumer.new_events() if event["op"] == "ready")
        found = [list(worker.owned().values()) for worker in self._workers]
        owned = all(found) and all(part["state"] == "owner" for parts in found for part in parts)
        return owned and len(self._are_ready) == len(self._demo_consumers)

    async def _send(self) -> None:
        plan = self.plan
        for index, queue in enumerate(plan.queue_names):
            values = [make_value(number) for number in range(index, plan.messages, plan.queues)]
            for start in range(0, len(values), SEND_CHUNK):
                await self.producer.send_many(queue, values[start : start + SEND_CHUNK])

    def _ended(self) -> bool:
        queues = self._workers[0].statistics().get("queues", {})
        rows = [queues[name] for name in self.plan.queue_names if name in queues]
        still = sum(row["in_flight"] + row["waiting_for_redelivery"] + row["waiting_for_dead_letters"] for row in rows)
        return not still and sum(row["acked"] + row["dead_lettered"] for row in rows) >= self.plan.messages

    async def _leave(self) -> None:
        await self.producer.send(HELD, HOSTILE)
        for number in range(DELAYED_COUNT):
            await self.producer.send(DELAYED, b"reminder %d" % number, delay=DELAY_SECONDS * (number + 1))
        await self.producer.send_many(DEAD, [b"order %d" % number for number in range(DEAD_COUNT)])
        await self.producer.send_many(WAITING, [b'{"said": "while nobody listens"}'] * WAITING_COUNT)
        await self._receive(HELD, 1)
        for number, message in enumerate(await self._receive(DEAD, DEAD_COUNT)):
            await message.reject(f"no customer {number}")

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        until_s = time.monotonic() + limit_s
        while not condition():
            programs = [*self._workers, *self._demo_consumers]
            for program in programs:
                program.check()
            if time.monotonic() > until_s:
                logs = "\n".join(program.log_tail() for program in programs)
                raise RunError(f"time ran out before {what}\n{logs}")
            time.sleep(POLL_SECONDS)


@contextmanager
def staged(background: Background, servers: str, folder: Path, plan: DemoPlan) -> Iterator[Stage]:
    """Make a namespace on a broker, and end it; raises as :meth:`Stage.prepare`."""
    settings = ClientSettings.read(servers, {"prefix": f"tour-{secrets.token_hex(4)}"})
    background.run(ensure_topics(settings))
    queues = folder / "queues.toml"
    queues.write_text(QUEUES + _SCHEDULE)
    environment = {
        "MARQ_BOOTSTRAP_SERVERS": servers,
        "MARQ_PREFIX": settings.names.prefix,
        "MARQ_QUEUES_FILE": str(queues),
        "MARQ_WEB_BIND": "127.0.0.1",
        "MARQ_REDACT": "card",
        # Pages show what was written this long ago.
        "MARQ_FLUSH_INTERVAL": "0.2",
    }
    workers = [Worker(f"worker-{n + 1}", folder, environment, temporary=[folder]) for n in range(WORKERS)]
    consumers = []
    for name in [f"consumer-{n + 1}" for n in range(plan.consumers)]:
        command = recorded(name, folder, "lab.consumer", [",".join(plan.queue_names), *plan.consumer_options])
        consumers.append(Program(name, command, environment, folder / f"{name}.log", temporary=[folder]))
    with ExitStack() as stack:
        for program in (*workers, *consumers):
            stack.enter_context(program)
        stage = Stage(background, workers, consumers, settings, plan)
        try:
            stage.prepare()
            yield stage
        finally:
            stage.stop()
    background.run(delete_topics(settings))
