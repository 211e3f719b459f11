"""The embedded broker, for real."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from marq_worker.broker import EmbeddedBroker, ports, settings
from marq_worker.broker.errors import BrokerError
from marq_worker.broker.settings import FIRST_NODE_ID
from tests.client.waiting import wait_until
from tests.embedded.records import LIMIT_SECONDS, first_value, send
from tests.worker.harness import admin, make_topic


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One broker for the tests that leave it running; a directory as users have them."""
    with EmbeddedBroker(tmp_path_factory.mktemp("with space") / "and=sign") as broker:
        yield broker


async def test_records_that_were_confirmed_outlive_kill_9(broker: EmbeddedBroker) -> None:
    address = broker.bootstrap_servers
    await make_topic(address, "killed", 1)
    await send(broker, "killed", b"before")

    broker.kill()
    assert not broker.running
    broker.start()

    assert broker.bootstrap_servers == address
    assert await first_value(broker, "killed") == b"before"


async def test_a_missing_topic_stays_absent(broker: EmbeddedBroker) -> None:
    async with admin(broker.bootstrap_servers) as client:
        await client.describe_topics(["misspelt"])
        assert "misspelt" not in await client.list_topics()


def test_a_paused_broker_takes_connections_and_answers_nothing(broker: EmbeddedBroker) -> None:
    host, port = ports.split_address(broker.bootstrap_servers)

    broker.pause()
    while_paused = ports.is_ready(host, port, FIRST_NODE_ID, limit_seconds=0.2)
    broker.resume()

    assert not while_paused
    # After a long pause it has to become a member of its cluster again.
    wait_until(lambda: ports.is_ready(host, port, FIRST_NODE_ID, limit_seconds=LIMIT_SECONDS))


def test_a_second_broker_on_the_same_data_says_so(broker: EmbeddedBroker) -> None:
    second = EmbeddedBroker(broker.data_directory)

    with pytest.raises(BrokerError, match=r"another broker uses .*: stop it or choose another directory"):
        second.start()

    assert broker.running


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        with pytest.raises(BrokerError) as error:
            EmbeddedBroker(address=address).start()

    assert f"{address} is in use: set MARQ_BOOTSTRAP_SERVERS to another host:port, or stop what" in str(error.value)


def test_a_setting_that_kafka_refuses_ends_the_start_with_its_reason() -> None:
    with pytest.raises(BrokerError) as error:
        EmbeddedBroker(properties={"num.io.threads": "many"}).start()

    assert "one of its settings is wrong" in str(error.value)
    assert "num.io.threads" in str(error.value)


def test_a_heap_that_java_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_BROKER_HEAP", "lots")

    with pytest.raises(BrokerError, match=r"set MARQ_BROKER_HEAP to e\.g\. 512m"):
        EmbeddedBroker().start()


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BrokerError, match=r"cannot write its directory: .*; choose another directory"):
        EmbeddedBroker(tmp_path / "file").start()


@pytest.mark.parametrize("address", ["9092", "localhost", "a:b", ":9092", "a:0", "a:65536", "a:1,b:2"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(BrokerError, match="is not an address"):
        EmbeddedBroker(address=address)


def test_before_its_first_start_a_broker_has_no_address() -> None:
    with pytest.raises(BrokerError, match="no address before its first start"):
        _ = EmbeddedBroker().bootstrap_servers


def test_settings_reach_java_as_they_are() -> None:
    text = settings.render({"path": " C:\\data", "name": "dätä"})

    assert text == "path=\\ C:\\\\data\nname=d\\u00e4t\\u00e4\n"
