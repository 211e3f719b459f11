"""A real worker as a subprocess, and its topics, which tests write and read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

import lab.program
import marq
from marq.core.lease_book import LeaseBook
from marq.core.storage import rows
from marq.kafka.connection import stop_consumer, stop_producer
from marq.settings.queue import QueueSettings
from marq.wire import record_headers
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Ack, Acquire, Batch, Fact, Kind, Payload, Reject, Release, Source, Tick
from marq.wire.names import ATTEMPT_HEADER, ID_HEADER, Names, markers_partition
from marq_worker.broker import ports

ROOT = Path(__file__).resolve().parents[2]
#: Time limit for anything that the subject of a test does not limit.
LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.05
#: Distance between the web ports of workers of different tests, which run at the same time.
SPACED_PORTS = 4
HOLDER = 0xA11CE

Found = TypeVar("Found")
Record = ConsumerRecord[Any, Any]


async def eventually(
    look: Callable[[], Awaitable[Found]], enough: Callable[[Found], object] = bool, *, limit: float = LIMIT_SECONDS
) -> Found:
    """Return what ``look`` finds as soon as that is ``enough``; fail with the last result after ``limit`` seconds."""
    until = time.monotonic() + limit
    while True:
        found = await look()
        if enough(found):
            return found
        assert time.monotonic() < until, f"not within {limit} s; the last that was seen: {found!r}"
        await asyncio.sleep(POLL_SECONDS)


async def take(consumer: marq.Consumer, count: int = 1) -> list[marq.Message]:
    """Receive exactly this many messages."""
    messages: list[marq.Message] = []
    while len(messages) < count:
        more = await consumer.receive(count - len(messages), wait=LIMIT_SECONDS)
        assert more, f"only {len(messages)} of {count} messages came"
        messages += more
    return messages


async def throughout(seconds: float, look: Callable[[], Awaitable[Found]], fits: Callable[[Found], object]) -> None:
    """Fail as soon as ``look`` finds something, within ``seconds``, that does not fit."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = await look()
        assert fits(found), f"seen while it must not be: {found!r}"
        await asyncio.sleep(POLL_SECONDS)


def free_web_port() -> int:
    """Return a port for a worker; a second one with the same settings takes the next, which other tests do not use."""
    while True:
        port = ports.free_port("127.0.0.1") // SPACED_PORTS * SPACED_PORTS
        if all(ports.is_free("127.0.0.1", port + further) for further in range(SPACED_PORTS)):
            return port


class Worker(lab.program.Worker):
    """``faust -A app worker`` in a directory of its own; never outlives the test, nor pytest."""

    #: All that were started by the tests of this run, for the reports of failures.
    started: ClassVar[list[Worker]] = []

    def __init__(
        self,
        bootstrap_servers: str,
        directory: Path,
        *,
        prefix: str | None = None,
        queues: str = "",
        web_port: int | None = None,
        data_directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.names = Names(prefix or f"t{uuid.uuid4().hex[:12]}")
        self.data_directory = data_directory or directory / "data"
        queues_file = directory / "queues.toml"
        if queues or not queues_file.exists():
            queues_file.write_text(queues)
        settings = {
            "MARQ_BOOTSTRAP_SERVERS": bootstrap_servers,
            "MARQ_PREFIX": self.names.prefix,
            "MARQ_QUEUES_FILE": str(queues_file),
            "MARQ_PARTITIONS": "2",
            "MARQ_SESSION_TIMEOUT": "6",
            # On a busy machine, a stop takes longer than the default allows.
            "MARQ_STOP_TIMEOUT": "20",
            # Tests stop workers whose handlers do not end.
            "MARQ_SHUTDOWN_TIMEOUT": "1",
            "MARQ_FLUSH_INTERVAL": "0.2",
            **(environment or {}),
        }
        super().__init__(
            f"worker-{uuid.uuid4().hex[:6]}",
            directory,
            settings,
            data=self.data_directory,
            web_port=web_port or free_web_port(),
            directory=directory,
        )
        # Removes the settings of the shell that runs the tests.
        foreign = {name for name in os.environ if name.startswith("MARQ_") and name not in settings}
        own = {"MARQ_DATA_DIR", "MARQ_WEB_PORT"}
        self.environment = {name: value for name, value in self.environment.items() if name not in foreign - own}

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        super().start()
        Worker.started.append(self)
        return self

    async def ready(self, partitions: int = 2, *, limit: float = LIMIT_SECONDS) -> Self:
        """Wait until this worker owns this many markers partitions at least."""

        await self.owned_partitions(partitions, limit=limit)
        return self

    async def owned_partitions(self, count: int = 2, *, limit: float = LIMIT_SECONDS) -> dict[int, dict[str, Any]]:
        """Wait like :meth:`ready`, and return :meth:`partitions`, which has none during a rebalance."""

        async def found() -> dict[int, dict[str, Any]]:
            assert self.exit_code is None, f"the worker ended with exit code {self.exit_code}:\n{self.log()}"
            return await self.partitions()

        return await eventually(
            found,
            lambda partitions: sum(part["state"] == "owner" for part in partitions.values()) >= count,
            limit=limit,
        )

    def recovered(self) -> dict[int, int]:
        """Return each markers partition's applied offset at the time of this worker's take-over, from its log."""
        found = re.findall(r"owner of markers partition (\d+): .* applied offset (-?\d+)", self.log())
        return {int(partition): int(applied) for partition, applied in found}

    async def ended(self, limit: float = LIMIT_SECONDS) -> int:
        """Wait for the end of the process; return its exit code."""

        async def code() -> int | None:
            return self.exit_code

        found = await eventually(code, lambda code: code is not None, limit=limit)
        assert found is not None
        return found

    async def stop(self, limit: float = LIMIT_SECONDS) -> float:
        """Send SIGTERM; return how many seconds the exit took."""
        began = time.monotonic()
        self.terminate()
        await self.ended(limit)
        return time.monotonic() - began

    def close(self) -> None:
        self.kill()
        if self in Worker.started:
            Worker.started.remove(self)

    def __exit__(self, *_: object) -> None:
        # By kill -9: an orderly stop takes seconds, and the tests of stops call it themselves.
        self.close()

    def again(self, **environment: str) -> Worker:
        """Return another worker with the same settings, not started."""
        other = Worker(
            self.environment["MARQ_BOOTSTRAP_SERVERS"],
            self.directory,
            prefix=self.names.prefix,
            web_port=self.web_port,
            data_directory=self.data_directory,
        )
        other.environment = {**self.environment, **environment}
        return other

    # --- what it says -------------------------------------------------------------------------------------------------

    async def page(self, path: str) -> tuple[int, str]:
        """Return status and text of a page; status 0 without an answer."""
        return await asyncio.to_thread(self.get, path)

    async def published(self, *, scope: str = "") -> dict[str, Any]:
        """Return the JSON of /api/queues, or {} without an answer."""
        return await asyncio.to_thread(self.statistics, scope)

    async def queue(self, name: str) -> dict[str, Any]:
        """Return the statistics of one queue; {} before its first marker."""
        statistics = await self.published()
        found: dict[str, Any] = statistics.get("queues", {}).get(name, {})
        return found

    async def handlers(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of this worker's handler processes, by group."""
        statistics = await self.published(scope="worker")
        return {process["group"]: process for process in statistics.get("handlers", [])}

    async def partitions(self) -> dict[int, dict[str, Any]]:
        """Return the statistics of this worker's markers partitions."""
        return await asyncio.to_thread(self.owned)

    async def members(self) -> int:
        """Return how many members the trackers' group has."""
        async with admin(self.environment["MARQ_BOOTSTRAP_SERVERS"]) as client:
            [response] = await client.describe_consumer_groups([self.names.app_id])
        return len(response.groups[0][5])


async def shared_out(*together: Worker) -> dict[str, Any]:
    """Wait until these workers own both markers partitions, each at least one; return the statistics."""

    def fits(counts: dict[str, Any]) -> bool:
        owned = [[p["partition"] for p in w["partitions"] if p["state"] == "owner"] for w in counts.get("workers", [])]
        return len(owned) == len(together) and all(owned) and sum(map(len, owned)) == 2

    return await eventually(together[0].published, fits)


class Sent(NamedTuple):
    """A message as it is in its topic."""

    queue: str
    source: Source
    offset: int
    payload: Payload

    @property
    def id(self) -> str:
        return record_headers.record_id(self.source, self.offset)


class Namespace:
    """The topics of one prefix: writes as clients do, and reads all that has been written so far."""

    def __init__(self, bootstrap_servers: str, names: Names) -> None:
        self.names = names
        self.bootstrap_servers = bootstrap_servers
        self.markers_partitions = 2
        self._readers: dict[str, tuple[AIOKafkaConsumer, list[Record]]] = {}
        self._ends: AIOKafkaConsumer | None = None

    async def __aenter__(self) -> Self:
        self.producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers, max_request_size=4 << 20)
        await self.producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for consumer, _records in self._readers.values():
            await stop_consumer(consumer, LIMIT_SECONDS)
        if self._ends is not None:
            await stop_consumer(self._ends, LIMIT_SECONDS)
        await stop_producer(self.producer, LIMIT_SECONDS)

    # --- write --------------------------------------------------------------------------------------------------------

    async def send(
        self,
        queue: str,
        value: bytes | None = b"value",
        *,
        headers: Sequence[tuple[str, bytes]] = (),
        key: bytes | None = None,
        partition: int = 0,
    ) -> Sent:
        """Send a message, as any plain Kafka producer may."""
        key = queue.encode() if key is None else key
        kept = await self.producer.send_and_wait(
            self.names.messages, value, key, partition=partition, headers=list(headers)
        )
        payload = Payload(kept.timestamp, 1, key, tuple(headers), value)
        return Sent(queue, Source(self.names.messages, partition), kept.offset, payload)

    async def send_many(self, queue: str, count: int, *, partition: int = 0) -> list[Sent]:
        futures = [self.send(queue, b"message %d" % index, partition=partition) for index in range(count)]
        return await asyncio.gather(*futures)

    async def mark(self, batch: Batch | bytes, partition: int | None = None) -> Any:
        """Write a marker batch (or bytes that pretend to be one); return where and when it was appended."""
        if partition is None:
            assert not isinstance(batch, bytes | Tick)
            partition = self.partition_of(batch.source)
        value = batch if isinstance(batch, bytes) else encode(batch)
        return await self.producer.send_and_wait(self.names.markers, value, partition=partition)

    def partition_of(self, source: Source) -> int:
        return markers_partition(source.topic, source.partition, self.markers_partitions)

    async def acquire(self, *sent: Sent, lease: float, from_offset: int | None = None) -> Any:
        ordered = sorted(sent, key=lambda message: message.offset)
        first = ordered[0]
        offsets = [message.offset for message in ordered]
        payloads = [message.payload for message in ordered]
        start = offsets[0] if from_offset is None else from_offset
        return await self.mark(Acquire(first.queue, HOLDER, first.source, offsets, int(lease * 1000), start, payloads))

    async def ack(self, *sent: Sent) -> Any:
        return await self.mark(Ack(sent[0].queue, HOLDER, sent[0].source, _offsets(sent)))

    async def release(self, *sent: Sent, delay_ms: int = 0) -> Any:
        delays, errors = [delay_ms] * len(sent), [""] * len(sent)
        return await self.mark(Release(sent[0].queue, HOLDER, sent[0].source, _offsets(sent), delays, True, errors))

    async def reject(self, *sent: Sent) -> Any:
        return await self.mark(Reject(sent[0].queue, HOLDER, sent[0].source, _offsets(sent), ["no good"] * len(sent)))

    # --- read ---------------------------------------------------------------------------------------------------------

    async def records(self, topic: str, *, wait: bool = False) -> list[Record]:
        """Return all committed records of a topic so far, in the order of each partition.

        With ``wait``, first wait for open transactions: a message that a consumer has received may belong to one.
        """
        if topic not in self._readers:
            self._readers[topic] = await self._reader(topic), []
        consumer, seen = self._readers[topic]
        ends = await (await self._uncommitted() if wait else consumer).end_offsets(consumer.assignment())
        while any([await consumer.position(tp) < end for tp, end in ends.items()]):
            for batch in (await consumer.getmany(timeout_ms=100)).values():
                seen += batch
        return seen

    async def copied(self, topic: str) -> None:
        """Return when the lease table has the payloads of all unfinished messages of a topic."""
        await eventually(lambda: self._are_copied(topic))

    async def _are_copied(self, topic: str) -> bool:
        books: dict[int, LeaseBook] = {}
        for record in await self.records(self.names.markers, wait=True):
            book = books.setdefault(record.partition, LeaseBook(lambda _: QueueSettings()))
            book.fold(decode(record.value), record.timestamp, record.offset)
        table = {record.key: record.value for record in await self.records(self.names.changelog, wait=True)}
        found = [
            table.get(rows.row_key(lease.queue, source, offset))
            for book in books.values()
            for source, offset, lease in book.open_leases()
            if source.log.topic == topic
        ]
        return all(row is not None and not rows.decode_payload(row).left for row in found)

    async def _uncommitted(self) -> AIOKafkaConsumer:
        """Return a consumer whose end offsets include records of open transactions."""
        if self._ends is None:
            self._ends = AIOKafkaConsumer(bootstrap_servers=self.bootstrap_servers)
            await self._ends.start()
        return self._ends

    async def _reader(self, topic: str) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap_servers,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            fetch_max_wait_ms=50,
            max_partition_fetch_bytes=4 << 20,
        )
        await consumer.start()
        await consumer._client.force_metadata_update()
        partitions = await self._partitions_of(topic)
        consumer.assign([TopicPartition(topic, partition) for partition in range(partitions)])
        return consumer

    async def _partitions_of(self, topic: str) -> int:
        return len(await self.producer.partitions_for(topic))

    async def copies(self, queue: str) -> list[Record]:
        """Return the copies of a queue's messages that trackers have sent back to it."""
        key = queue.encode()
        return [r for r in await self.records(self.names.messages) if r.key == key and ATTEMPT_HEADER in header(r)]

    async def copies_of(self, sent: Sent) -> list[Record]:
        return _of(sent, await self.records(self.names.messages))

    async def dead_letters_of(self, sent: Sent) -> list[Record]:
        return _of(sent, await self.records(self.names.dead_letters))

    async def markers(self) -> list[tuple[Record, Batch]]:
        """Return all markers so far that can be decoded."""
        found = []
        for record in await self.records(self.names.markers):
            with contextlib.suppress(CorruptMarker):
                found.append((record, decode(record.value)))
        return found

    async def fact_of(self, sent: Sent) -> list[tuple[Record, Fact]]:
        """Return the facts about a message, with the records that contain them."""
        return [
            (record, batch)
            for record, batch in await self.markers()
            if isinstance(batch, Fact) and batch.source == sent.source and sent.offset in batch.offsets
        ]

    async def lateness(self, acquired: Any, sent: Sent, lease: float) -> float:
        """Return how many seconds, by the broker's clock, a message's fact came after the end of its lease."""
        [(record, _)] = await eventually(lambda: self.fact_of(sent))
        return (record.timestamp - acquired.timestamp) / 1000 - lease

    async def durable(self) -> dict[int, int]:
        """Return the applied offset in the changelog, by markers partition, which survives kill -9."""
        found = {}
        for record in await self.records(self.names.changelog):
            if record.key == rows.APPLIED_KEY:
                found[record.partition] = rows.decode_applied(record.value)[0]
        return found

    async def applied(self, *marked: Any) -> None:
        """Wait until these markers are in the lease table's changelog."""

        async def behind() -> list[Any]:
            durable = await self.durable()
            return [kept for kept in marked if durable.get(kept.partition, -1) < kept.offset]

        await eventually(behind, lambda rest: not rest)

    async def ends(self, topic: str) -> dict[int, int]:
        await self.records(topic)
        consumer = self._readers[topic][0]
        return {tp.partition: end for tp, end in (await consumer.end_offsets(consumer.assignment())).items()}

    async def markers_after(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Return how many marker records there are after these offsets, by partition."""
        count = dict.fromkeys(range(self.markers_partitions), 0)
        for record in await self.records(self.names.markers):
            count[record.partition] += record.offset > offsets.get(record.partition, -1)
        return count

    async def markers_between(self, offsets: Mapping[int, int], ends: Mapping[int, int]) -> list[Batch]:
        """Return the markers from these offsets, by partition, to before these ends."""
        return [
            decode(record.value)
            for record in await self.records(self.names.markers)
            if offsets.get(record.partition, 0) <= record.offset < ends[record.partition]
        ]

    async def folded_only_after(self, worker: Worker, offsets: Mapping[int, int]) -> None:
        """Wait until a worker has folded each marker after these offsets; fail if it folds more than that.

        A transaction of its predecessor that a kill has interrupted may be committed after ``offsets`` were read.
        """

        async def rest() -> dict[int, int]:
            folded = {number: part["folded"] for number, part in (await worker.partitions()).items()}
            recovered = worker.recovered()
            known = {
                partition: max(offsets.get(partition, -1), recovered.get(partition, -1))
                for partition in {*offsets, *recovered}
            }
            written = await self.markers_after(known)
            return {number: count - folded.get(number, 0) for number, count in written.items()}

        await eventually(rest, lambda left: not any(left.values()))

    async def committed(self) -> dict[int, int]:
        """Return the offsets that the trackers' group has committed."""
        async with admin(self.bootstrap_servers) as client:
            found = await client.list_consumer_group_offsets(self.names.app_id)
        return {tp.partition: at.offset for tp, at in found.items() if tp.topic == self.names.markers}

    async def alter(self, topic: str, config: Mapping[str, str]) -> None:
        """Set a topic's settings; all that are not named go back to the broker's defaults."""
        async with admin(self.bootstrap_servers) as client:
            await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, dict(config))])
        # The broker applies a change after it confirms it.
        await eventually(lambda: self.config(topic), lambda found: config.items() <= found.items())

    async def config(self, topic: str) -> dict[str, str]:
        async with admin(self.bootstrap_servers) as client:
            [response] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        return {entry[0]: entry[1] for entry in response.resources[0][4]}


@contextlib.asynccontextmanager
async def admin(bootstrap_servers: str) -> Any:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def make_topic(bootstrap_servers: str, name: str, partitions: int) -> None:
    """Create a topic, and wait until the broker lists it, because it confirms the creation earlier."""
    async with admin(bootstrap_servers) as client:
        await client.create_topics([NewTopic(name, partitions, 1)])
        await eventually(client.list_topics, lambda found: name in found)


async def delete_topic(bootstrap_servers: str, name: str) -> None:
    """Delete a topic, and wait until the broker no longer lists it."""
    async with admin(bootstrap_servers) as client:
        await client.delete_topics([name])
        await eventually(client.list_topics, lambda found: name not in found)


def header(record: Record) -> dict[str, bytes]:
    return dict(record.headers)


def _offsets(sent: Iterable[Sent]) -> list[int]:
    return sorted(message.offset for message in sent)


def _of(sent: Sent, records: Iterable[Record]) -> list[Record]:
    wanted = sent.id.encode()
    return [record for record in records if header(record).get(ID_HEADER) == wanted]


def kinds(facts: Iterable[tuple[Record, Fact]]) -> list[Kind]:
    return [fact.kind for _, fact in facts]


async def output_of(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """Wait for the end of a program, which is killed if it takes too long; return what it printed."""
    try:
        async with asyncio.timeout(180):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return output.decode(), errors.decode()


async def faust(worker: Worker, *arguments: str, answer: str = "") -> tuple[int, str, str]:
    """Run a command in a worker's directory with its environment; return its exit code and what it printed."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "faust", "-A", "app", *arguments],
            cwd=worker.directory, env=worker.environment, input=answer, capture_output=True, text=True, timeout=180,
            check=False,
        )  # fmt: skip

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout, done.stderr
