"""The synchronous producer: threads, forks, and calls from where they cannot work."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

import marq
from tests.client.forking import end_program, start_program
from tests.client.waiting import in_threads, producer_threads, read_all, values, wait_until


@pytest.fixture
def producer(servers, prefix):
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        yield producer


# --- sending ----------------------------------------------------------------------------------------------------------


def test_it_sends_as_the_asynchronous_one_does(producer, servers, names) -> None:
    one = producer.send("emails", b"hello", headers={"tenant": "acme"})
    several = producer.send(["a", "b"], b"to both")
    many = producer.send_many("emails", [b"1", b"2", b"3"])

    records = asyncio.run(read_all(servers, names.messages))
    stored = {(record.partition, record.offset): record for record in records}
    found = [stored[receipt.partition, receipt.offset] for receipt in (one, *several, *many)]
    assert [(record.key, record.value) for record in found] == [
        (b"emails", b"hello"), (b"a", b"to both"), (b"b", b"to both"),
        (b"emails", b"1"), (b"emails", b"2"), (b"emails", b"3"),
    ]  # fmt: skip
    assert found[0].headers == (("tenant", b"acme"),)


def test_errors_are_those_of_the_asynchronous_one(producer) -> None:
    with pytest.raises(TypeError, match="item 1: a value must be bytes"):
        producer.send_many("q", [b"a", "b"])
    with pytest.raises(marq.MessageTooLarge):
        producer.send("q", b"x" * 2_000_000)
    with pytest.raises(marq.ConfigError, match="queue's name"):
        producer.send("", b"x")
    with pytest.raises(marq.ConfigError, match="one queue"):
        producer.send_many(["a", "b"], [b"x"])
    with pytest.raises(TypeError, match="delay"):
        producer.send("q", b"x", countdown=5)
    with pytest.raises(TypeError, match="release"):
        _ = producer.nack


def test_values_are_made_and_encoded_in_the_thread_that_sends_them(servers, prefix, names) -> None:
    class Recording:
        def encode(self, value: object) -> bytes:
            seen.add(threading.get_ident())
            return str(value).encode()

        def decode(self, data: bytes) -> object:
            return data

    def numbers():
        seen.add(threading.get_ident())
        yield from range(3)

    seen: set[int] = set()
    with marq.SyncProducer(servers, prefix=prefix, codec=Recording()) as producer:
        producer.send_many("q", numbers())
        producer.send("q", 3)

    assert seen == {threading.get_ident()}
    assert sorted(values(servers, names.messages)) == [b"0", b"1", b"2", b"3"]


def test_many_threads_share_one(producer, servers, names) -> None:
    receipts: list[marq.Receipt] = []

    def send(name: int) -> None:
        receipts.extend([producer.send(f"q{name}", b"%d" % number) for number in range(50)])

    in_threads(*[lambda name=name: send(name) for name in range(16)])

    assert len({receipt.id for receipt in receipts}) == 800
    records = asyncio.run(read_all(servers, names.messages))
    assert Counter(record.key for record in records) == {b"q%d" % name: 50 for name in range(16)}
    assert len(producer_threads()) == 1


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_start_and_stop_may_be_called_twice_and_a_stopped_one_started_again(servers, prefix, names) -> None:
    producer = marq.SyncProducer(servers, prefix=prefix)
    in_threads(*[producer.start] * 4)
    producer.start()
    assert len(producer_threads()) == 1
    producer.send("q", b"1")
    in_threads(*[producer.stop] * 4)
    producer.stop()
    assert producer_threads() == []

    with producer:
        producer.send("q", b"2")

    assert producer_threads() == []
    assert sorted(values(servers, names.messages)) == [b"1", b"2"]


def test_without_a_start_it_says_how(servers) -> None:
    producer = marq.SyncProducer(servers)

    for call in (lambda: producer.send("q", b"x"), lambda: producer.send_many("q", [b"x"])):
        with pytest.raises(marq.MarqError, match=r"not started: call start\(\) or use `with`"):
            call()
    producer.stop()


def test_wrong_settings_are_said_when_it_is_made() -> None:
    with pytest.raises(marq.ConfigError, match="bootstrap_servers"):
        marq.SyncProducer("nonsense")
    with pytest.raises(TypeError, match="no_such_option"):
        marq.SyncProducer(no_such_option=1)  # type: ignore[call-arg]
    with pytest.raises(marq.ConfigError, match="codec=5"):
        marq.SyncProducer(codec=5)  # type: ignore[arg-type]


def test_a_stop_answers_all_senders_and_keeps_confirmed_messages(servers, prefix, names) -> None:
    producer = marq.SyncProducer(servers, prefix=prefix)
    producer.start()
    receipts: list[marq.Receipt] = []

    def send() -> None:
        try:
            while True:
                receipts.append(producer.send("q", b"x"))
        except marq.MarqError:
            pass

    def stop() -> None:
        wait_until(lambda: len(receipts) > 100)
        producer.stop()

    in_threads(*[send] * 8, stop)

    stored = {(record.partition, record.offset) for record in asyncio.run(read_all(servers, names.messages))}
    assert {(receipt.partition, receipt.offset) for receipt in receipts} <= stored


def test_a_stop_lets_many_that_are_under_way_end(servers, prefix, monkeypatch) -> None:
    monkeypatch.setattr("marq.producer.sending.STOP_LIMIT_S", 60)
    producer = marq.SyncProducer(servers, prefix=prefix)
    producer.start()
    receipts: list[marq.Receipt] = []

    def send() -> None:
        receipts.extend(producer.send_many("q", [b"x" * 10_000] * 2_000))

    def stop() -> None:
        wait_until(lambda: producer._thread._open)
        producer.stop()

    in_threads(send, stop)

    assert len(receipts) == 2_000


def test_a_call_from_its_own_thread_is_refused_for_it_would_wait_for_itself(producer) -> None:
    outcomes: list[BaseException] = []

    def within() -> None:
        for call in (lambda: producer.send("q", b"x"), producer.start, producer.stop):
            try:
                call()
            except marq.MarqError as error:
                outcomes.append(error)

    producer._thread._soon(within)
    producer.send("q", b"after")

    assert [str(error)[:40] for error in outcomes] == ["a SyncProducer can't be used in its own "] * 3


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "own", "after"), [("fork", 3, 3), ("within_with", 0, 0), ("multiprocess", 2, 1)])
def test_a_fork_neither_uses_nor_disturbs_what_its_parent_started(program, own, after, servers, prefix, names) -> None:
    errors = end_program(start_program(program, servers, prefix))

    found = Counter(value for value in values(servers, names.messages) if value != b"x")
    assert found == Counter({b"before": 1, b"by the child's own": own, b"after": after})
    assert errors == ""
