"""Logins with tokens (OAUTHBEARER), whose sessions end on the broker when the token expires."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import marq
from marq.kafka.role_permissions import ROLES
from marq_worker.broker import Certificates, EmbeddedBroker
from tests import tokens
from tests.check.checking import Check, allow, make_topics, said
from tests.client.waiting import until
from tests.worker.harness import LIMIT_SECONDS

pytestmark = [
    # aiokafka 0.14 lets go of a refused connection before its transport is closed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("diagnosis_limit_s"),
]

TOKEN_LOGIN = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
#: Long enough for a login on a busy machine.
SHORT_LIFE_S = 3.0


class Provider:
    """Gives tokens of a short life, or raises."""

    def __init__(self, user: str) -> None:
        self._user = user
        self.given = self.failed = 0
        self.failing = False

    def token(self) -> str:
        if self.failing:
            self.failed += 1
            raise RuntimeError("the identity provider is away")
        self.given += 1
        return tokens.token(self._user, SHORT_LIFE_S)


@pytest.fixture
async def options(secured: EmbeddedBroker, user: str, prefix: str, names) -> dict[str, Any]:
    """The options of clients of a user who may send and consume, without a provider."""
    await make_topics(secured.bootstrap_servers, prefix)
    for role in ("sender", "consumer"):
        await allow(secured.bootstrap_servers, user, ROLES[role](names, ()))
    return {"prefix": prefix, **TOKEN_LOGIN}


async def receive(consumer: marq.Consumer, received: list[bytes], wait: float = 0) -> None:
    messages = await consumer.receive(wait=wait, max_messages=1000)
    received += [message.value for message in messages]
    await consumer.ack(messages)


async def test_clients_go_on_when_their_sessions_end(
    secured: EmbeddedBroker, options: dict[str, Any], user: str
) -> None:
    provider, sent, received = Provider(user), 0, list[bytes]()
    clients = {**options, "sasl_token_provider": provider}
    address = secured.listener("SASL_PLAINTEXT")
    async with (
        marq.Producer(address, **clients) as producer,
        marq.Consumer("emails", address, **clients) as consumer,
        asyncio.timeout(10 * LIMIT_SECONDS),
    ):
        logins = provider.given
        while provider.given < 3 * logins:
            await producer.send("emails", b"%d" % sent)
            sent += 1
            await receive(consumer, received)
        while len(received) < sent:
            await receive(consumer, received, wait=1)

    assert sorted(received, key=int) == [b"%d" % number for number in range(sent)]


async def test_nothing_is_lost_while_the_provider_fails(
    secured: EmbeddedBroker, options: dict[str, Any], user: str, logged
) -> None:
    provider, sent, received = Provider(user), 0, list[bytes]()
    clients = {**options, "sasl_token_provider": provider}
    address = secured.listener("SASL_PLAINTEXT")
    recovered = asyncio.Event()
    async with (
        marq.Producer(address, **clients, request_timeout=600) as producer,
        marq.Consumer("emails", address, **clients) as consumer,
        asyncio.timeout(10 * LIMIT_SECONDS),
    ):

        async def send() -> None:
            nonlocal sent
            while not recovered.is_set():
                await producer.send("emails", b"%d" % sent)
                sent += 1

        provider.failing = True
        sending = asyncio.create_task(send())
        await until(lambda: provider.failed > 3, 5 * LIMIT_SECONDS)
        provider.failing = False
        recovered.set()
        await sending
        while len(received) < sent:
            await receive(consumer, received, wait=1)

    assert sorted(received, key=int) == [b"%d" % number for number in range(sent)]
    assert any("failed: RuntimeError: the identity provider is away" in line for line in logged())


async def test_tokens_and_tls(
    secured: EmbeddedBroker, certificates: Certificates, options: dict[str, Any], user: str
) -> None:
    async def provider() -> str:
        return tokens.token(user)

    tls = {"security_protocol": "SASL_SSL", "ssl_cafile": str(certificates.authority)}
    async with marq.Producer(secured.listener("SASL_SSL"), **options | tls, sasl_token_provider=provider) as producer:
        assert (await producer.send("emails", b"x")).queue == "emails"


async def test_an_expired_token_is_reported_at_once(secured: EmbeddedBroker, user: str) -> None:
    def stale() -> str:
        return tokens.token(user, -5)

    address = secured.listener("SASL_PLAINTEXT")
    async with asyncio.timeout(LIMIT_SECONDS):
        text = await said(address, **TOKEN_LOGIN, sasl_token_provider=stale, connect_timeout=3600)

    assert f"authentication failed: {address} refuses the token of {__name__}.test_an_expired" in text
    assert "invalid_token" in text
    assert "check that the token has not expired" in text


async def test_a_provider_that_fails_is_named_when_a_client_starts(secured: EmbeddedBroker, user: str) -> None:
    provider = Provider(user)
    provider.failing = True

    text = await said(
        secured.listener("SASL_PLAINTEXT"), **TOKEN_LOGIN, sasl_token_provider=provider, connect_timeout=1.5
    )

    assert f"the token provider {__name__}.Provider failed: RuntimeError: the identity provider is away" in text
    assert "MARQ_SASL_TOKEN_PROVIDER" in text


async def test_a_provider_that_hangs_is_named_when_a_client_starts(secured: EmbeddedBroker, diagnosis_limit_s) -> None:
    async def hangs() -> str:
        return await asyncio.get_running_loop().create_future()

    # A broker that stalls may take as long for its part.
    diagnosis_limit_s(12.0)
    text = await said(secured.listener("SASL_PLAINTEXT"), **TOKEN_LOGIN, sasl_token_provider=hangs, connect_timeout=1.5)

    assert "hangs gave no token within 6 s" in text


async def test_the_check_logs_in_with_a_provider_of_the_environment(
    secured: EmbeddedBroker, options: dict[str, Any], user: str, tmp_path: Path
) -> None:
    login = {f"MARQ_{name.upper()}": value for name, value in options.items()}
    check = Check(
        tmp_path,
        {
            **login,
            "MARQ_BOOTSTRAP_SERVERS": secured.listener("SASL_PLAINTEXT"),
            "MARQ_SASL_TOKEN_PROVIDER": "tests.tokens:from_environment",
            "TOKEN_USER": user,
        },
    )

    _, output = await check.command("--role", "sender")
    with pytest.raises(
        marq.ConfigError, match=r"MARQ_SASL_TOKEN_PROVIDER='tests.tokens:nothing': it can't be imported"
    ):
        await check(MARQ_SASL_TOKEN_PROVIDER="tests.tokens:nothing")

    # The broker does not tell a client who it is.
    assert "User:PRINCIPAL has all permissions that a consumer or a sender needs" in output
