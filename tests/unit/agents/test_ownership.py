"""The owner of a markers partition, as far as it can be looked at without a broker."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import IllegalOperation, KafkaConnectionError, KafkaError, TopicAuthorizationFailedError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.producer.transaction_manager import TransactionManager

from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.core.storage.rows import LeaseRow
from marq.core.storage.table_image import Place
from marq.owner.engine import OwnerTransaction
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import ScheduleLayers
from marq.wire.errors import BrokerUnavailable
from marq.wire.marker_codec import Columns, encode
from marq.wire.markers import Acquire, Cause, LeftPayloads, Payload, Source
from marq.wire.names import Names
from marq_worker.owner.owner_context import OwnerContext
from marq_worker.owner.ownership import Ownership
from marq_worker.tables.leases import ChangelogLost, LeaseTable
from marq_worker.transport.inbox import MAX_INBOX_BATCHES, Fetched


def surroundings(**changes: Any) -> OwnerContext:
    return OwnerContext(**{
        "names": Names("t"), "table": None, "settings": lambda queue: QueueSettings(topic="theirs"), "client": {},
        "messages_partitions": 1, "max_message_bytes": 1_000_000, "flush_seconds": 1, "owned": lambda: 1, "seek": None,
        "log_range": None, "pause": lambda partition: None, **changes,
    })  # fmt: skip


def event(start: int) -> Any:
    return SimpleNamespace(value=Fetched(start, start + 1, []))


async def test_an_owner_that_seeks_back_makes_room_for_waiting_batches() -> None:
    """Else no batch of any partition would be delivered any more: one agent delivers them all."""
    log = Log()
    owner = Ownership(3, surroundings(seek=log.seek, log_range=log.log_range), state="owner")
    owner.engine.position = 0
    for start in range(MAX_INBOX_BATCHES):
        await owner.deliver(event(6 + start))
    waiting = asyncio.create_task(owner.deliver(event(90)))
    await asyncio.sleep(0)
    assert not waiting.done()

    await owner._read(*owner._inbox._batches[0])
    async with asyncio.timeout(60):
        await waiting

    assert log.sought == [(3, 0)]


def acquired(turn: int) -> Any:
    """One record with an ACQUIRE of ten messages."""
    first, source = 10 * turn, Source("t.messages", 0)
    columns = Columns(b"orders", [0] * 10, [b""] * 10)
    acquire = Acquire("orders", 7, source, range(first, first + 10), 60_000, first, columns)
    record = SimpleNamespace(offset=turn, value=encode(acquire), timestamp=1_000)
    return SimpleNamespace(value=Fetched(turn, turn + 1, [record]))


@pytest.mark.parametrize(("owned", "batches"), [(1, 6), (2, 3)])
async def test_an_owner_writes_before_it_reads_more_than_its_share_of_rows(
    monkeypatch: pytest.MonkeyPatch, owned: int, batches: int
) -> None:
    """Else a worker's memory would grow with what its partitions find waiting for them."""
    monkeypatch.setattr("marq.owner.engine.MAX_PENDING_ROWS", 50)
    owner = Ownership(0, surroundings(owned=lambda: owned), state="owner")
    owner.engine.begin(0, 0, 0)
    written: list[int] = []

    async def perform(write: OwnerTransaction) -> None:
        if write.rows is not None:
            written.append(sum(key[:1] == b"r" for key in write.rows))
            owner._stopping = True

    monkeypatch.setattr(owner, "perform", perform)
    for turn in range(MAX_INBOX_BATCHES):
        await owner.deliver(acquired(turn))
    await owner._work()

    assert written[-1] == 10 * batches


class BareTable:
    """A table that has nothing, and is recovered when it may be."""

    changelog_topic_name = "t.changelog"

    def __init__(self, recovering: Callable[[], Awaitable[int]]) -> None:
        self._recovering = recovering
        self.damaged: set[int] = set()

    async def recover(self, *_: object) -> int:
        return await self._recovering()

    def rows(self, partition: int) -> list[tuple[bytes, bytes]]:
        return []


async def fenced() -> tuple[int, int]:
    return 1, 1


class Log:
    """The owner's view of its markers: offsets 0 to 100, and where it seeks."""

    def __init__(self) -> None:
        self.sought: list[tuple[int, int]] = []

    async def seek(self, partition: int, offset: int) -> None:
        self.sought.append((partition, offset))

    async def log_range(self, partition: int) -> tuple[int, int]:
        return 0, 100


def newcomer(monkeypatch: pytest.MonkeyPatch, table: BareTable, log: Log) -> Ownership:
    """Return an owner that has not taken its partition over."""
    owner = Ownership(0, surroundings(table=table, log_range=log.log_range, seek=log.seek))
    monkeypatch.setattr(owner._writer, "fence", fenced)
    owner._writer.producer = TakingProducer()  # type: ignore[assignment]
    return owner


async def test_where_the_markers_end_is_asked_while_the_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, a takeover waits for two fetches that find nothing."""
    asked = asyncio.Event()

    class AskedLog(Log):
        async def log_range(self, partition: int) -> tuple[int, int]:
            asked.set()
            return 0, 100

    async def recovering() -> int:
        async with asyncio.timeout(60):
            await asked.wait()
        return 0

    log = AskedLog()
    await newcomer(monkeypatch, BareTable(recovering), log)._take_over()

    assert log.sought == [(0, 0)]


async def test_a_recovery_that_fails_leaves_no_question_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    asking: list[asyncio.Task[Any] | None] = []

    async def recovering() -> int:
        await asyncio.sleep(0)
        raise KafkaError

    class SilentLog(Log):
        async def log_range(self, partition: int) -> tuple[int, int]:
            asking.append(asyncio.current_task())
            await asyncio.Event().wait()
            raise AssertionError("never")

    with pytest.raises(KafkaError):
        await newcomer(monkeypatch, BareTable(recovering), SilentLog())._take_over()

    assert [task is not None and task.cancelled() for task in asking] == [True]


class EmptyEnd:
    """A changelog of which only the end of a transaction is left to read: a read waits for as long as it may."""

    def __init__(self) -> None:
        self._at = 8
        self.waited_ms = 0

    async def end_offsets(self, sources: object) -> Any:
        return defaultdict(lambda: 9)

    def seek(self, source: object, position: int) -> None:
        self._at = position

    async def position(self, source: object) -> int:
        return self._at

    async def getmany(self, source: object, *, timeout_ms: int, max_records: int) -> dict[Any, Any]:
        self._at, self.waited_ms = 9, self.waited_ms + timeout_ms
        return {}


async def test_a_takeover_does_not_wait_for_rows_where_there_are_none() -> None:
    changelog, table = EmptyEnd(), SimpleNamespace(replayed=Counter())

    read = await LeaseTable._replay(table, changelog, TopicPartition("t.changelog", 0), 8)  # type: ignore[arg-type]

    assert read == 0
    assert changelog.waited_ms <= 100


class TakingProducer:
    """Takes all records, and remembers the topics of those that it committed."""

    def __init__(self) -> None:
        self._sent: list[str] = []
        self.committed: list[str] = []

    async def partitions_for(self, topic: str) -> set[int]:
        return {0}

    async def begin_transaction(self) -> None:
        self._sent = []

    async def send(self, topic: str, *value: object, **options: object) -> asyncio.Future[object]:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_result(SimpleNamespace(topic=topic, offset=0))
        self._sent.append(topic)
        return answer

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(1 << 20, 0, is_transactional=True)

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> asyncio.Future[object]:
        return await self.send(topic, partition=partition)

    async def commit_transaction(self) -> None:
        self.committed += self._sent


class LostChangelog(BareTable):
    """The table of an owner whose changelog was recreated: the local files have more than it does."""

    def __init__(self) -> None:
        super().__init__(_nothing)
        self.written: list[object] = []

    def check_changelog(self, partition: int, first: int) -> None:
        raise ChangelogLost

    def write(self, partition: int, changes: object, position: int) -> None:
        self.written.append(changes)


async def _nothing() -> int:
    return 0


async def test_an_owner_whose_changelog_was_recreated_commits_nothing_and_recovers() -> None:
    """The next owner would mistake these few rows for the whole table, and the other messages would be lost."""
    table, producer = LostChangelog(), TakingProducer()
    owner = Ownership(0, surroundings(table=table), state="owner")
    owner._writer.producer = producer  # type: ignore[assignment]
    owner.engine.begin(0, 0, 0)
    batch = acquired(0)
    acked: list[int] = []
    batch.ack = lambda: acked.append(0)
    await owner._read(batch, batch.value)

    with pytest.raises(ChangelogLost):
        await owner.perform(owner.engine.rows())

    assert (producer.committed, table.written, acked) == ([], [], [])
    assert owner.position is None


class EndedTransaction(TakingProducer):
    """A producer that has ended its transaction because of an error, such as a permission that was removed."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error
        self._txn_manager = TransactionManager("id", 1_000)
        self._txn_manager.set_pid_and_epoch(1, 1)
        self._txn_manager.begin_transaction()
        self._txn_manager.error_transaction(TopicAuthorizationFailedError("markers"))

    async def send(self, *_: object, **__: object) -> asyncio.Future[object]:
        raise self._error

    async def stop(self) -> None: ...


@pytest.mark.parametrize("error", [IllegalOperation("not in a transaction"), AssertionError("invalid state")])
async def test_an_owner_whose_producer_has_ended_the_transaction_takes_over_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """aiokafka's errors for this are not KafkaErrors; as a defect of Marq it would stop the partition for good."""
    fences, again = 0, asyncio.Event()

    async def fence() -> tuple[int, int]:
        nonlocal fences
        fences += 1
        if fences == 2:
            again.set()
            await asyncio.Event().wait()
        owner._writer.producer = EndedTransaction(error)  # type: ignore[assignment]
        return 1, fences

    async def stop() -> None: ...

    monkeypatch.setattr("marq_worker.owner.retry_pauses.RETRY_SECONDS", (0.0, 0.0))
    owner = newcomer(monkeypatch, BareTable(_nothing), Log())
    monkeypatch.setattr(owner._writer, "fence", fence)
    monkeypatch.setattr(owner._writer, "stop", stop)
    owner.start()
    async with asyncio.timeout(60):
        await asyncio.wait([asyncio.create_task(again.wait()), owner._task], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[list-item]

    assert (owner.alarm, owner.state, again.is_set()) == ("", "waiting", True)
    # A restart of the worker would not bring the permission back.
    assert owner.standing() is None
    await owner.stop()


def firing(producer: TakingProducer) -> tuple[Ownership, OwnerTransaction]:
    owner = Ownership(0, surroundings(), state="owner")
    owner._writer.producer = producer  # type: ignore[assignment]
    due = [(fire(5), Payload(0, 1, b"customer", [], b"value"))]
    return owner, OwnerTransaction(now_ms=0, appended_ms=0, markers=owner.tracker.facts([fire(5)]), due=due)


def fire(offset: int) -> DueAction:
    lease = LeaseRow("orders", 1, 1, 0, 0)
    return DueAction(Source("theirs", 2), offset, lease, Destination.QUEUE, 2, Cause.EXPIRED)


async def test_a_redelivery_of_a_foreign_topic_goes_to_the_messages_topic() -> None:
    producer = TakingProducer()
    owner, write = firing(producer)

    await owner.perform(write)

    assert producer.committed == ["t.messages", "t.markers"]


async def test_a_tick_that_has_waited_for_its_turn_has_the_time_of_its_writing() -> None:
    """A worker that catches up folds for seconds without a pause; its owners must not take over again each time."""
    owner, _ = firing(TakingProducer())
    tick = owner.engine.next_write(0)
    assert tick is not None
    sent: list[OwnerTransaction] = []

    async def commit(write: OwnerTransaction) -> tuple[int, int]:
        sent.append(write)
        return 0, -1

    owner._writer.commit = commit  # type: ignore[method-assign]
    await owner.perform(tick)

    [written] = sent
    assert written.tick is not None
    assert written.markers == [written.tick]
    assert owner.tracker.awaited_ms(written.tick.monotonic_ms + 7) == 7


async def test_a_schedule_that_is_defined_while_the_owner_is_at_work_is_planned_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wake-up before the wait is lost, and the partition of a new schedule may stay idle."""
    layers = ScheduleLayers()
    owner = Ownership(0, surroundings(schedules=lambda: layers), state="owner")
    owner.engine.begin(0, 0, 0)
    written: list[Any] = []

    async def perform(write: OwnerTransaction) -> None:
        if write.tick is not None:
            record = SimpleNamespace(offset=0, value=encode(write.tick), timestamp=1_700_000_000_000)
            await owner.deliver(SimpleNamespace(value=Fetched(0, 1, [record])))  # type: ignore[arg-type]
        elif write.planned:
            written.extend(write.markers)
            owner._stopping = True
        else:
            owner.engine.pending.clear()
            owner.engine._unacknowledged = False
            # After the step in which schedules are looked at, and nothing else is left to do.
            layers.fold("schedule", "daily", {"queue": "reports", "cron": "0 9 * * *"})
            owner.wake()

    monkeypatch.setattr(owner, "perform", perform)
    async with asyncio.timeout(60):
        await owner._work()

    [delay] = written
    assert (type(delay).__name__, delay.queue) == ("Delay", "reports")


async def test_nothing_is_sent_by_placements_that_are_too_old() -> None:
    async def heard() -> None:
        raise TimeoutError("the definitions could not be read")

    owner, write = firing(TakingProducer())
    owner.context = surroundings(heard=heard)

    with pytest.raises(TimeoutError, match="could not be read"):
        await owner.perform(write)


async def test_an_owner_whose_local_table_is_damaged_recovers_its_lease_book_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The payloads of its messages are only in the table. Markers are then read again, from the table's offset."""
    recoveries = 0

    async def recovering() -> int:
        nonlocal recoveries
        recoveries += 1
        table.damaged.clear()
        return 0

    table, log = BareTable(recovering), Log()
    owner = newcomer(monkeypatch, table, log)
    await owner._take_over()
    owner.engine.position, owner.engine._epoch = 50, (1, 0)
    await owner._take_over()
    assert recoveries == 1

    table.damaged.add(0)
    owner.engine._epoch = (1, 0)
    await owner._take_over()

    assert recoveries == 2
    assert log.sought[-1] == (0, 0)


async def test_takeovers_that_fail_again_and_again_are_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the broker is gone, each partition tries several times a second."""
    tried = asyncio.Semaphore(0)

    async def take_over() -> None:
        tried.release()
        raise KafkaConnectionError("the broker is gone")

    owner = Ownership(3, surroundings())
    monkeypatch.setattr(owner, "_take_over", take_over)
    monkeypatch.setattr("marq_worker.owner.retry_pauses.RETRY_SECONDS", (0.0, 0.0))
    owner.start()
    for _ in range(10):
        await tried.acquire()
    await owner.stop()

    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["markers partition 3: KafkaConnectionError('the broker is gone'); taking it over again"]


async def test_payloads_that_can_not_be_copied_are_reported_once_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def copier(left: object) -> dict[Place, Payload | None]:
        raise BrokerUnavailable("too slow")

    monkeypatch.setattr("marq_worker.owner.ownership.COPY_PAUSE_SECONDS", 0.0)
    owner = Ownership(3, surroundings())

    for _ in range(3):
        await owner._copied(copier, {place(5): LEFT})

    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "markers partition 3: payloads of 1 messages not copied from their records, trying again: too slow"


async def test_removed_records_are_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Retention removes thousands at a time."""
    owner = Ownership(0, surroundings(), state="owner")
    owner.engine.begin(0, 0, 0)
    left = Acquire("orders", 7, Source("theirs", 2), [5, 6, 9], 60_000, 5, LeftPayloads([77, 78, 79]))
    record = SimpleNamespace(offset=0, value=encode(left), timestamp=1_000)
    await owner._read(event(0), Fetched(0, 1, [record]))

    async def copier(left: Mapping[Place, Payload]) -> dict[Place, Payload | None]:
        return dict.fromkeys(left)

    await owner._copied(copier, dict.fromkeys(map(place, (5, 6, 9)), LEFT))

    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == (
        "queue orders, record theirs/2/5 was removed before its payload was copied: messages=3 last=9. If their leases"
        " expire, they become dead letters without their values. Keep records for longer than an outage of all workers"
    )


LEFT = Payload(77, 1, None, (), None, left=True)


def place(offset: int) -> Place:
    return Place("orders", Source("theirs", 2), offset)
