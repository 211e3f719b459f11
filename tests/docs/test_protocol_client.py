"""docs/protocol.md: a client made from its tables writes what Marq writes, and consumes together with a real worker."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import marq
from marq.kafka.queue_positions import Positions
from marq.settings.definitions import Definitions
from marq.wire import marker_codec, markers
from marq.wire.errors import ConfigError
from marq_worker.broker.embedded import EmbeddedBroker
from tests.docs import protocol_client
from tests.docs.protocol_client import IN_RECORD, Values
from tests.docs.protocol_delayer import Delayer
from tests.docs.protocol_receiver import Message, Receiver, send
from tests.unit.core.batches import batches
from tests.worker.harness import Worker, eventually, make_topic

PROTOCOL = protocol_client.read()


# --- markers ----------------------------------------------------------------------------------------------------------


def kind_of(batch: markers.Batch) -> str:
    if isinstance(batch, markers.Answer | markers.MixedAcquire):
        return "ANSWERED" if isinstance(batch, markers.Answer) else "MIXED_ACQUIRE"
    return batch.kind.name if isinstance(batch, markers.Fact) else type(batch).__name__.upper()


def values_of(batch: markers.Batch) -> Values:
    """What Marq's batch says, by the names that the page has for it."""
    if isinstance(batch, markers.Tick):
        return {"holder": batch.holder, "monotonic": batch.monotonic_ms}
    topic, partition = batch.source
    about = {
        "queue": batch.queue, "holder": batch.holder, "topic": topic, "partition": partition,
        "offsets": list(batch.offsets),
    }  # fmt: skip
    match batch:
        case markers.Acquire():
            dues = [-1] * len(batch.offsets) if batch.dues_ms is None else list(batch.dues_ms)
            own = {"lease": batch.lease_ms, "from_offset": batch.from_offset, "dues": dues, "in_order": batch.in_order}
            return {**about, **own, **columns_of(batch)}
        case markers.MixedAcquire():
            columns = {"from_offsets": batch.from_offsets, "timestamps": batch.timestamps_ms, "queues": batch.queues}
            own = {"lease": batch.lease_ms, "counted": batch.counted}
            return {**about, **own, **{name: list(column) for name, column in columns.items()}}
        case markers.Delay():
            from_offset = -1 if batch.from_offset is None else batch.from_offset
            own = {"times": list(batch.times_ms), "relative": batch.relative, "from_offset": from_offset}
            return {**about, **own, **columns_of(batch)}
        case markers.Reschedule():
            return {**about, "times": list(batch.times_ms), "relative": batch.relative}
        case markers.Answer():
            return {**about, "outcomes": list(batch.outcomes)}
        case markers.Resume():
            return {**about, "onwards": batch.onwards}
        case markers.Purge():
            return {**about, "in_flight": batch.in_flight, "delayed": batch.delayed}
        case markers.Resumed():
            acquired = [number for interval in batch.acquired for number in interval]
            columns = {
                "states": batch.states,
                "attempts": batch.attempts,
                "waits": batch.waits_ms,
                "errors": batch.errors,
            }
            own = {"asked_at": batch.asked_at, "left": batch.left, "acquired": acquired}
            return {**about, **own, **{name: list(column) for name, column in columns.items()}}
        case markers.Renew() | markers.Dispatch():
            return {**about, "lease": batch.lease_ms}
        case markers.Release():
            delays, errors = list(batch.delays_ms), list(batch.errors)
            return {**about, "delays": delays, "errors": errors, "counted": batch.counted}
        case markers.Reject():
            return {**about, "reasons": list(batch.reasons)}
        case markers.Fact():
            return {**about, "attempts": list(batch.attempts), "causes": list(batch.causes)}
    return about


def columns_of(batch: markers.Acquire | markers.Delay) -> Values:
    timestamps, attempts, keys, headers, values, left = map(list, zip(*batch.payloads, strict=True))
    values = [IN_RECORD if absent else value for absent, value in zip(left, values, strict=True)]
    # Readers ignore the keys of payloads in records, so these alone need no column of keys.
    queue_key = batch.queue.encode()
    named = any(key != queue_key for absent, key in zip(left, keys, strict=True) if not absent)
    keys = [(None if named else queue_key) if absent else key for absent, key in zip(left, keys, strict=True)]
    own = {"timestamps": timestamps, "attempts": attempts, "keys": keys, "values": values}
    return {**own, "headers": list(map(list, headers))}


@given(batches)
def test_it_writes_the_bytes_that_marq_writes(batch: markers.Batch) -> None:
    # Marq writes a column of due times that it was given, also when nothing is in it.
    written = ("DUES",) if isinstance(batch, markers.Acquire) and batch.dues_ms is not None else ()

    assert PROTOCOL.encode(kind_of(batch), values_of(batch), written=written) == marker_codec.encode(batch)


@given(batches)
def test_it_reads_what_marq_has_written(batch: markers.Batch) -> None:
    kind, values = PROTOCOL.decode(marker_codec.encode(batch))

    assert kind == kind_of(batch)
    assert {name: values[name] for name in values_of(batch)} == values_of(batch)


@given(batches)
def test_marq_reads_columns_that_a_writer_need_not_have_written(batch: markers.Batch) -> None:
    payloads = ("ATTEMPTS", "KEYS", "HEADERS")
    optional = {"ACQUIRE": (*payloads, "DUES"), "DELAY": payloads, "RELEASE": ("TEXTS",), "RESUMED": ("TEXTS",)}
    written = optional.get(kind_of(batch), ())

    read = marker_codec.decode(PROTOCOL.encode(kind_of(batch), values_of(batch), written=written))

    assert values_of(read) == values_of(batch)


# --- positions --------------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=200)
offsets = st.integers(0, 5)


@given(st.dictionaries(names, offsets, max_size=30), offsets)
def test_it_commits_what_marq_commits(positions: dict[str, int], offset: int) -> None:
    try:
        metadata = Positions(dict(positions)).encode(offset)
    except ConfigError:
        return

    assert protocol_client.write_metadata(positions, offset) == metadata


@given(st.dictionaries(names, offsets, max_size=3), st.dictionaries(names, offsets, max_size=3), offsets)
def test_it_reads_the_positions_of_queues_with_ordering(
    positions: dict[str, int], behind: dict[str, int], offset: int
) -> None:
    metadata = Positions(positions).advanced_to((), offset, behind).encode(offset)

    assert protocol_client.read_metadata(offset, metadata, None) == {**positions, **behind}


@given(st.one_of(st.text(max_size=20), st.dictionaries(names, offsets, max_size=3)), offsets, st.none() | names)
def test_it_reads_commits_as_marq_does(said: str | dict[str, int], offset: int, owner: str | None) -> None:
    metadata = said if isinstance(said, str) else Positions(said).encode(offset)

    found = protocol_client.read_metadata(offset, metadata, owner)

    assert found == Positions.decode(offset, metadata, owner).by_queue


def test_the_metadata_of_the_page_are_what_it_says() -> None:
    examples = [line for line in protocol_client.PAGE.read_text(encoding="utf-8").splitlines() if line[:5] == '{"at"']

    assert [Positions.decode(40, text).by_queue for text in examples] == [
        {"emails": 40},
        {"emails": 40, "sms": 40, "reports": 17},
    ]
    assert examples == [Positions.decode(40, text).encode(40) for text in examples]


# --- definitions ------------------------------------------------------------------------------------------------------

#: The limits of the page's ranges, and what is just past them.
limits = [0, 1, 1_000, 10_000, 4_294_967, 1_000_000, 31_536_000]
numbers = st.sampled_from([*limits, *[limit + 1 for limit in limits], -1, 0.5, 10_000.5, 1.0, True])
backoffs = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={"base": numbers, "factor": numbers, "max": numbers, "jitter": st.booleans()},
    ),
    st.fixed_dictionaries({"delays": st.lists(numbers, max_size=3)}, optional={"jitter": st.booleans()}),
    st.lists(numbers, max_size=3),
    st.just({"other": 1}),
    st.just({"delays": [1], "max": 1}),
)
bounds = {"concurrency": numbers, "rate": st.sampled_from(["1/s", "10/min", "5/h", "0/s", "1000001/s", "1/d", "1", 1])}
key_limits = st.fixed_dictionaries({}, optional=bounds) | st.booleans()
values = st.fixed_dictionaries(
    {},
    optional={
        "lease": numbers,
        "max_lease": numbers,
        "max_attempts": numbers | st.just("unlimited"),
        "backoff": backoffs,
        "errors": st.dictionaries(
            st.sampled_from(["ValueError", "a.B"]), st.sampled_from(["reject", "drop", False, True]) | backoffs
        ),
        "breaker": st.booleans()
        | st.fixed_dictionaries({}, optional={"failures": numbers, "window": numbers, "pause": numbers}),
        "dead_letter": st.booleans() | st.integers(0, 1),
        "delivery": st.sampled_from(["at-least-once", "at-most-once", "once"]),
        "transactional": st.booleans() | st.integers(0, 1),
        "group": st.sampled_from(["g", "", "a\nb", "x" * 201]),
        "topic": st.sampled_from(["orders", "no blanks", ""]),
        "handler": st.sampled_from(["module:function", "module"]),
        "concurrency": numbers,
        "partitions": numbers | st.sampled_from(["all", "unlimited"]),
        "paused": st.booleans()
        | st.sampled_from(["2026-11-23T14:05:00Z", "2026-11-23T15:05:00.5+01:00", "2026-11-23T14:05:00", "10m"]),
        "ordering": st.sampled_from(["none", "key", "all"]),
        "on_dead_letter": st.sampled_from(["continue", "block", "drop"]),
        "deduplication_window": numbers,
        "shutdown_timeout": numbers,
        "tracebacks": st.booleans(),
        "limits": st.booleans()
        | st.fixed_dictionaries({}, optional={**bounds, "per_key": key_limits, "burst": numbers}),
        "fair": st.booleans() | st.integers(0, 1),
        "priority": st.integers(0, 10) | st.booleans(),
        "key": st.sampled_from(["ordering", "header:tenant", "header:", "header: a", "tenant", 1]),
        "expires_after": numbers | st.booleans(),
        "expired": st.sampled_from(["drop", "dead-letter", "keep"]),
        "project": st.sampled_from(["shop", "billing", "", 1]),
        "a key of a later version": st.just(1),
    },
)
records = st.tuples(
    st.sampled_from(
        [
            b"defaults",
            b"defaults:shop",
            b"defaults:",
            b"handler:q",
            b"file:q",
            b"change:q",
            b"other:q",
            b"check",
            b"file:",
            b"\xff",
            None,
        ]
    ),
    st.one_of(st.none(), values, st.just([])),
)


@given(st.lists(records, max_size=6))
@example([(b"handler:q", {"group": "g", "priority": False})])
def test_it_finds_the_settings_that_marq_finds(log: list[tuple[bytes | None, Any]]) -> None:
    theirs, ours = protocol_client.read().queue_definitions, Definitions()
    for key, document in log:
        theirs.fold(key, None if document is None else json.dumps(document).encode())
        try:
            ours.fold(key, document)
        except ConfigError:
            continue

    for queue in ("q", "another"):
        assert in_our_words(theirs.settings(queue)) == asdict(ours.settings(queue))
        assert theirs.group(queue) == ours.group(queue)


#: Settings in seconds.
SECONDS = frozenset({"lease", "max_lease", "delay", "deduplication_window", "shutdown_timeout", "expires_after"})


def in_our_words(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds as Marq keeps them, in whole milliseconds."""
    rest = {key: value for key, value in settings.items() if key not in SECONDS}
    breaker = settings["breaker"]
    return {
        **rest,
        "max_attempts": 4_294_967_295 if settings["max_attempts"] == "unlimited" else settings["max_attempts"],
        "partitions": None if settings["partitions"] == "all" else settings["partitions"],
        "lease_ms": max(round(settings["lease"] * 1000), 1),
        "max_lease_ms": max(round(settings["max_lease"] * 1000), 1),
        "delay_ms": round(settings["delay"] * 1000),
        "deduplication_window_ms": max(round(settings["deduplication_window"] * 1000), 1),
        "shutdown_timeout_ms": None
        if settings["shutdown_timeout"] is None
        else round(settings["shutdown_timeout"] * 1000),
        "expires_after_ms": None
        if settings["expires_after"] is False
        else max(round(settings["expires_after"] * 1000), 1),
        "paused": bool(settings["paused"]),
        "paused_until_ms": round(datetime.fromisoformat(settings["paused"]).timestamp() * 1000)
        if isinstance(settings["paused"], str)
        else None,
        "backoff": backoff_in_our_words(settings["backoff"]),
        "errors": {name: said and backoff_in_our_words(said) for name, said in settings["errors"].items()},
        "priority": settings["priority"] or None,
        "limits": None if settings["limits"] is False else limits_in_our_words(settings["limits"]),
        "breaker": None
        if breaker is False
        else {
            "failure_rate": breaker["failure_rate"],
            "window": breaker["window"],
            "reset_timeout_ms": max(round(breaker["reset_timeout"] * 1000), 1),
        },
    }


def limits_in_our_words(said: Mapping[str, Any], *, of_key: bool = False) -> dict[str, Any]:
    """Rates as Marq keeps them: a number and a unit."""
    count, _, unit = said.get("rate", "").partition("/")
    limits = {"concurrency": said.get("concurrency"), "rate": {"count": int(count), "unit": unit} if count else None}
    return limits if of_key else {**limits, "per_key": limits_in_our_words(said.get("per_key", {}), of_key=True)}


def backoff_in_our_words(said: Mapping[str, Any]) -> dict[str, Any]:
    backoff = {**said, "delays_ms": tuple(round(delay * 1000) for delay in said["delays"] or ())}
    del backoff["delays"]
    for name in ("base", "max"):
        backoff[f"{name}_ms"] = round(backoff.pop(name) * 1000)
    return backoff


# --- a queue on a real broker -----------------------------------------------------------------------------------------

#: Longer than a test takes on a busy machine; a renewal shortens the only lease that is to end.
LEASE_MS = 600_000


async def until(receiver: Receiver, count: int) -> list[Message]:
    """Receive until there are this many messages."""
    received: list[Message] = []

    async def look() -> int:
        received.extend(await receiver.receive())
        return len(received)

    await eventually(look, lambda found: found >= count)
    return received


@pytest.fixture(scope="module")
def started(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with the queues of the tests below, one of which has a topic of its own."""
    prefix = f"t{uuid.uuid4().hex[:12]}"
    queues = f'[queues.shared]\nmax_attempts = 2\n[queues.own]\nmax_attempts = 2\ntopic = "{prefix}-own"\n'
    asyncio.run(make_topic(broker.bootstrap_servers, f"{prefix}-own", 2))
    with Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("worker"), prefix=prefix, queues=queues) as worker:
        yield worker


@pytest.fixture
async def worker(started: Worker) -> Worker:
    return await started.ready()


@pytest.mark.parametrize("queue", ["shared", "own"])
async def test_it_consumes_a_queue_with_a_real_worker(servers: str, worker: Worker, queue: str) -> None:
    await send(PROTOCOL, servers, worker.names.prefix, queue, [b"%d" % number for number in range(20)])
    async with marq.Producer(servers, prefix=worker.names.prefix) as producer:
        # To the topic that is the queue's own, if it has one.
        await producer.send_many(queue, [b"bad", b"dropped", b"later"], headers={"tenant": b"acme"})

    async with Receiver(protocol_client.read(), servers, worker.names.prefix, queue, lease_ms=LEASE_MS) as receiver:
        received = {message.value: message for message in await until(receiver, 23)}
        for value, message in received.items():
            if value == b"later":
                await receiver.release(message, 100, "boom")
            elif value == b"bad":
                await receiver.reject(message, "no good")
            elif value == b"dropped":
                await receiver.renew(message, 100)
            else:
                await receiver.ack(message)
        again = {message.value: message for message in await until(receiver, 2)}
        for message in again.values():
            await receiver.ack(message)

    assert len(received) == 23
    assert {value: (message.attempt, message.id) for value, message in again.items()} == {
        value: (2, received[value].id) for value in (b"dropped", b"later")
    }
    assert again[b"later"].headers["marq-error"] == b"boom"
    assert {message.headers["tenant"] for message in again.values()} == {b"acme"}
    assert {message.source.topic for message in again.values()} == {worker.names.messages}

    async def statistics() -> tuple[float, ...]:
        found = await worker.queue(queue)
        return tuple(found.get(name, 0) for name in ("acked", "dead_lettered", "redelivered", "in_flight", "late"))

    await eventually(statistics, lambda found: found == (22, 1, 2, 0, 0))

    # Marq's consumer goes on where this one has ended: its commits say the same.
    async with (
        marq.Producer(servers, prefix=worker.names.prefix) as producer,
        marq.Consumer(queue, servers, prefix=worker.names.prefix) as consumer,
    ):
        await producer.send(queue, b"after")
        assert [message.value for message in await consumer.receive()] == [b"after"]


async def test_it_delays_cancels_and_moves_with_a_real_worker(servers: str, worker: Worker) -> None:
    async with (
        Delayer(PROTOCOL, servers, worker.names.prefix, "later") as delayer,
        Receiver(protocol_client.read(), servers, worker.names.prefix, "later", lease_ms=LEASE_MS) as receiver,
    ):
        began_ms = int(time.time() * 1000)
        soon, away, moved = await delayer.delay(
            [b"soon", b"away", b"moved"], [1_500, 3_600_000, 3_600_000], relative=True
        )
        (once,) = await delayer.delay([b"once"], [began_ms + 1_000], relative=False, times_written=2)
        at = [("marq-deliver-at", b"%d" % (began_ms + 2_000))]
        await send(PROTOCOL, servers, worker.names.prefix, "later", [b"by header"], at)
        assert await delayer.cancel(away)
        assert await delayer.move(moved, 1_000, relative=True)

        received = {message.value: message for message in await until(receiver, 4)}
        for message in received.values():
            await receiver.ack(message)

        assert {message.value: message.id for message in received.values() if message.value != b"by header"} == {
            b"soon": soon.id, b"moved": moved.id, b"once": once.id
        }  # fmt: skip
        assert {message.attempt for message in received.values()} == {1}
        assert int(time.time() * 1000) >= began_ms + 2_000
        # Each has left.
        assert not await delayer.cancel(soon)
        assert not await delayer.move(away, 0, relative=True)

    async def statistics() -> tuple[float, ...]:
        found = await worker.queue("later")
        return tuple(found.get(name, 0) for name in ("acked", "in_flight", "dead_lettered", "late"))

    await eventually(statistics, lambda found: found == (4, 0, 0, 0))
