"""Errors of a client's start when it cannot use the cluster: each names the cause and says what to do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import marq
from marq.kafka.role_permissions import ROLES, Tools
from marq.kafka.topics import commands_to_make, ensure_topics, look_up, planned
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from marq_worker.broker import Certificates, EmbeddedBroker
from tests.brokers import UNFENCED
from tests.check.checking import LIMIT_S, allow, said
from tests.check.conftest import PASSWORD
from tests.embedded import kafka_tools
from tests.worker.harness import LIMIT_SECONDS, admin

pytestmark = [
    # aiokafka 0.14 lets go of a refused connection before its transport is closed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("diagnosis_limit_s"),
]

#: For starts that only end with their limit.
SHORT_LIMIT_S = 1.5


@pytest.mark.parametrize(
    ("address", "reason", "advice"),
    [
        (
            "127.0.0.1:1",
            "nothing listens at 127.0.0.1:1 (Connection refused): start the broker there",
            "MARQ_BOOTSTRAP_SERVERS",
        ),
        ("no-such-host.invalid:9092", "the name 'no-such-host.invalid' cannot be resolved", "correct the address"),
    ],
)
async def test_an_address_without_a_server(address: str, reason: str, advice: str) -> None:
    text = await said(address, connect_timeout=SHORT_LIMIT_S)

    assert reason in text
    assert advice in text


async def test_something_else_listens(http_server: str, certificates: Certificates) -> None:
    text = await said(http_server, connect_timeout=SHORT_LIMIT_S)
    tls = {"security_protocol": "SSL", "ssl_cafile": str(certificates.authority)}
    with_tls = await said(http_server, **tls, connect_timeout=SHORT_LIMIT_S)

    assert f"the server at {http_server} is an HTTP server: correct the address" in text
    assert f"the server at {http_server} is an HTTP server" in with_tls


async def test_something_listens_and_never_answers(diagnosis_limit_s: Callable[[float], None]) -> None:
    diagnosis_limit_s(0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        assert "accepts connections but does not answer" in await said(address, connect_timeout=SHORT_LIMIT_S)


async def test_of_several_addresses_the_one_that_came_furthest_is_named(secured: EmbeddedBroker) -> None:
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "nobody", "sasl_password": "wrong"}

    text = await said(f"127.0.0.1:1,{secured.listener('SASL_PLAINTEXT')}", **login)

    assert f"{secured.listener('SASL_PLAINTEXT')} refuses the login" in text


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
async def test_a_wrong_password_ends_the_start_at_once(secured: EmbeddedBroker, user: str, mechanism: str) -> None:
    address = secured.listener("SASL_PLAINTEXT")
    login = {"sasl_mechanism": mechanism, "sasl_username": user, "sasl_password": "wrong"}

    async with asyncio.timeout(LIMIT_SECONDS):
        text = await said(address, security_protocol="SASL_PLAINTEXT", **login, connect_timeout=3600)

    assert f"authentication failed: {address} refuses the login of '{user}' by {mechanism}: check" in text
    assert "MARQ_SASL_PASSWORD" in text


@pytest.mark.parametrize(
    ("listener", "protocol", "found", "advised"),
    [
        ("SSL", "PLAINTEXT", "requires TLS", "set MARQ_SECURITY_PROTOCOL=SSL"),
        ("SASL_SSL", "SASL_PLAINTEXT", "requires TLS", "set MARQ_SECURITY_PROTOCOL=SASL_SSL"),
        ("PLAINTEXT", "SSL", "does not use TLS", "set MARQ_SECURITY_PROTOCOL=PLAINTEXT"),
        ("SASL_PLAINTEXT", "SASL_SSL", "does not use TLS", "set MARQ_SECURITY_PROTOCOL=SASL_PLAINTEXT"),
        ("SASL_PLAINTEXT", "PLAINTEXT", "connections without a login", "set MARQ_SECURITY_PROTOCOL=SASL_PLAINTEXT"),
        ("SASL_SSL", "SSL", "connections without a login", "set MARQ_SECURITY_PROTOCOL=SASL_SSL"),
        ("PLAINTEXT", "SASL_PLAINTEXT", "takes no login", "set MARQ_SECURITY_PROTOCOL=PLAINTEXT"),
        ("SSL", "SASL_SSL", "takes no login", "set MARQ_SECURITY_PROTOCOL=SSL"),
    ],
)
async def test_the_wrong_protocol_for_a_listener(
    secured: EmbeddedBroker,
    certificates: Certificates,
    user: str,
    listener: str,
    protocol: str,
    found: str,
    advised: str,
) -> None:
    address = secured.bootstrap_servers if listener == "PLAINTEXT" else secured.listener(listener)
    authority = {"ssl_cafile": str(certificates.authority)} if "SSL" in protocol else {}
    login = {"sasl_username": user, "sasl_password": PASSWORD}

    text = await said(address, security_protocol=protocol, **authority, **login)

    assert address in text
    assert found in text
    assert advised in text


async def test_a_certificate_that_is_not_trusted(secured: EmbeddedBroker) -> None:
    text = await said(secured.listener("SSL"), security_protocol="SSL")

    assert f"the certificate of {secured.listener('SSL')} is not trusted" in text
    assert "set MARQ_SSL_CAFILE" in text


@contextmanager
def tls_server(certificates: Certificates, host: str, *, wants_certificate: bool = False) -> Iterator[str]:
    """A server that agrees on TLS and then ends the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    if wants_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates.authority)

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with (
                context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as secured,
                suppress(OSError),
            ):
                secured.settimeout(LIMIT_S)
                with suppress(ssl.SSLError):
                    secured.do_handshake()
                # All that the client sends is read before the end: else a reset may overtake what was said to it.
                socket.socket.shutdown(secured, socket.SHUT_WR)
                while socket.socket.recv(secured, 4_096):
                    pass

    with socket.create_server((host, 0)) as server:
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        yield f"{host}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_a_certificate_for_another_name(certificates: Certificates) -> None:
    # The certificate is for localhost and 127.0.0.1.
    with tls_server(certificates, "127.0.0.2") as address:
        text = await said(address, security_protocol="SSL", ssl_cafile=str(certificates.authority))

    assert "mismatch" in text
    assert "use a name that the certificate has" in text


async def test_a_client_without_the_certificate_that_is_wanted(certificates: Certificates) -> None:
    with tls_server(certificates, "127.0.0.1", wants_certificate=True) as address:
        text = await said(address, security_protocol="SSL", ssl_cafile=str(certificates.authority))

    assert f"{address} rejects this client's certificate, or requires one" in text
    assert "set MARQ_SSL_CERTFILE" in text


async def test_a_login_that_is_not_offered(secured: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    # All that marq knows are offered by this broker; aiokafka knows one more.
    monkeypatch.setattr("marq.settings.client.SASL_MECHANISMS", ("GSSAPI",))
    monkeypatch.setattr("aiokafka.conn.gssapi", object())
    login = {"sasl_mechanism": "GSSAPI", "sasl_username": "user", "sasl_password": PASSWORD}

    text = await said(secured.listener("SASL_PLAINTEXT"), security_protocol="SASL_PLAINTEXT", **login)

    assert "does not offer GSSAPI logins, only OAUTHBEARER, PLAIN, SCRAM-SHA-256, SCRAM-SHA-512" in text


# --- permissions ------------------------------------------------------------------------------------------------------


class Access:
    """One user of the broker with ACLs."""

    def __init__(self, broker: EmbeddedBroker, user: str, prefix: str) -> None:
        self._administrator = broker.bootstrap_servers
        self._address = broker.listener("SASL_PLAINTEXT")
        self.user = f"User:{user}"
        self.names = Names(prefix)
        self.options = {
            "prefix": prefix,
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": user,
            "sasl_password": PASSWORD,
            "request_timeout": 30,
        }
        self.settings = ClientSettings.read(self._address, self.options, environment={})

    def producer(self) -> marq.Producer:
        return marq.Producer(self._address, **self.options)  # type: ignore[arg-type]

    def consumer(self, queue: str, **options: Any) -> marq.Consumer:
        return marq.Consumer(queue, self._address, **options, **self.options)  # type: ignore[arg-type]

    async def make_topics(self) -> None:
        await self.run(commands_to_make(self.settings, planned(self.settings, {}).values()))

    async def allow(self, role: str, *, but: tuple[str, str] = ("", "")) -> None:
        """Grant a role's permissions except one (name, operation)."""
        permissions = [
            permission for permission in ROLES[role](self.names, ()) if (permission.name, permission.operation) != but
        ]
        await allow(self._administrator, self.user.removeprefix("User:"), permissions)

    async def run(self, commands: list[str]) -> None:
        for command in commands:
            await kafka_tools.run(command, self._administrator)

    async def run_advice(self, error: BaseException) -> None:
        """Run the commands that an error names."""
        lines = [line.strip() for line in str(error).splitlines() if line.startswith("    kafka-")]
        assert lines, f"no command in: {error}"
        await self.run(lines)


@pytest.fixture
def access(secured: EmbeddedBroker, user: str, prefix: str) -> Access:
    return Access(secured, user, prefix)


async def test_topics_that_may_not_be_made_come_with_the_commands_that_make_them(access: Access) -> None:
    await access.run([Tools("x").allow(access.user, ["Describe"], ["--topic", access.names.prefix], prefixed=True)])

    with pytest.raises(marq.ConfigError, match=r"topics are missing .* may not make them") as caught:
        await access.producer().start()

    await access.run_advice(caught.value)
    await access.allow("sender")
    async with access.producer() as producer:
        await producer.send("emails", b"value")


async def send(access: Access) -> None:
    async with access.producer() as producer:
        await producer.send("emails", b"value")


async def receive(access: Access) -> None:
    async with access.consumer("emails") as consumer:
        assert await consumer.receive(wait=LIMIT_SECONDS)


async def receive_in_transactions(access: Access) -> None:
    async with access.consumer("emails", transactional=True) as consumer:
        assert await consumer.receive(wait=LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("role", "use", "operation", "kind", "name"),
    [
        ("sender", send, "DescribeConfigs", "topic", "dead_letters"),
        ("sender", send, "Write", "topic", "messages"),
        ("consumer", receive, "Read", "topic", "messages"),
        ("consumer", receive, "Write", "topic", "markers"),
        ("consumer", receive, "Read", "group", "group"),
        ("transactional-consumer", receive_in_transactions, "Write", "transactional-id", "start_ids"),
    ],
)
async def test_a_missing_permission_comes_with_the_command_that_grants_it(
    secured: EmbeddedBroker,
    access: Access,
    role: str,
    use: Callable[[Access], Awaitable[None]],
    operation: str,
    kind: str,
    name: str,
) -> None:
    resource = access.names.group("emails") if kind == "group" else getattr(access.names, name)
    async with marq.Producer(secured.bootstrap_servers, prefix=access.names.prefix) as administrator:
        await administrator.send("emails", b"value")
    await access.allow(role, but=(access.names.group("") if kind == "group" else resource, operation))

    with pytest.raises(marq.ConfigError) as caught:
        await use(access)

    assert f"{access.user} lacks permission for {operation} on {kind} {resource}" in str(caught.value)
    await access.run_advice(caught.value)
    await use(access)


async def test_a_permission_that_is_missing_for_a_send_is_named_there(secured: EmbeddedBroker, access: Access) -> None:
    async with marq.Producer(secured.bootstrap_servers, prefix=access.names.prefix):
        await access.allow("sender", but=(access.names.messages, "Write"))
    # The right to write to any topic suffices for a producer.
    await access.run([Tools("x").allow(access.user, ["Write"], ["--topic", access.names.markers], prefixed=False)])

    with pytest.raises(
        marq.ConfigError, match=f"lacks permission for Write on topic {access.names.messages}"
    ) as caught:
        await send(access)

    await access.run_advice(caught.value)
    await send(access)


async def test_looking_for_topics_does_not_make_them() -> None:
    # Kafka's default: a request for a topic's metadata creates it, with the broker's settings instead of ours.
    with EmbeddedBroker(properties={**UNFENCED, "auto.create.topics.enable": "true"}) as broker:
        settings = ClientSettings.read(broker.bootstrap_servers, environment={})

        await ensure_topics(settings, changelog=True)

        async with admin(broker.bootstrap_servers) as client:
            found = (await look_up(client, [settings.names.markers, "absent"])).found
            assert "absent" not in await client.list_topics()
        assert found[settings.names.markers].config["message.timestamp.type"] == "LogAppendTime"
