"""Finds out why a broker can't be used, by repeating the steps of a connection one at a time.

aiokafka only says that it was "unable to bootstrap". Each step here has its own diagnosis.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import Any

from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.metadata import MetadataRequest

from marq.client.threads import in_thread
from marq.kafka.broker_connections import open_connection
from marq.kafka.paced_clients import pacer_of
from marq.kafka.token_logins import NoToken, TokenSource, tokens_of
from marq.settings.client import ClientSettings
from marq.wire.errors import reason_of

#: ApiVersions, version 0, which brokers answer before any login: size, key, version, correlation id, no client id.
_ASK_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)
#: Maximum size of the answer to it.
_MAX_ANSWER_BYTES = 1 << 20
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
#: The first bytes of an HTTP server's answer.
_HTTP = (b"HTTP/", b"<!DOC", b"<html")
_CERTIFICATE_WANTED = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")
#: Errors of a broker that is down or cut off, if it was up before.
_DOWN = (ConnectionError, TimeoutError, KafkaConnectionError)
_ADDRESS = "(MARQ_BOOTSTRAP_SERVERS or bootstrap_servers)"

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False, slots=True)
class Obstacle(Exception):
    """The step that failed, and what to do about it; ``lasting`` if waiting can't help.

    ``steps`` is the number of steps that succeeded; of several addresses, the one that got furthest is the most
    informative.
    """

    what: str
    advice: str
    lasting: bool = False
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


async def find_obstacle(settings: ClientSettings, limit_s: float) -> Obstacle | None:
    """Return what keeps a client with these settings from using the cluster; None if nothing does."""
    addresses = [_split(server) for server in settings.bootstrap_servers.split(",")]
    obstacles = await asyncio.gather(*(_Path(settings, *address, limit_s).obstacle() for address in addresses))
    blocking = [obstacle for obstacle in obstacles if obstacle is not None]
    return max(blocking, key=lambda obstacle: obstacle.steps) if len(blocking) == len(obstacles) else None


class _Path:
    """The way to one address. A step raises the :class:`Obstacle` that it meets."""

    def __init__(self, settings: ClientSettings, host: str, port: int, limit_s: float) -> None:
        self._settings = settings
        self._host, self._port = host, port
        self._address = f"{host}:{port}"
        self._limit_s = limit_s
        self._pacer = pacer_of(settings.bootstrap_servers, settings.security_protocol, settings.login)
        self._tls = settings.ssl_context if "SSL" in settings.security_protocol.split("_") else None

    async def obstacle(self) -> Obstacle | None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._look_up()
                await self._knock()
                await self._greet(await self._connect())
                if (tokens := tokens_of(self._settings)) is not None:
                    await self._ask_for_token(tokens)
                await self._use()
        except Obstacle as obstacle:
            return obstacle
        except TimeoutError:
            return Obstacle(
                f"the server at {self._address} accepts connections but does not answer within {self._limit_s:g} s",
                "the broker hangs, is still starting, or is not Kafka; see its log",
                steps=3,
            )
        return None

    async def _look_up(self) -> None:
        try:
            await in_thread(lambda: socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        except (socket.gaierror, UnicodeError):
            raise Obstacle(
                f"the name {self._host!r} cannot be resolved on this machine (DNS)",
                f"correct the address {self._address} {_ADDRESS}",
            ) from None

    async def _knock(self) -> None:
        address = self._host, self._port
        # If this process has just seen that the broker is down, another attempt would only count against the limit.
        known = self._pacer.fresh_error(address, self._limit_s)
        if isinstance(known, ConnectionRefusedError):
            raise self._not_listening(known)
        # Without a token, the broker was not asked.
        if isinstance(known, _DOWN) and not isinstance(known, NoToken) and self._pacer.has_answered(address):
            what = f"{self._address} answered before, but not now ({reason_of(known)})"
            raise Obstacle(what, "see the broker's log", steps=1)
        try:
            async with asyncio.timeout(self._limit_s / 2):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except TimeoutError:
            raise Obstacle(
                f"{self._address} did not accept a connection within {self._limit_s / 2:g} s",
                f"the machine is down, a firewall blocks it, or the address {_ADDRESS} is wrong",
                steps=1,
            ) from None
        except OSError as error:
            raise self._not_listening(error) from None
        writer.close()

    async def _connect(self) -> _Streams:
        if self._tls is None:
            return await asyncio.open_connection(self._host, self._port)
        try:
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except ssl.SSLCertVerificationError as error:
            raise self._untrusted(error) from None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and any(part in (error.reason or "") for part in _CERTIFICATE_WANTED):
                raise self._certificate_refused(error) from None
            raise await self._no_tls() from None

    async def _greet(self, streams: _Streams) -> None:
        try:
            head = await self._ask(*streams)
        except ssl.SSLError as error:
            # TLS 1.3: a server that rejects our certificate says so with its first bytes.
            raise self._certificate_refused(error) from None
        if _is_answer(head):
            return
        if self._tls is None and (head[:2] in _TLS_RECORDS or (not head and await self._speaks_tls())):
            raise self._tls_wanted()
        raise self._no_kafka(head)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Ask for versions and return the first bytes of the answer, perhaps none."""
        head = b""
        try:
            writer.write(_ASK_VERSIONS)
            async with asyncio.timeout(self._limit_s / 2):
                while len(head) < 8 and (more := await reader.read(8 - len(head))):
                    head += more
        except TimeoutError:
            if not head:
                raise
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                raise
        finally:
            writer.close()
        return head

    async def _speaks_tls(self) -> bool:
        """Return whether a TLS server listens there, with any certificate."""
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        try:
            _, writer = await asyncio.open_connection(self._host, self._port, ssl=trusting)
        except OSError:
            return False
        writer.close()
        return True

    async def _ask_for_token(self, tokens: TokenSource) -> None:
        limit_s = self._limit_s / 2
        try:
            async with asyncio.timeout(limit_s):
                await tokens.token()
        except (NoToken, TimeoutError) as error:
            what = str(error) or f"the token provider {tokens.name} gave no token within {limit_s:g} s"
            raise Obstacle(what, "repair it, or name another one (MARQ_SASL_TOKEN_PROVIDER)", steps=4) from None

    async def _use(self) -> None:
        """Log in as aiokafka does, and send a request that needs the login."""
        try:
            connection = await self._open(self._settings.security_protocol)
        except UnsupportedSaslMechanismError:
            raise self._login_not_offered(await self._offered()) from None
        except (IllegalSaslStateError, SaslAuthenticationFailed) as error:
            raise self._login_refused(error) from None
        except (KafkaError, OSError) as error:
            raise self._cut_off(error) from None
        try:
            metadata = await connection.send(MetadataRequest([]))
        except (KafkaError, OSError) as error:
            raise self._cut_off(error) from None
        finally:
            await _close(connection)
        await self._go_on([(host, port) for _, host, port, *_ in metadata.brokers])

    async def _go_on(self, advertised: list[tuple[str, int]]) -> None:
        """Try the addresses that the cluster advertises: clients use only these from then on."""
        others = [address for address in advertised if address != (self._host, self._port)]
        if len(others) < len(advertised) or not others:
            return
        errors = await asyncio.gather(*(_try(*address, self._limit_s / 2) for address in others))
        if all(errors):
            raise Obstacle(
                f"{self._address} answers, but directs clients to"
                f" {', '.join(f'{host}:{port}' for host, port in others)}, which cannot be reached from here"
                f" ({errors[0]})",
                "set advertised.listeners of the broker to an address that its clients can reach",
                steps=6,
            )

    async def _offered(self) -> list[str]:
        """Return the login mechanisms that the broker offers; it answers this before a login."""
        connection = await self._open("SSL" if self._tls else "PLAINTEXT")
        try:
            answer = await connection.send(SaslHandShakeRequest(self._settings.sasl_mechanism))
        finally:
            await _close(connection)
        return sorted(answer.enabled_mechanisms)

    async def _open(self, protocol: str) -> Any:
        settings = self._settings
        return await open_connection(
            self._host,
            self._port,
            client_id=settings.client_id,
            request_timeout_ms=int(self._limit_s * 1000),
            ssl_context=settings.ssl_context,
            security_protocol=protocol,
            sasl_mechanism=settings.sasl_mechanism,
            sasl_plain_username=settings.sasl_username,
            sasl_plain_password=settings.sasl_password,
            sasl_oauth_token_provider=tokens_of(settings),
        )

    # --- obstacles ----------------------------------------------------------------------------------------------------

    def _not_listening(self, error: OSError) -> Obstacle:
        return Obstacle(
            f"nothing listens at {self._address} ({_reason(error)})",
            f"start the broker there (`marq broker` starts one for development), or correct the address {_ADDRESS}",
            steps=1,
        )

    async def _no_tls(self) -> Obstacle:
        head = await self._ask(*await asyncio.open_connection(self._host, self._port))
        if head and not _is_answer(head):
            return self._no_kafka(head)
        protocol = self._settings.security_protocol
        return Obstacle(
            f"{self._address} does not use TLS, but MARQ_SECURITY_PROTOCOL is {protocol}",
            f"set MARQ_SECURITY_PROTOCOL={protocol.replace('SSL', 'PLAINTEXT')}, or use the address of a listener"
            " with TLS",
            lasting=True,
            steps=2,
        )

    def _tls_wanted(self) -> Obstacle:
        protocol = self._settings.security_protocol
        wanted = "SASL_SSL" if "SASL" in protocol else "SSL (with a login: SASL_SSL)"
        return Obstacle(
            f"{self._address} requires TLS, but MARQ_SECURITY_PROTOCOL is {protocol}",
            f"set MARQ_SECURITY_PROTOCOL={wanted}, and MARQ_SSL_CAFILE if its certificate is signed by an authority of"
            " your own",
            lasting=True,
            steps=2,
        )

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> Obstacle:
        if "mismatch" in error.verify_message.lower():
            advice = f"use a name that the certificate has as address {_ADDRESS}"
        elif "expired" in error.verify_message.lower():
            advice = "renew the broker's certificate"
        else:
            advice = "set MARQ_SSL_CAFILE to the PEM file of the authority that signed it"
        return Obstacle(
            f"the certificate of {self._address} is not trusted ({error.verify_message})", advice, lasting=True, steps=2
        )

    def _certificate_refused(self, error: ssl.SSLError) -> Obstacle:
        return Obstacle(
            f"{self._address} rejects this client's certificate, or requires one ({error.reason})",
            "set MARQ_SSL_CERTFILE, and MARQ_SSL_KEYFILE if the key is in another file, to a certificate that the"
            " broker trusts",
            lasting=True,
            steps=3,
        )

    def _no_kafka(self, head: bytes) -> Obstacle:
        what = "an HTTP server" if head.startswith(_HTTP) else "something other than Kafka"
        if not head:
            what = "something that closes the connection as soon as it receives a Kafka request"
        return Obstacle(
            f"the server at {self._address} is {what}",
            f"correct the address {_ADDRESS}: Kafka's port is 9092 by default",
            # A broker that is about to stop also ends the connection, and so does a proxy whose broker is down.
            lasting=bool(head),
            steps=3,
        )

    def _login_not_offered(self, offered: list[str]) -> Obstacle:
        return Obstacle(
            f"{self._address} does not offer {self._settings.sasl_mechanism} logins, only {', '.join(offered)}",
            "set MARQ_SASL_MECHANISM to one of these",
            lasting=True,
            steps=5,
        )

    def _login_refused(self, error: KafkaError) -> Obstacle:
        settings = self._settings
        if isinstance(error, IllegalSaslStateError):
            what = f"{self._address} takes no login (SASL), and MARQ_SECURITY_PROTOCOL is {settings.security_protocol}"
            without = "SSL" if self._tls else "PLAINTEXT"
            advice = f"set MARQ_SECURITY_PROTOCOL={without}, or use the address of a listener with SASL"
        elif settings.sasl_token_provider is not None:
            what = (
                f"authentication failed: {self._address} refuses the token of {settings.sasl_token_provider.name}"
                f" ({reason_of(error)})"
            )
            advice = "check that the token has not expired, and that the broker trusts its issuer, audience and scope"
        else:
            what = (
                f"authentication failed: {self._address} refuses the login of {settings.sasl_username!r} by"
                f" {settings.sasl_mechanism}"
            )
            advice = "check MARQ_SASL_USERNAME, MARQ_SASL_PASSWORD and MARQ_SASL_MECHANISM"
        return Obstacle(what, advice, lasting=True, steps=5)

    def _cut_off(self, error: Exception) -> Obstacle:
        if "SASL" in self._settings.security_protocol:
            return Obstacle(
                f"{self._address} closed the connection during login ({reason_of(error)})",
                "see the broker's log",
                steps=4,
            )
        return Obstacle(
            f"{self._address} is a Kafka listener that closes connections without a login",
            f"set MARQ_SECURITY_PROTOCOL=SASL_{'SSL' if self._tls else 'PLAINTEXT'}, MARQ_SASL_MECHANISM,"
            " MARQ_SASL_USERNAME and MARQ_SASL_PASSWORD",
            lasting=True,
            steps=4,
        )


def _is_answer(head: bytes) -> bool:
    if len(head) < 8:
        return False
    size, correlation_id = struct.unpack(">ii", head)
    return bool(correlation_id == 1 and 0 < size < _MAX_ANSWER_BYTES)


def _split(server: str) -> tuple[str, int]:
    host, _, port = server.strip().rpartition(":")
    return host.strip("[]"), int(port)


async def _try(host: str, port: int, limit_s: float) -> str:
    """Return why an address can't be reached, "" if it can."""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return _reason(error)
    writer.close()
    return ""


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


async def _close(connection: Any) -> None:
    closing = connection.close()
    if closing is not None:
        await closing
