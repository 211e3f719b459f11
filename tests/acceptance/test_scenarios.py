"""The acceptance scenarios of our models that concern the main job, by their numbers, on a real broker and worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import marq
from broker import EmbeddedBroker
from marq.core.markers import Ack, Acquire, Fact, Kind, Renew, Source
from tests.acceptance.processes import Process
from tests.acceptance.receiving import finished, nothing_comes, receive, receive_one
from tests.worker.harness import LATENESS_SECONDS, Installation, Worker, admin, eventually, header, kinds

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = 3.0
#: Longer than any test takes.
LONG = 120.0
QUEUES = """
[defaults]
max_attempts = 5
backoff = { base = 0.1, factor = 1, max = 0.1, jitter = false }
"""

Make = Callable[..., marq.Consumer]


async def markers_of(installation: Installation, queue: str, kind: type) -> list[tuple[Any, Any]]:
    """The markers of one kind of a queue, with the records they stand in."""
    return [(record, b) for record, b in await installation.markers() if isinstance(b, kind) and b.queue == queue]


async def lateness(installation: Installation, queue: str) -> list[float]:
    """For each expired message by how many seconds, of the broker's clock, its redelivery followed its lease's end."""
    until: dict[tuple[Source, int], int] = {}
    late: list[float] = []
    for record, batch in await installation.markers():
        if isinstance(batch, Acquire | Renew) and batch.queue == queue:
            # In ms and whole: the sum of floats would be late, or early, by a little.
            until |= {(batch.source, offset): record.timestamp + batch.lease_ms for offset in batch.offsets}
        elif isinstance(batch, Fact) and batch.queue == queue:
            late += [(record.timestamp - until[batch.source, offset]) / 1000 for offset in batch.offsets]
    return late


@asynccontextmanager
async def traffic(producer: marq.Producer, consumer: marq.Consumer) -> AsyncIterator[list[bytes]]:
    """Send and ack messages of a queue all the time; yields what came."""
    came: list[bytes] = []

    async def handle(message: marq.Message) -> None:
        came.append(message.value)

    async def send() -> None:
        while True:
            await producer.send_many(consumer.queue, [b"x"] * 20)

    async with consumer:
        tasks = [asyncio.create_task(send()), asyncio.create_task(consumer.run(handle))]
        try:
            yield came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_scenario_1_an_acked_message_was_as_it_was_sent_and_its_markers_tell_of_it(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    receipt = await producer.send(queue, b"\x00payload\xff", headers={"tenant": b"acme", "empty": b""})

    async with make_consumer(lease=LEASE) as consumer:
        message = await receive_one(consumer)
        await message.ack()
        await finished(worker, queue, acquired=1, acked=1)
        await nothing_comes(consumer, seconds=2 * LEASE)

    assert message.id == receipt.id
    assert (message.value, message.headers) == (b"\x00payload\xff", {"tenant": b"acme", "empty": b""})
    assert (message.queue, message.attempt) == (queue, 1)
    [(_, acquired)] = await markers_of(installation, queue, Acquire)
    [(_, acked)] = await markers_of(installation, queue, Ack)
    assert acquired.source == acked.source == (receipt.topic, receipt.partition)
    assert list(acquired.offsets) == list(acked.offsets) == [receipt.offset]


async def test_scenario_2_a_rejected_message_is_a_dead_letter_at_once_whatever_attempts_are_left(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send(queue, b"payload", headers={"tenant": b"acme"})

    async with make_consumer(lease=LONG) as consumer:
        message = await receive_one(consumer)
        await message.reject("no such customer")
        await finished(worker, queue, rejected=1, dead=1, redelivered=0)

    [letter] = [r for r in await installation.records(worker.names.dead_letters) if r.key == queue.encode()]
    assert letter.value == b"payload"
    expected = {"tenant": b"acme", "marq-reason": b"no such customer", "marq-attempt": b"1"}
    assert header(letter).items() >= expected.items()


async def test_scenario_3_a_released_message_is_delivered_again_within_a_second(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send(queue, b"payload", headers={"tenant": b"acme"})

    async with make_consumer(lease=LONG) as consumer:
        first = await receive_one(consumer)
        await first.release(0)
        began = time.monotonic()
        second = await receive_one(consumer)
        took = time.monotonic() - began
        await second.ack()
        await finished(worker, queue, acked=1, released=1, expired=0)

    assert took <= 1.0
    assert (second.attempt, second.id, second.headers) == (2, first.id, first.headers)


async def test_scenario_4_forgotten_messages_are_redelivered_in_time_while_other_traffic_flows(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send_many(queue, [b"%d" % number for number in range(100)])

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        async with traffic(producer, make_consumer(f"{queue}-others")) as others:
            forgotten = await receive(consumer, 100)
            before = len(others)
            again = await receive(consumer, 100)
            during = len(others) - before
        await consumer.ack(again)
        await finished(worker, queue, acked=100, expired=100)

    late = sorted(await lateness(installation, queue))
    assert {message.id for message in again} == {message.id for message in forgotten}
    assert during > 100, "there was hardly any other traffic"
    assert 0 <= late[0] <= late[98] <= LATENESS_SECONDS


async def test_scenario_4_a_forgotten_message_is_redelivered_in_time_although_nothing_else_happens(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send(queue, b"payload")

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        first = await receive_one(consumer)
    # The consumer is gone: nobody writes a marker but the tracker.
    await eventually(lambda: installation.copies(queue))

    [late] = await lateness(installation, queue)
    assert 0 <= late <= LATENESS_SECONDS
    async with make_consumer(lease=LEASE) as consumer:
        second = await receive_one(consumer)
        await second.ack()
    await finished(worker, queue, acked=1, expired=1)
    assert (second.id, second.attempt) == (first.id, 2)


async def test_scenario_5_a_handler_that_works_longer_than_its_lease_has_its_message_once_and_renewals_end_with_the_ack(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send(queue, b"payload")
    runs: list[int] = []

    async def renewals() -> int:
        return sum(len(batch.offsets) for _, batch in await markers_of(installation, queue, Renew))

    async def handle(message: marq.Message) -> None:
        runs.append(message.attempt)
        # Renewed each third of a lease, so this takes more than two leases.
        await eventually(renewals, lambda count: count >= 7)

    async with make_consumer(lease=LEASE) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await finished(worker, queue, acked=1, expired=0, redelivered=0)
        await consumer.stop()
        await running

    assert runs == [1]
    [(acked, _)] = await markers_of(installation, queue, Ack)
    assert all(record.offset < acked.offset for record, _ in await markers_of(installation, queue, Renew))


async def test_scenario_6_a_handler_that_hangs_loses_its_message_after_max_lease(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send(queue, b"payload")
    attempts: list[int] = []

    async def handle(message: marq.Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            await asyncio.Event().wait()

    async with make_consumer(lease=LEASE, max_lease=3 * LEASE, grace=0) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=2))
        await finished(worker, queue, acked=1, expired=1)
        await consumer.stop()
        await running

    assert attempts == [1, 2]
    [(acquired, _), *_] = await markers_of(installation, queue, Acquire)
    [(fired, _)] = await markers_of(installation, queue, Fact)
    held = (fired.timestamp - acquired.timestamp) / 1000
    assert 3 * LEASE - 0.1 <= held <= 3 * LEASE + LATENESS_SECONDS


async def test_scenario_7_what_a_killed_process_held_is_worked_on_by_another(
    producer: marq.Producer, start_process: Callable[..., Process], worker: Worker, queue: str
) -> None:
    # So long a lease that the survivor, on a busy machine, keeps its own.
    arguments = ("-m", "tests.acceptance.serving", queue, "10")
    survivor, victim = (start_process(*arguments, MARQ_SESSION_TIMEOUT="6") for _ in range(2))

    async def warm_up() -> list[int]:
        await producer.send_many(queue, [b"first"] * 2)
        return [len(process.lines()) for process in (survivor, victim)]

    await eventually(warm_up, all)
    receipts = await producer.send_many(queue, [b"%d" % number for number in range(1_000)])
    before = len(victim.lines())
    await victim.printed(before + 50)
    victim.kill()
    figures = await eventually(
        lambda: worker.queue(queue),
        lambda found: found["acked"] >= 1_000 and found["in_flight"] == found["waiting_for_redelivery"] == 0,
    )

    sent = {receipt.id for receipt in receipts}
    by_victim, by_survivor = (
        Counter(line.split()[0] for line in process.lines() if line.split()[0] in sent)
        for process in (victim, survivor)
    )
    together = by_victim + by_survivor
    assert set(together) == sent, "a message was lost"
    doubles = {each for each, count in together.items() if count > 1}
    # The work was done, and the kill came before the ack was durable: nothing else is ever done twice.
    assert doubles <= set(by_victim) & set(by_survivor)
    assert len(doubles) <= figures["expired"] + figures["reacquired"]
    assert by_victim
    assert by_survivor


async def test_scenario_8_after_a_crash_between_acquire_and_commit_the_next_reader_takes_over(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    """The markers of the one who crashed are written by hand: it acquired, and never committed."""
    crashed = [await installation.send(queue, b"%d" % number, partition=number % 2) for number in range(6)]
    for partition in (0, 1):
        await installation.acquire(*crashed[partition::2], lease=LEASE)

    async with make_consumer(lease=LEASE) as consumer:
        messages = await receive(consumer, 6)
        # Past the end of the lease of the one who crashed, which is not that of these any more.
        await nothing_comes(consumer, seconds=2 * LEASE)
        await consumer.ack(messages)
        figures = await finished(worker, queue, acked=6)

    assert sorted(message.id for message in messages) == sorted(sent.id for sent in crashed)
    assert {message.attempt for message in messages} == {1}
    assert (figures["acquired"], figures["reacquired"], figures["redelivered"]) == (6, 6, 0)


async def test_scenario_8_when_nobody_reads_before_the_lease_ends_both_deliveries_have_one_id(
    make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    crashed = await installation.send(queue, b"payload")
    await installation.acquire(crashed, lease=0.2)
    await eventually(lambda: installation.copies_of(crashed))

    async with make_consumer(lease=LEASE) as consumer:
        messages = await receive(consumer, 2)
        await consumer.ack(messages)
        await finished(worker, queue, acked=1, redelivered=1)
        await nothing_comes(consumer, seconds=2 * LEASE)

    assert {message.id for message in messages} == {crashed.id}
    assert sorted(message.attempt for message in messages) == [1, 2]


async def test_scenario_14_markers_of_unknown_records_and_broken_ones_are_counted_and_passed_over(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    stranger = await installation.send("nobody's")
    quarantined = await _quarantined(worker)

    await installation.ack(stranger)
    await installation.renew(stranger, lease=LONG)
    broken = [await installation.mark(bad, partition) for partition in (0, 1) for bad in (b"rubbish", b"")]
    await producer.send_many(queue, [b"%d" % number for number in range(10)])
    async with make_consumer(lease=LEASE) as consumer:
        await consumer.ack(await receive(consumer, 10))
        await finished(worker, queue, acked=10)

    await eventually(lambda: _quarantined(worker), lambda count: count == quarantined + len(broken))
    assert await installation.copies_of(stranger) == []
    kept = [record.value for record in await installation.records(worker.names.quarantine)]
    assert sorted(kept) == [b"", b"", b"rubbish", b"rubbish"]
    assert [part["alarm"] for part in (await worker.partitions()).values()] == ["", ""]


async def _quarantined(worker: Worker) -> int:
    return sum(part["quarantined"] for part in (await worker.partitions()).values())


async def test_scenario_15_acks_in_any_order_hold_up_nothing_and_only_the_open_message_comes_again(
    producer: marq.Producer, make_consumer: Make, worker: Worker, broker: EmbeddedBroker, queue: str
) -> None:
    receipts = await producer.send_many(queue, [b"%d" % number for number in range(20)])
    first_offset = min(receipt.offset for receipt in receipts if receipt.partition == 0)

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        messages = await receive(consumer, 20)
        [first] = [m for m in messages if (m.partition, m.offset) == (0, first_offset)]
        for message in reversed(messages):
            if message is not first:
                await message.ack()
        committed = await _committed(broker, worker, queue)
        again = await receive_one(consumer)
        await again.ack()
        await finished(worker, queue, acked=20, redelivered=1)

    # A slow message holds no partition up: reading has gone on past it.
    assert all(committed[receipt.partition] > receipt.offset for receipt in receipts)
    assert (again.id, again.attempt) == (first.id, 2)


async def _committed(broker: EmbeddedBroker, worker: Worker, queue: str) -> dict[int, int]:
    async with admin(broker.bootstrap_servers) as client:
        found = await client.list_consumer_group_offsets(worker.names.group(queue))
    return {partition.partition: at.offset for partition, at in found.items()}


async def test_scenario_21_an_expired_message_comes_again_to_its_own_queue_only(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    b, c = f"{queue}-b", f"{queue}-c"
    await producer.send_many(b, [b"for b"] * 10)
    await producer.send_many(c, [b"for c"] * 10)

    async with make_consumer(b, lease=LEASE, max_lease=LEASE) as of_b, make_consumer(c, lease=LEASE) as of_c:
        await receive(of_b, 10)
        of_c_first = await receive(of_c, 10)
        await of_c.ack(of_c_first)
        again = await receive(of_b, 10)
        await of_b.ack(again)
        await asyncio.gather(finished(worker, b, acked=10, expired=10), finished(worker, c, acked=10, expired=0))
        assert await of_c.receive(wait=0) == []

    assert {message.value for message in again} == {b"for b"}
    assert {message.value for message in of_c_first} == {b"for c"}


async def test_scenario_23_two_consumers_with_handlers_share_a_queue_and_nothing_is_done_twice(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    done: list[Counter[bytes]] = [Counter(), Counter()]

    def noting(mine: Counter[bytes]) -> Callable[[marq.Message], Any]:
        async def handle(message: marq.Message) -> None:
            mine[message.value] += 1

        return handle

    async def warm_up() -> list[int]:
        await producer.send_many(queue, [b"first"] * 2)
        return [mine.total() for mine in done]

    # A short session is one whose members learn soon that another one has come.
    consumers = [make_consumer(lease=LEASE, session_timeout=6) for _ in done]
    await asyncio.gather(*[consumer.start() for consumer in consumers])
    running = [asyncio.create_task(c.run(noting(mine))) for c, mine in zip(consumers, done, strict=True)]
    await eventually(warm_up, all)
    before = [mine.total() for mine in done]
    await producer.send_many(queue, [b"%d" % number for number in range(500)])

    async def seen() -> list[int]:
        return [sum(count for value, count in mine.items() if value != b"first") for mine in done]

    await eventually(seen, lambda counts: sum(counts) >= 500)
    await asyncio.gather(*[consumer.stop() for consumer in consumers])
    await asyncio.gather(*running)
    await finished(worker, queue, redelivered=0)

    together = done[0] + done[1]
    assert {together[b"%d" % number] for number in range(500)} == {1}
    assert all(mine.total() > earlier for mine, earlier in zip(done, before, strict=True))


async def test_scenario_25_a_receive_that_is_cancelled_loses_no_message(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    async with make_consumer(lease=LEASE) as consumer:
        for number in range(20):
            receiving = asyncio.create_task(consumer.receive(wait=LONG))
            # Cancelled while it waits, or just as the message comes.
            await producer.send(queue, b"%d" % number)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            if not receiving.cancelled():
                await consumer.ack(receiving.result())

        async def acked() -> dict[str, Any]:
            await consumer.ack(await consumer.receive(wait=0.1))
            return await worker.queue(queue)

        await eventually(acked, lambda found: found.get("acked") == 20)


async def test_scenario_25_a_receive_after_the_stop_says_what_is_wrong(make_consumer: Make, queue: str) -> None:
    consumer = make_consumer()
    await consumer.start()
    await consumer.stop()

    with pytest.raises(marq.MarqError, match=rf"consumer of queue '{queue}' was stopped: await start\(\)"):
        await consumer.receive()


async def test_scenario_27_an_ack_after_the_redelivery_is_written_and_says_that_the_lease_was_lost(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    receipt = await producer.send(queue, b"payload")

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        first = await receive_one(consumer)
        second = await receive_one(consumer)
        with pytest.raises(marq.LeaseLost) as caught:
            await first.ack()
        # Twice is no harm, nor is a third time.
        await second.ack()
        await second.ack()
        await asyncio.gather(*[second.ack(), second.ack(wait=False)])
        figures = await finished(worker, queue, acked=1, expired=1)

    assert f"queue '{queue}', message {receipt.id}, attempt 1: its lease ran out" in str(caught.value)
    acks = [offset for _, batch in await markers_of(installation, queue, Ack) for offset in batch.offsets]
    assert sorted(acks) == sorted([first.offset, second.offset])
    assert figures["late"] == 1


async def test_scenario_27_after_the_lease_other_outcomes_only_raise(
    producer: marq.Producer, make_consumer: Make, worker: Worker, queue: str
) -> None:
    await producer.send(queue, b"payload")

    async with make_consumer(lease=LEASE, max_lease=LEASE) as consumer:
        first = await receive_one(consumer)
        second = await receive_one(consumer)
        for outcome in (first.release, first.reject, first.renew):
            with pytest.raises(marq.LeaseLost):
                await outcome()
        await second.ack()
        await finished(worker, queue, acked=1, expired=1, released=0, rejected=0, dead=0)


async def test_scenario_29_after_the_last_attempt_a_message_is_a_dead_letter_with_headers_and_key_intact(
    make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    headers = [("tenant", b"acme"), ("tenant", b"second of that name"), ("bytes", b"\x00\xff")]
    sent = await installation.send(queue, b"\x00payload", headers=headers)
    attempts: list[int] = []

    async def handle(message: marq.Message) -> None:
        attempts.append(message.attempt)
        await message.release(0)

    async with make_consumer(lease=LONG) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await finished(worker, queue, dead=1, released=5)
        await consumer.stop()
        await running

    assert attempts == [1, 2, 3, 4, 5]
    [letter] = await installation.dead_letters_of(sent)
    assert (letter.key, letter.value) == (queue.encode(), b"\x00payload")
    assert [pair for pair in letter.headers if not pair[0].startswith("marq-")] == headers
    found = header(letter)
    assert found["marq-id"] == sent.id.encode()
    assert found["marq-reason"] == b"5 of 5 attempts used: the last time it was released"
    assert kinds(await installation.fact_of(sent)) == [Kind.REDELIVERED]


async def test_scenario_30_with_a_broker_alone_the_documented_defaults_hold(
    producer: marq.Producer, make_consumer: Make, worker: Worker, installation: Installation, queue: str
) -> None:
    await producer.send(queue, b"payload")

    async with make_consumer() as consumer:
        await (await receive_one(consumer)).ack()

    [(_, acquired)] = await markers_of(installation, queue, Acquire)
    assert acquired.lease_ms == 30_000
