"""Which settings an endpoint refuses to start with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings
from marq_worker.sqs.authentication import access_keys
from marq_worker.sqs.service import SqsEndpoint, _secret

KEYS = """
[keys.ORDERS]
secret = "at-least-16-characters"
allow = [{ queues = "*", actions = ["send"] }]
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def settings(**members: Any) -> AppSettings:
    return AppSettings(**members)


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.0.0.1", "sqs.example.org"])
def test_an_address_that_other_machines_reach_needs_keys(bind: str, keys: Path) -> None:
    with pytest.raises(ConfigError, match=f"MARQ_SQS_BIND={bind}: others can reach this address"):
        access_keys(settings(sqs_bind=bind))

    assert access_keys(settings(sqs_bind=bind, sqs_keys=keys)).keys() == {"ORDERS"}


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_an_address_of_this_machine_needs_no_keys(bind: str) -> None:
    assert access_keys(settings(sqs_bind=bind)) == {}


def test_keys_need_a_secret_that_clients_do_not_know(keys: Path) -> None:
    with pytest.raises(ConfigError, match="MARQ_SQS_SECRET is missing"):
        _secret(settings(sqs_keys=keys))

    assert _secret(settings(sqs_keys=keys, sqs_secret=SecretStr("x" * 32))) == b"x" * 32


def test_endpoints_without_keys_share_a_secret_within_their_namespace() -> None:
    assert _secret(settings()) == _secret(settings())
    assert _secret(settings()) != _secret(settings(prefix="other"))


async def test_an_endpoint_that_a_wrong_setting_kept_from_starting_can_be_stopped() -> None:
    client: Any = None
    endpoint = SqsEndpoint(settings(), client, queues=client, statistics=client, metrics=client)

    await endpoint.on_stop()


async def test_an_endpoint_whose_parts_fail_to_stop_still_writes_the_outcomes_of_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client: Any = None
    endpoint = SqsEndpoint(settings(), client, queues=client, statistics=client, metrics=client)
    stopped: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self._name = name

        async def end_polls(self) -> None:
            stopped.append("polls")

        async def stop(self) -> None:
            stopped.append(self._name)
            if self._name == "receivers":
                raise ZeroDivisionError

    parts = ("runner", "receivers", "server", "limits", "outcomes", "peers", "settler", "questions", "producer")
    for name in parts:
        setattr(endpoint, f"_{name}", Part(name))

    await endpoint.on_stop()

    # Clients get the answers of polls and changes first; outcomes pass through all other parts.
    assert stopped == ["runner", "polls", "server", "limits", "receivers", *parts[parts.index("outcomes") :]]
    assert caplog.messages == ["a part of the SQS endpoint was not stopped: ZeroDivisionError()"]
