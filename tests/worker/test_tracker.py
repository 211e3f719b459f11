"""What becomes of markers: the tracker of a real worker, told by markers alone and watched by what it writes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from broker import EmbeddedBroker
from marq.core.copies import record_id
from marq.core.marker_codec import encode
from marq.core.markers import (
    BACKOFF,
    Ack,
    Cause,
    Fact,
    Kind,
    Payload,
    Source,
)
from marq.core.names import (
    ATTEMPT_HEADER,
    DIED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
)
from tests.unit.core.batches import NEWER
from tests.worker.harness import (
    HOLDER,
    LATENESS_SECONDS,
    OTHER,
    Installation,
    Sent,
    Worker,
    eventually,
    header,
    kinds,
    throughout,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = 0.5
#: Longer than any test takes.
LONG = 120.0
QUEUES = """
[defaults]
max_attempts = 5

[queues.twice]
max_attempts = 2

[queues.once]
max_attempts = 1

[queues.dropped]
max_attempts = 1
dead_letter = false

[queues.patient]
backoff = { base = 2, factor = 1, max = 2, jitter = false }
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    worker = Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("tracker"), queues=QUEUES)
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def marq(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Installation]:
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        yield installation


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue of the test's own, with the default settings."""
    return re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:100]


async def nothing_more_of(marq: Installation, *sent: Sent, after: float = LEASE) -> None:
    """Show that these fire no more: a message acquired now, in the same partition and for longer, has fired instead."""
    witness = await marq.send("witness", partition=sent[0].source.partition)
    await marq.acquire(witness, lease=after + 0.1)
    await eventually(lambda: marq.copies_of(witness))


async def copy_of(marq: Installation, sent: Sent) -> Any:
    """Wait for the copy of a message; there is one."""
    [copy] = await eventually(lambda: marq.copies_of(sent))
    return copy


async def dead_letter_of(marq: Installation, sent: Sent) -> Any:
    [letter] = await eventually(lambda: marq.dead_letters_of(sent))
    return letter


def taken_again(copy: Any, queue: str) -> Sent:
    """A copy as a consumer would read it."""
    attempt = int(header(copy)[ATTEMPT_HEADER])
    payload = Payload(copy.timestamp, attempt, copy.key, tuple(copy.headers), copy.value)
    return Sent(queue, Source(copy.topic, copy.partition), copy.offset, payload)


async def test_an_acknowledged_message_leaves_no_row_and_never_comes_back(
    marq: Installation, worker: Worker, queue: str
) -> None:
    sent = await marq.send_many(queue, 10)

    await marq.acquire(*sent, lease=LEASE)
    acked = await marq.ack(*sent)
    await marq.applied(acked)
    await nothing_more_of(marq, *sent)

    figures = await worker.queue(queue)
    assert (figures["acquired"], figures["acked"], figures["in_flight"], figures["redelivered"]) == (10, 10, 0, 0)
    rows = {record.key: record.value for record in await marq.records(marq.names.changelog)}
    assert not [key for key, value in rows.items() if key[:1] in b"rs" and value and queue.encode() in value]
    assert await marq.copies(queue) == []


async def test_an_expired_lease_brings_the_same_message_with_the_next_attempt(marq: Installation, queue: str) -> None:
    headers = [("tenant", b"acme"), ("trace", b"\x00\xff")]
    sent = await marq.send(queue, b"\x00payload\xff", headers=headers)

    acquired = await marq.acquire(sent, lease=LEASE)
    copy = await copy_of(marq, sent)
    late = await marq.lateness(acquired, sent, LEASE)

    assert (copy.key, copy.value) == (queue.encode(), b"\x00payload\xff")
    assert list(copy.headers[:2]) == headers
    found = header(copy)
    assert found[ID_HEADER] == sent.id.encode()
    assert found[ATTEMPT_HEADER] == b"2"
    assert found[FIRST_SENT_HEADER] == b"%d" % sent.payload.timestamp_ms
    assert 0 <= late <= LATENESS_SECONDS, "without other traffic"


async def test_an_expired_lease_is_noticed_in_time_while_other_traffic_flows(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue)
    acquired = await marq.acquire(sent, lease=LEASE)

    async def traffic() -> list[Any]:
        other = await marq.send_many("traffic", 50)
        await marq.acquire(*other, lease=LONG)
        await marq.ack(*other)
        return await marq.fact_of(sent)

    await eventually(traffic)

    assert 0 <= await marq.lateness(acquired, sent, LEASE) <= LATENESS_SECONDS


async def test_a_record_without_value_comes_back_as_it_was_and_a_key_of_its_own_in_a_header(
    marq: Installation, queue: str
) -> None:
    empty = await marq.send(queue, None, key=b"customer 7")

    await marq.acquire(empty, lease=0.1)

    copy = await copy_of(marq, empty)
    # The key of a record in the messages topic is its queue's name.
    assert (copy.key, copy.value) == (queue.encode(), None)
    assert header(copy)["marq-key"] == b"customer 7"


async def test_a_released_message_comes_at_once(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=LONG)

    released = await marq.release(sent, error="ValueError: no address")
    copy = await copy_of(marq, sent)

    assert 0 <= await marq.lateness(released, sent, 0) <= LATENESS_SECONDS
    assert header(copy)[ATTEMPT_HEADER] == b"2"
    assert header(copy)[ERROR_HEADER] == b"ValueError: no address"
    [(_, fact)] = await marq.fact_of(sent)
    assert (fact.kind, list(fact.causes)) == (Kind.REDELIVERED, [Cause.RELEASED])


async def test_a_message_released_with_a_delay_comes_after_it(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=0.3)

    released = await marq.release(sent, delay_ms=1500)
    await copy_of(marq, sent)

    assert 0 <= await marq.lateness(released, sent, 1.5) <= LATENESS_SECONDS


async def test_a_failed_message_waits_for_the_backoff_of_its_queue(marq: Installation) -> None:
    sent = await marq.send("patient")
    await marq.acquire(sent, lease=LONG)

    released = await marq.release(sent, delay_ms=BACKOFF)
    await copy_of(marq, sent)

    assert 0 <= await marq.lateness(released, sent, 2.0) <= LATENESS_SECONDS


async def test_an_uncounted_release_keeps_the_attempt(marq: Installation) -> None:
    sent = await marq.send("once")
    await marq.acquire(sent, lease=LONG)

    await marq.release(sent, counted=False)

    assert header(await copy_of(marq, sent))[ATTEMPT_HEADER] == b"1"
    assert await marq.dead_letters_of(sent) == []


async def test_a_rejected_message_becomes_a_dead_letter_with_its_reason(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue, b"spam", headers=[("tenant", b"acme")])
    await marq.acquire(sent, lease=LONG)

    await marq.reject(sent, reason="not for us")
    letter = await dead_letter_of(marq, sent)

    found = header(letter)
    assert (letter.key, letter.value, found["tenant"]) == (queue.encode(), b"spam", b"acme")
    assert found[REASON_HEADER] == b"not for us"
    assert found[ATTEMPT_HEADER] == b"1"
    assert found[ORIGIN_HEADER] == sent.id.encode()
    assert found[FIRST_SENT_HEADER] == b"%d" % sent.payload.timestamp_ms
    assert int(found[DIED_AT_HEADER]) >= sent.payload.timestamp_ms
    assert await marq.copies_of(sent) == []
    assert kinds(await marq.fact_of(sent)) == [Kind.DEAD_LETTERED]


async def test_a_message_that_used_up_its_attempts_becomes_a_dead_letter(marq: Installation, worker: Worker) -> None:
    sent = await marq.send("twice", b"unlucky")
    await marq.acquire(sent, lease=0.2)
    again = taken_again(await copy_of(marq, sent), "twice")

    await marq.acquire(again, lease=0.2, attempt=2)
    letter = await dead_letter_of(marq, sent)

    found = header(letter)
    assert (letter.value, found[ATTEMPT_HEADER]) == (b"unlucky", b"2")
    assert found[REASON_HEADER] == b"2 of 2 attempts used: the last time its lease ran out"
    assert found[ORIGIN_HEADER] == record_id(again.source, again.offset).encode()
    assert found[ID_HEADER] == sent.id.encode()
    assert len(await marq.copies_of(sent)) == 1
    figures = await eventually(lambda: worker.queue("twice"), lambda found: found["dead"])
    assert (figures["expired"], figures["redelivered"], figures["dead"], figures["in_flight"]) == (2, 1, 1, 0)


async def test_attempts_are_numbered_through_releases_up_to_the_last(marq: Installation, queue: str) -> None:
    first = sent = await marq.send(queue, headers=[("tenant", b"acme")])
    attempts = []
    for attempt in range(1, 6):
        await marq.acquire(sent, lease=LONG, attempt=attempt)
        await marq.release(sent)
        attempts.append(attempt)
        if attempt < 5:
            copies = await eventually(lambda: marq.copies_of(first), lambda found, n=attempt: len(found) == n)
            sent = taken_again(max(copies, key=lambda copy: int(header(copy)[ATTEMPT_HEADER])), queue)
            assert sent.payload.attempt == attempt + 1

    letter = await dead_letter_of(marq, first)

    assert header(letter)[REASON_HEADER] == b"5 of 5 attempts used: the last time it was released"
    assert header(letter)["tenant"] == b"acme"


async def test_a_queue_without_dead_letters_drops_a_message_after_its_last_attempt(
    marq: Installation, worker: Worker
) -> None:
    sent = await marq.send("dropped")

    await marq.acquire(sent, lease=0.2)
    facts = await eventually(lambda: marq.fact_of(sent))

    assert kinds(facts) == [Kind.DEAD_LETTERED]
    assert await marq.dead_letters_of(sent) == []
    assert await marq.copies_of(sent) == []
    await eventually(lambda: worker.queue("dropped"), lambda figures: figures["in_flight"] == 0)


async def test_a_renewal_by_the_holder_postpones_redelivery(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=1.0)

    renewed = await marq.renew(sent, lease=2.0)
    await copy_of(marq, sent)

    assert 0 <= await marq.lateness(renewed, sent, 2.0) <= LATENESS_SECONDS


async def test_renewal_release_and_reject_by_another_than_the_holder_are_ignored(
    marq: Installation, worker: Worker, queue: str
) -> None:
    renewed, released, rejected = await marq.send_many(queue, 3)
    acquired = await marq.acquire(renewed, released, rejected, lease=1.0)

    await marq.renew(renewed, lease=LONG, holder=OTHER)
    await marq.release(released, delay_ms=100_000, holder=OTHER)
    await marq.reject(rejected, holder=OTHER)

    for sent in (renewed, released, rejected):
        await copy_of(marq, sent)
        assert 0 <= await marq.lateness(acquired, sent, 1.0) <= LATENESS_SECONDS
    figures = await worker.queue(queue)
    assert (figures["renewed"], figures["released"], figures["rejected"], figures["late"]) == (0, 0, 0, 2)


async def test_an_acknowledgement_counts_from_anyone(marq: Installation, worker: Worker, queue: str) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=LEASE)

    await marq.ack(sent, holder=OTHER)
    await nothing_more_of(marq, sent)

    assert await marq.copies_of(sent) == []
    assert (await worker.queue(queue))["acked"] == 1


async def test_a_late_acknowledgement_is_counted_and_takes_nothing_from_the_copy(
    marq: Installation, worker: Worker, queue: str
) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=0.2)
    copy = taken_again(await copy_of(marq, sent), queue)
    await marq.acquire(copy, lease=LONG, attempt=2, holder=OTHER)

    await marq.ack(sent)

    figures = await eventually(lambda: worker.queue(queue), lambda found: found["late"] == 1)
    assert (figures["acked"], figures["in_flight"]) == (0, 1)


async def test_a_finished_record_that_is_acquired_again_stays_finished(
    marq: Installation, worker: Worker, queue: str
) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=LONG)
    await marq.applied(await marq.ack(sent))

    await marq.acquire(sent, lease=0.2, holder=OTHER)
    await nothing_more_of(marq, sent)

    assert await marq.copies_of(sent) == []
    figures = await worker.queue(queue)
    assert (figures["acquired"], figures["reacquired"], figures["in_flight"]) == (1, 1, 0)


async def test_an_open_record_that_is_acquired_again_belongs_to_the_new_holder(marq: Installation, queue: str) -> None:
    sent = await marq.send(queue)
    await marq.acquire(sent, lease=0.3)

    taken = await marq.acquire(sent, lease=1.5, holder=OTHER)
    await marq.release(sent)
    await copy_of(marq, sent)

    assert 0 <= await marq.lateness(taken, sent, 1.5) <= LATENESS_SECONDS


async def test_markers_of_a_message_that_nobody_acquired_change_nothing(
    marq: Installation, worker: Worker, queue: str
) -> None:
    never = await marq.send(queue)

    await marq.renew(never, lease=0.1)
    await marq.release(never)
    await marq.reject(never)
    await marq.applied(await marq.ack(never))

    figures = await worker.queue(queue)
    assert (figures["in_flight"], figures["acked"], figures["late"]) == (0, 0, 3)
    assert await marq.copies_of(never) == []


async def test_an_unreadable_marker_is_counted_kept_in_quarantine_and_passed_over(
    marq: Installation, worker: Worker, queue: str
) -> None:
    partition = 1
    before = (await worker.partitions())[partition]["quarantined"]
    whole = encode(Ack(queue, HOLDER, (await marq.send(queue)).source, [5]))

    garbage = [await marq.mark(value, partition) for value in (b"\x00garbage", b"", whole[:-3], whole + b"!")]
    nothing = await marq.producer.send_and_wait(marq.names.markers, None, b"a tombstone", partition=partition)
    for source_partition in (0, 1):
        sent = await marq.send(queue, partition=source_partition)
        await marq.applied(await marq.acquire(sent, lease=LONG))

    figures = await eventually(worker.partitions, lambda found: found[partition]["quarantined"] >= before + 5)
    assert figures[partition]["quarantined"] == before + 5
    assert (figures[partition]["state"], figures[partition]["alarm"]) == ("owner", "")
    kept = await eventually(lambda: marq.records(marq.names.quarantine), lambda records: len(records) >= 5)
    origins = [header(record)["marq-origin"].decode() for record in kept]
    assert origins == [f"{marq.names.markers}/{partition}/{at.offset}" for at in (*garbage, nothing)]
    assert [record.value for record in kept] == [b"\x00garbage", b"", whole[:-3], whole + b"!", b""]
    assert all(header(record)["marq-reason"] for record in kept)


async def test_a_large_payload_comes_back_whole(marq: Installation, queue: str) -> None:
    value = bytes(range(256)) * 3_500
    sent = await marq.send(queue, value)

    await marq.applied(await marq.acquire(sent, lease=LEASE))

    assert (await copy_of(marq, sent)).value == value


async def test_a_copy_that_the_added_headers_make_too_large_becomes_a_dead_letter(
    marq: Installation, queue: str
) -> None:
    limit = int((await marq.config(marq.names.messages))["max.message.bytes"])
    # The framing of a record batch takes some 80 bytes: this one just fits, and its copy does not.
    sent = await marq.send(queue, b"x" * (limit - 100 - len(queue)))
    await marq.acquire(sent, lease=0.2)

    letter = await dead_letter_of(marq, sent)

    assert letter.value == sent.payload.value
    assert b"larger than the messages topic accepts" in header(letter)[REASON_HEADER]
    assert await marq.copies_of(sent) == []
    [(_, fact)] = await marq.fact_of(sent)
    assert list(fact.causes) == [Cause.TOO_LARGE]


async def test_of_two_leases_only_the_one_that_is_over_fires(marq: Installation, queue: str) -> None:
    longer, shorter = await marq.send_many(queue, 2)
    await marq.acquire(longer, lease=LONG, from_offset=longer.offset)

    await marq.acquire(shorter, lease=0.2)
    await copy_of(marq, shorter)

    assert await marq.copies_of(longer) == []


async def test_a_thousand_leases_that_end_together_all_fire_once(
    marq: Installation, worker: Worker, queue: str
) -> None:
    sent = await marq.send_many(queue, 1_000)

    await marq.acquire(*sent, lease=LEASE)
    copies = await eventually(lambda: marq.copies(queue), lambda found: len(found) >= 1_000)
    await nothing_more_of(marq, *sent)

    assert sorted(header(copy)[ID_HEADER].decode() for copy in copies) == sorted(message.id for message in sent)
    assert len(await marq.copies(queue)) == 1_000
    # They are spread over the partitions, for all consumers to share.
    assert {copy.partition for copy in copies} == {0, 1}
    figures = await eventually(lambda: worker.queue(queue), lambda found: found["redelivered"] == 1_000)
    assert (figures["expired"], figures["in_flight"]) == (1_000, 0)


async def test_the_figures_say_what_is_open_and_since_when(marq: Installation, worker: Worker, queue: str) -> None:
    held, released, rejected, done = await marq.send_many(queue, 4)
    await marq.acquire(held, released, rejected, done, lease=LONG)
    await marq.release(released, delay_ms=int(LONG * 1000))
    await marq.ack(done)
    await marq.reject(rejected)

    figures = await eventually(lambda: worker.queue(queue), lambda found: found.get("dead"))

    assert (figures["in_flight"], figures["waiting_for_redelivery"], figures["waiting_for_dead_letters"]) == (1, 1, 0)
    assert (figures["acquired"], figures["acked"], figures["released"], figures["rejected"]) == (4, 1, 1, 1)
    assert 0 < figures["oldest_lease_seconds"] < LONG
    status, page = await worker.page("/")
    assert status == 200
    assert queue in page


async def test_facts_are_written_by_the_tracker_only_once(marq: Installation) -> None:
    """At the end of this module: over all that its tests made the tracker do."""
    facts = [batch for _, batch in await marq.markers() if isinstance(batch, Fact)]
    fired = [(fact.source, offset) for fact in facts for offset in fact.offsets]

    assert len(fired) == len(set(fired)) > 1_000


async def test_a_marker_of_an_unknown_version_stops_its_partition_alone(
    marq: Installation, worker: Worker, queue: str
) -> None:
    """Last: the partition stands still from here on."""
    stopped = marq.partition_of((await marq.send(queue)).source)
    unknown = await marq.mark(NEWER, stopped)
    behind = await marq.send(queue)
    await marq.acquire(behind, lease=0.2)

    figures = await eventually(worker.partitions, lambda found: found[stopped]["alarm"])
    elsewhere = await marq.send(queue, partition=1)
    acquired = await marq.acquire(elsewhere, lease=0.2)
    await copy_of(marq, elsewhere)

    assert "marker version 2, and this Marq knows version 1" in figures[stopped]["alarm"]
    assert figures[stopped]["state"] == "stopped"
    assert figures[stopped]["applied_offset"] < unknown.offset
    assert acquired.partition != stopped
    assert (await worker.partitions())[acquired.partition]["alarm"] == ""
    await throughout(1.0, lambda: marq.copies_of(behind), lambda copies: not copies)
    assert "upgrade the workers" in (await worker.page("/"))[1]
    committed = await marq.committed()
    assert committed.get(stopped, 0) <= unknown.offset, "it must be read again after the upgrade"
