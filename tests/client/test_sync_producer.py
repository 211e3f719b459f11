from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest

import marq
from broker.embedded import EmbeddedBroker
from tests.client.waiting import LIMIT_S, read_all, wait_until
from tests.docs.pages import ROOT


@pytest.fixture
def producer(servers, prefix):
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
def own_broker():
    """A broker that the test may kill."""
    with EmbeddedBroker() as embedded:
        yield embedded


def values(servers: str, topic: str) -> list[bytes]:
    return [record.value for record in asyncio.run(read_all(servers, topic))]


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "marq-producer"]


def in_threads(*functions) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


# --- sending ----------------------------------------------------------------------------------------------------------


def test_it_sends_as_the_asynchronous_one_does(producer, servers, names) -> None:
    one = producer.send("emails", b"hello", headers={"tenant": b"acme"})
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


def test_what_can_not_be_encoded_is_named_and_nothing_is_sent(servers, prefix, names) -> None:
    with marq.SyncProducer(servers, prefix=prefix, codec=marq.JSON) as producer:
        with pytest.raises(TypeError, match=r"queue 'q', item 1: marq\.JSON can't encode the value: JSON has no set"):
            producer.send_many("q", [1, {2}])
        with pytest.raises(ValueError, match=r"queue 'q': marq\.JSON can't encode"):
            producer.send("q", float("nan"))

    assert values(servers, names.messages) == []


def test_many_threads_share_one(producer, servers, names) -> None:
    receipts: list[marq.Receipt] = []

    def send(name: int) -> None:
        receipts.extend([producer.send(f"q{name}", b"%d" % number) for number in range(50)])

    in_threads(*[lambda name=name: send(name) for name in range(16)])

    assert len({receipt.id for receipt in receipts}) == 800
    records = asyncio.run(read_all(servers, names.messages))
    assert Counter(record.key for record in records) == {b"q%d" % name: 50 for name in range(16)}
    assert len(threads_left()) == 1


async def test_in_an_event_loop_it_blocks_and_works(servers, prefix) -> None:
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        assert producer.send("q", b"x").queue == "q"


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_start_and_stop_may_be_called_twice_and_a_stopped_one_started_again(servers, prefix, names) -> None:
    producer = marq.SyncProducer(servers, prefix=prefix)
    in_threads(*[producer.start] * 4)
    producer.start()
    assert len(threads_left()) == 1
    producer.send("q", b"1")
    in_threads(*[producer.stop] * 4)
    producer.stop()
    assert threads_left() == []

    with producer:
        producer.send("q", b"2")

    assert threads_left() == []
    assert sorted(values(servers, names.messages)) == [b"1", b"2"]


def test_without_a_start_it_says_how(servers) -> None:
    producer = marq.SyncProducer(servers)

    for call in (lambda: producer.send("q", b"x"), lambda: producer.send_many("q", [b"x"])):
        with pytest.raises(marq.MarqError, match="not started: use `with` or call start"):
            call()
    producer.stop()


def test_wrong_settings_are_said_when_it_is_made() -> None:
    with pytest.raises(marq.ConfigError, match="bootstrap_servers"):
        marq.SyncProducer("nonsense")
    with pytest.raises(TypeError, match="no_such_option"):
        marq.SyncProducer(no_such_option=1)  # type: ignore[call-arg]
    with pytest.raises(marq.ConfigError, match="codec=5"):
        marq.SyncProducer(codec=5)  # type: ignore[arg-type]


def test_a_stop_answers_all_who_send_and_keeps_what_it_confirmed(servers, prefix, names) -> None:
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


def test_a_stop_lets_many_that_are_under_way_end(servers, prefix) -> None:
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

    assert [str(error)[:40] for error in outcomes] == ["a SyncProducer can't be used in the thre"] * 3


# --- faults -----------------------------------------------------------------------------------------------------------


def test_without_a_broker_start_says_so_in_time_and_leaves_no_thread() -> None:
    producer = marq.SyncProducer("127.0.0.1:1", connect_timeout=1)

    for _ in range(2):
        with pytest.raises(marq.BrokerUnavailable, match=r"127\.0\.0\.1:1"):
            producer.start()

    assert threads_left() == []


def test_a_broker_that_goes_away_fails_sends_in_time_and_it_recovers(own_broker, prefix) -> None:
    with marq.SyncProducer(own_broker.bootstrap_servers, prefix=prefix, request_timeout=3) as producer:
        producer.send("q", b"before")
        own_broker.kill()
        with pytest.raises(marq.BrokerUnavailable, match="unknown whether"):
            producer.send("q", b"during")
        own_broker.start()

        def sent() -> bool:
            try:
                return bool(producer.send("q", b"after"))
            except marq.BrokerUnavailable:
                return False

        wait_until(sent, 90)


def test_a_stop_ends_and_answers_also_when_the_broker_hangs(own_broker, prefix) -> None:
    producer = marq.SyncProducer(own_broker.bootstrap_servers, prefix=prefix)
    producer.start()
    own_broker.pause()
    errors: list[marq.MarqError] = []

    def send() -> None:
        with pytest.raises(marq.BrokerUnavailable) as caught:
            producer.send("q", b"x")
        errors.append(caught.value)

    def stop() -> None:
        wait_until(lambda: len(producer._thread._open) == 4)
        producer.stop()

    in_threads(*[send] * 4, stop)
    own_broker.resume()

    assert len(errors) == 4
    assert threads_left() == []


def test_ctrl_c_ends_the_wait_and_the_producer_goes_on(own_broker, prefix, names) -> None:
    with marq.SyncProducer(own_broker.bootstrap_servers, prefix=prefix) as producer:
        own_broker.pause()

        def press() -> None:
            wait_until(lambda: producer._thread._open)
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            producer.send("q", b"interrupted")
        pressing.join()
        own_broker.resume()

        producer.send("q", b"after")
        assert not producer._thread._open

    assert values(own_broker.bootstrap_servers, names.messages).count(b"after") == 1


# --- forks and the end of the program ---------------------------------------------------------------------------------


def start_program(name: str, servers: str, prefix: str) -> subprocess.Popen[str]:
    # Warnings are shown, so that nothing is left open silently; that a fork of threads may hang is what we test.
    warnings = ["-W", "default", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(
        [sys.executable, *warnings, "-m", "tests.client.forking", name, servers, prefix], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_program(program: subprocess.Popen[str]) -> str:
    """Wait for its end; return what it wrote to stderr."""
    try:
        _, errors = program.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    assert program.returncode == 0, errors
    return errors


@pytest.mark.parametrize(("program", "own", "after"), [("fork", 3, 3), ("within_with", 0, 0), ("multiprocess", 2, 1)])
def test_a_fork_neither_uses_nor_disturbs_what_its_parent_started(program, own, after, servers, prefix, names) -> None:
    errors = end_program(start_program(program, servers, prefix))

    found = Counter(value for value in values(servers, names.messages) if value != b"x")
    assert found == Counter({b"before": 1, b"by the child's own": own, b"after": after})
    assert errors == ""


def test_a_program_that_ends_without_a_stop_sends_what_was_accepted(own_broker, prefix, names) -> None:
    program = start_program("end", own_broker.bootstrap_servers, prefix)
    assert program.stdout.readline() == "started\n"
    own_broker.pause()
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "ending\n"
    own_broker.resume()

    assert end_program(program) == ""
    assert values(own_broker.bootstrap_servers, names.messages) == [b"accepted"]


def test_a_program_that_ends_while_the_broker_hangs_does_not_hang(own_broker, prefix) -> None:
    program = start_program("end", own_broker.bootstrap_servers, prefix)
    assert program.stdout.readline() == "started\n"
    own_broker.pause()
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "ending\n"

    assert "Traceback" not in end_program(program)
    own_broker.resume()
