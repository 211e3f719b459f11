"""Limits how often a process tries to reach a broker that is down.

aiokafka retries each request on its own, ten times a second: producer, fetcher, coordinator and metadata of every
client. Here all clients of a process that use the same cluster share one :class:`Pacer`, which knows the brokers that
are down. One client tries such a broker, after an exponential backoff with jitter; the others wait for the outcome. If
another broker of the cluster is up, no client waits: aiokafka then learns immediately that this broker is not ready.

The pacer also reports an outage: one line when a broker becomes unreachable, one when it returns, and a summary in
between. :mod:`marq.kafka.client_logs` demotes aiokafka's own lines about the same outage.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import aiokafka.client
from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import CloseReason, collect_hosts
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest

from marq.kafka import client_logs
from marq.kafka.broker_connections import open_connection
from marq.kafka.lenient_names import LenientConsumer
from marq.kafka.reconnect_pacer import FAILURES, Address, Pacer
from marq.wire.errors import reason_of

K = TypeVar("K")

#: The options of a connection that aiokafka's client has as attributes.
_CONNECTION_OPTIONS = (
    "client_id", "request_timeout_ms", "ssl_context", "security_protocol", "sasl_mechanism", "sasl_plain_username",
    "sasl_plain_password", "sasl_kerberos_service_name", "sasl_kerberos_domain_name", "sasl_oauth_token_provider",
)  # fmt: skip


class PacedClient(AIOKafkaClient):  # type: ignore[misc]
    """aiokafka's client, whose connections are opened by a :class:`Pacer`; made by :func:`paced`."""

    pacer: Pacer
    #: Set before its owner stops: a stop does not wait for a broker that is down.
    stopping: bool
    #: Whether requests for offsets use a separate connection. On a consumer's connection, the broker answers them only
    #: after the previous fetch, which waits for new records.
    offsets_apart: bool = False
    _opening: defaultdict[Any, asyncio.Lock]
    _sync_task: asyncio.Task[None] | None

    async def bootstrap(self) -> None:
        """Open the first connection, as aiokafka does. Raises KafkaConnectionError if no address could be used."""
        hosts = [(host, port) for host, port, _ in self.hosts]
        error: BaseException = KafkaConnectionError("no address was given")
        for address in hosts:
            others = [other for other in hosts if other != address]
            try:
                connection = await self._paced(address, partial(self._connection, *address), others)
            except FAILURES as failure:
                error = failure
                continue
            try:
                metadata = await connection.send(MetadataRequest([]))
            except FAILURES as failure:
                error = failure
                connection.close()
                continue
            self.cluster.update_metadata(metadata)
            if self.cluster.brokers():
                connection.close()
            else:
                # A cluster without topics may name no broker: aiokafka keeps this connection until one does.
                self._conns["bootstrap", ConnectionGroup.DEFAULT] = connection
            break
        else:
            raise KafkaConnectionError(f"Unable to bootstrap from {hosts}: {reason_of(error)}")
        if self._sync_task is None:
            self._sync_task = asyncio.create_task(self._md_synchronizer())

    async def _get_conn(
        self, node_id: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT, no_hint: bool = False
    ) -> Any:
        key = (node_id, group)
        existing, broker = self._conns.get(key), self.cluster.broker_metadata(node_id)
        if broker is None or (existing is not None and existing.connected()):
            return await super()._get_conn(node_id, group=group, no_hint=no_hint)
        address = (broker.host, broker.port)
        others = {(other.host, other.port) for other in self.cluster.brokers()} - {address}
        try:
            return await self._paced(address, partial(self._open, key, address), others)
        except FAILURES:
            # As aiokafka does: the broker's partitions may have other leaders now.
            self.force_metadata_update()
            return None

    async def send(self, node_id: Any, request: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT) -> Any:
        if self.offsets_apart and isinstance(request, OffsetRequest):
            # Consumers without a group do not use this connection otherwise.
            group = ConnectionGroup.COORDINATION
        return await super().send(node_id, request, group=group)

    def set_topics(self, topics: Iterable[str]) -> Any:
        """Track these topics as aiokafka does, even if its periodic refresh is in progress."""
        before = self._topics
        updated = super().set_topics(topics)
        if self._topics != before and self._md_update_fut is not None and not self._md_update_waiter.done():
            # The refresh asks for the former topics. Without a wake-up aiokafka would ask for the new ones after five
            # minutes, and force_metadata_update() would do nothing until then.
            self._md_update_waiter.set_result(None)
        return updated

    #: aiokafka's own, but its requests create no topic: a broker would use its own settings for it.
    _metadata_update = FunctionType(
        AIOKafkaClient._metadata_update.__code__,
        {**vars(aiokafka.client), "MetadataRequest": partial(MetadataRequest, allow_auto_topic_creation=False)},
    )

    async def _paced(self, address: Address, attempt: Callable[[], Awaitable[Any]], others: Iterable[Address]) -> Any:
        return await self.pacer.connect(address, attempt, others, patient=not self.stopping)

    async def _open(self, key: Any, address: Address) -> Any:
        # aiokafka has one lock for all: a broker that does not answer would hold up connections to the others.
        async with self._opening[key]:
            existing = self._conns.get(key)
            if existing is None or not existing.connected():
                existing = self._conns[key] = await self._connection(*address, on_close=self._on_connection_closed)
            return existing

    async def _connection(self, host: str, port: int, **more: Any) -> Any:
        options = {name: getattr(self, f"_{name}") for name in _CONNECTION_OPTIONS}
        return await open_connection(host, port, max_idle_ms=self._connections_max_idle_ms, **options, **more)

    def _on_connection_closed(self, conn: Any, reason: CloseReason | None) -> None:
        if reason is CloseReason.CONNECTION_BROKEN:
            self.pacer.lost((conn.host, conn.port))
        super()._on_connection_closed(conn, reason)


_pacers: dict[Any, Pacer] = {}
_pacers_lock = threading.Lock()


def pacer_of(servers: Any, security_protocol: str, login: str | None) -> Pacer:
    """Return the pacer of all clients of this process that reach a cluster in this way."""
    addresses = frozenset((host, port) for host, port, _ in collect_hosts(servers))
    with _pacers_lock:
        return _pacers.setdefault((addresses, security_protocol, login), Pacer())


def paced(kafka: K) -> K:
    """Make an aiokafka producer, consumer or admin client use the pacer of the process; call it before the start.

    A consumer of aiokafka's own class becomes a :class:`LenientConsumer`.
    """
    if type(kafka) is AIOKafkaConsumer:
        kafka.__class__ = LenientConsumer
    client: Any = client_of(kafka)
    client.__class__ = PacedClient
    tokens = client._sasl_oauth_token_provider
    login = client._sasl_plain_username if tokens is None else tokens.name
    client.pacer = pacer_of(client._bootstrap_servers, client._security_protocol, login)
    client.stopping = False
    client._opening = defaultdict(asyncio.Lock)
    client_logs.install(lambda: any(pacer.in_outage for pacer in list(_pacers.values())))
    return kafka


def hasten(kafka: Any) -> None:
    """Keep a client that is about to stop from waiting for brokers that are down."""
    client = client_of(kafka)
    if isinstance(client, PacedClient):
        client.stopping = True


def client_of(kafka: Any) -> Any:
    """Return the aiokafka client that opens the connections of a producer, consumer or admin client."""
    return getattr(kafka, "client", None) or getattr(kafka, "_client", None)
