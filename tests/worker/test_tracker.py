"""What a real tracker writes and shows, told by markers alone.

How each marker changes a message is in tests/unit/core (test_lease_machine.py, test_transitions.py), what users see of
that in tests/conformance.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

import marq
from marq.wire.markers import Discard, Fact, Source
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, eventually, header, take

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Longer than any test takes.
LONG = 600.0


async def test_an_acknowledged_message_leaves_no_row(namespace: Namespace, shared_worker: Worker, queue: str) -> None:
    sent = await namespace.send_many(queue, 10)

    await namespace.acquire(*sent, lease=LONG)
    await namespace.applied(await namespace.ack(*sent))

    counts = await shared_worker.queue(queue)
    assert (counts["acquired"], counts["acked"], counts["in_flight"], counts["redelivered"]) == (10, 10, 0, 0)
    rows = {record.key: record.value for record in await namespace.records(namespace.names.changelog)}
    assert not [key for key, value in rows.items() if key[:1] in b"rs" and value and queue.encode() in value]
    assert await namespace.copies(queue) == []


async def test_an_expired_lease_is_noticed_while_other_traffic_flows(namespace: Namespace, queue: str) -> None:
    sent = await namespace.send(queue)
    acquired = await namespace.acquire(sent, lease=0.5)

    async def traffic() -> list[Any]:
        other = await namespace.send_many("traffic", 50)
        await namespace.acquire(*other, lease=LONG)
        await namespace.ack(*other)
        return await namespace.fact_of(sent)

    await eventually(traffic)

    assert await namespace.lateness(acquired, sent, 0.5) >= 0


async def test_a_thousand_leases_that_end_together_are_redelivered_once_and_to_all_partitions(
    namespace: Namespace, shared_worker: Worker, queue: str
) -> None:
    sent = await namespace.send_many(queue, 1_000)

    await namespace.acquire(*sent, lease=0.5)
    copies = await eventually(lambda: namespace.copies(queue), lambda found: len(found) >= 1_000)

    counts = await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("redelivered") == 1_000)
    assert (counts["expired"], counts["in_flight"]) == (1_000, 0)
    assert sorted(header(copy)["marq-id"].decode() for copy in copies) == sorted(message.id for message in sent)
    assert {copy.partition for copy in copies} == {0, 1}
    # A witness that is acquired now, in the same partition, has expired: nothing else did meanwhile.
    witness = await namespace.send("witness")
    await namespace.acquire(witness, lease=0.1)
    await eventually(lambda: namespace.copies_of(witness))
    assert len(await namespace.copies(queue)) == 1_000
    facts = [batch for _, batch in await namespace.markers() if isinstance(batch, Fact) and batch.queue == queue]
    fired = [(fact.source, offset) for fact in facts for offset in fact.offsets]
    assert len(fired) == len(set(fired)) == 1_000


async def test_the_statistics_say_what_is_open_and_since_when(
    namespace: Namespace, shared_worker: Worker, queue: str
) -> None:
    held, released, rejected, done = await namespace.send_many(queue, 4)
    await namespace.acquire(held, released, rejected, done, lease=LONG)
    await namespace.release(released, delay_ms=int(LONG * 1000))
    await namespace.ack(done)
    await namespace.reject(rejected)

    counts = await eventually(lambda: shared_worker.queue(queue), lambda found: found.get("dead_lettered"))

    assert (counts["in_flight"], counts["waiting_for_redelivery"], counts["waiting_for_dead_letters"]) == (1, 1, 0)
    assert (counts["acquired"], counts["acked"], counts["released"], counts["rejected"]) == (4, 1, 1, 1)
    assert 0 < counts["oldest_lease_seconds"] < LONG
    status, page = await shared_worker.page("/")
    assert (status, queue in page) == (200, True)


async def test_messages_in_flight_name_the_consumer_that_has_them(namespace: Namespace, shared_worker: Worker) -> None:
    worker, options = shared_worker, client_of(shared_worker)

    async def consumers(queue: str) -> dict[str, str | None]:
        _, page = await worker.page(f"/api/queues/{quote(queue, safe='')}/messages?state=in_flight")
        messages = json.loads(page).get("messages", ())
        return {message["place"]: (message["consumer"] or {}).get("client_id") for message in messages}

    async def members() -> set[str]:
        _, page = await worker.page(f"/api/queues/{quote('a/b', safe='')}")
        return {consumer["client_id"] for consumer in json.loads(page)["consumers"] or () if consumer["partitions"]}

    async with (
        marq.Producer(**options) as producer,
        marq.Consumer("a/b", client_id="billing", lease=LONG, **options) as billing,
    ):
        await producer.send("a/b", b"x")
        [held] = await billing.receive(wait=LIMIT_SECONDS)
        place = f"{worker.names.messages}/{held.partition}/{held.offset}"
        # By a holder that no member of the group names, as after a consumer was killed.
        left = await namespace.send("left", b"y")
        await namespace.acquire(left, lease=LONG)

        await eventually(lambda: consumers("a/b"), lambda found: found == {place: "billing"})
        await eventually(lambda: consumers("left"), lambda found: found == {left.id: None})
        async with marq.Consumer("a/b", client_id="other", **options):
            # A rebalance gives each member new partitions and a new holder; the message stays with its consumer.
            await eventually(members, lambda found: found == {"billing", "other"})
            assert await consumers("a/b") == {place: "billing"}
        await held.ack()


async def test_a_delivery_time_that_can_not_be_read_is_logged_counted_and_shown(
    namespace: Namespace, shared_worker: Worker, queue: str
) -> None:
    worker = shared_worker
    bad = await namespace.send(queue, b"bad", headers=[("marq-deliver-at", b"tomorrow")])
    good = await namespace.send(queue, b"good")
    async with marq.Consumer(queue, **client_of(worker)) as consumer:
        messages = await take(consumer, 2)
        await consumer.ack(messages)
    assert {message.value for message in messages} == {b"bad", b"good"}

    await eventually(lambda: worker.queue(queue), lambda found: found.get("invalid_deliver_at") == 1)
    series = f'marq_messages_invalid_deliver_at_total{{queue="{queue}"}} 1.0'
    await eventually(lambda: worker.page("/metrics"), lambda page: series in page[1])

    async def log() -> str:
        return worker.log()

    # The counters show the message before the next flush logs it.
    await eventually(log, lambda text: f"messages=1 first={bad.id}: marq-deliver-at is not a valid time" in text)
    shown = [(await worker.page(f"/message?id={sent.id}"))[1] for sent in (bad, good)]
    assert ["can't be read as a time" in page for page in shown] == [True, False]


@pytest.mark.parametrize(
    ("page", "status", "said"),
    [
        ("q/messages?state=lost", 400, "in_flight, delayed"),
        ("q/messages?limit=0", 400, "from 1 to 1000"),
        ("q/messages?limit=x", 400, "from 1 to"),
        ("a%2Fc/messages?state=in_flight", 404, "'a/c' is unknown"),
    ],
)
async def test_a_page_of_messages_refuses_what_it_does_not_know(
    shared_worker: Worker, page: str, status: int, said: str
) -> None:
    found, text = await shared_worker.page(f"/api/queues/{page}")

    assert (found, said in json.loads(text)["error"]) == (status, True), text


async def test_markers_about_places_that_do_not_exist_do_no_harm(
    namespace: Namespace, shared_worker: Worker, queue: str
) -> None:
    names = namespace.names
    marked = [
        await namespace.mark(Discard(queue, 7, Source(topic, partition), [2**40]), where)
        for topic, partition in [(names.dead_letters, 77), ("nowhere", 0), (names.messages, 0)]
        for where in (0, 1)
    ]
    await namespace.applied(*marked)

    sent = await namespace.send(queue)
    await namespace.acquire(sent, lease=LONG)
    await namespace.reject(sent)
    await eventually(lambda: namespace.dead_letters_of(sent))
    async with marq.DeadLetters(**client_of(shared_worker)) as letters:
        assert (await letters.redrive(queue)).redriven == 1
