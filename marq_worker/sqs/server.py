"""The HTTP server of the SQS endpoint: from requests to calls, and from answers to responses."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from aiohttp.web import BaseRequest, Response, Server, ServerRunner, TCPSite

from marq.wire.errors import ConfigError
from marq_worker.sqs.access_keys import Key
from marq_worker.sqs.authentication import Authentication
from marq_worker.sqs.aws_json import (
    CONTENT_TYPE,
    TRACE,
    add_trace,
    answer,
    query_refusal,
    read_call,
    refusal,
    wants_query,
)
from marq_worker.sqs.bodies import Bodies
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.operations import Operations
from marq_worker.sqs.outcomes import Outcomes, SettleRequest
from marq_worker.sqs.peers import ASK_S, PATH, SETTLE_PATH, Peers
from marq_worker.sqs.receiving import MAX_ASKED, Receivers
from marq_worker.web.connection_limits import IDLE_S, Connections
from marq_worker.web.sqs_metrics import CallMetrics

log = logging.getLogger("marq.sqs")

T = TypeVar("T")

#: Connections in all and per address; each poller has one.
MAX_CONNECTIONS, MAX_OF_ADDRESS = 10_000, 5_000
#: How long a stop waits for calls, and then for changes whose clients have disconnected or were disconnected.
STOP_S = 3.0


class SqsServer:
    """Answers HTTP requests.

    Args:
        keys: the access keys by id; empty if clients need none.
        public_url: the address that clients use, if it differs from that of their requests.
        metrics: counts the calls.
    """

    def __init__(
        self,
        operations: Operations,
        receivers: Receivers,
        outcomes: Outcomes,
        peers: Peers,
        keys: Mapping[str, Key],
        public_url: str | None,
        metrics: CallMetrics,
    ) -> None:
        self._operations = operations
        self._receivers = receivers
        self._outcomes = outcomes
        self._peers = peers
        self._authentication = Authentication(keys)
        self._public_url = public_url
        self._metrics = metrics
        self._bodies = Bodies()
        self._changes: set[asyncio.Future[Any]] = set()
        self._runner: ServerRunner | None = None

    async def start(self, bind: str, port: int) -> None:
        """Listen. Raises ConfigError if the port can't be used."""
        server = Server(
            self._handle,
            # A poll of a client that hung up must end before it takes messages.
            handler_cancellation=True,
            # Clients sign the body as they send it. A small one could also expand to any size.
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=IDLE_S,
        )
        self._runner = ServerRunner(server, shutdown_timeout=STOP_S)
        await self._runner.setup()
        Connections(room_for_connections(), MAX_OF_ADDRESS).limit(server)
        try:
            await TCPSite(self._runner, bind, port).start()
        except OSError as error:
            raise ConfigError(f"MARQ_SQS_PORT={port}: can't listen at {bind}: {error.strerror or error}") from error

    async def stop(self) -> None:
        """Answer the calls that have begun; finish changes even if their clients have disconnected."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._changes:
            await asyncio.wait(self._changes, timeout=STOP_S)

    async def _handle(self, request: BaseRequest) -> Response:
        request_id = str(uuid4())
        releases: list[Callable[[], None]] = []
        status, headers, body = await self._respond(request, request_id, releases)
        headers = {"Content-Type": CONTENT_TYPE, "x-amzn-RequestId": request_id, "Server": "marq", **headers}
        response = Response(status=status, headers=headers, body=body)
        if releases:
            try:
                await response.prepare(request)
                await response.write_eof()
            except BaseException as error:
                # The other endpoint has hung up, so no client gets these messages.
                for release in releases:
                    release()
                if not isinstance(error, ConnectionError):
                    raise
        return response

    async def _respond(
        self, request: BaseRequest, request_id: str, releases: list[Callable[[], None]]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body; append to ``releases`` what to call if the answer is lost."""
        try:
            if request.method == "GET" and request.path == "/healthz":
                return 200, {"Content-Type": "text/plain"}, b"ok"
            is_query = wants_query(request.headers.get("Content-Type"), request.query)
            if request.method != "POST" and not is_query:
                raise SqsError("UnknownOperationException", "expected POST / with the header X-Amz-Target")
            body = await self._bodies.read(request)
            if request.path in (PATH, SETTLE_PATH):
                return await self._answer_peer(request, body, releases)
            if is_query:
                return query_refusal(request_id)
            if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
                raise SqsError("SerializationException", f"the body is compressed ({encoding[:80]}); send it as it is")
            key = self._authentication.identify(request, body)
            call = read_call(request.headers.get("X-Amz-Target"), request.headers.get("Content-Type"), body)
            add_trace(call, request.headers.get(TRACE))
            answering = self._metrics.measured(
                call.operation, self._operations.answer(call, key, self._base_url(request))
            )
            if call.operation != "ReceiveMessage":
                # A change is completed even if the client hangs up.
                return 200, {}, answer(await self._completed(answering))
            return 200, {}, answer(await answering)
        except SqsError as error:
            return refusal(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a call failed with an unexpected error: request_id=%s", request_id)
            return refusal(SqsError("InternalFailure", f"unexpected error; request id {request_id}"))

    async def _answer_peer(
        self, request: BaseRequest, body: bytes, releases: list[Callable[[], None]]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Answer another endpoint."""
        # Without keys, anyone can compute the token.
        known = self._authentication.answers_host(request)
        if not (known and self._peers.authorizes(request.headers.get("Authorization"))):
            self._authentication.note_failure(request)
            return 403, {}, b"{}"
        try:
            document = json.loads(body)
            answering = self._ask(document, releases) if request.path == PATH else self._settle(document)
        except (ValueError, KeyError, TypeError):
            return 400, {}, b"{}"
        return 200, {"Content-Type": "application/json"}, json.dumps(await answering).encode()

    def _ask(self, asked: Mapping[str, Any], releases: list[Callable[[], None]]) -> Awaitable[list[Any]]:
        """Return messages for another endpoint, whose polls wait for messages that may be here."""
        asked_s = time.monotonic()
        receiver = self._receivers.known(str(asked["queue"]))
        most, wait_s = int(asked["most"]), float(asked["wait"])

        async def ask() -> list[Any]:
            if receiver is None:
                return []
            deliveries = await receiver.poll_for_peer(max(1, min(most, MAX_ASKED)), max(0.0, min(wait_s, ASK_S)))
            releases.append(partial(receiver.release, deliveries))
            return [delivery.document(asked_s) for delivery in deliveries]

        return ask()

    def _settle(self, documents: list[Any]) -> Awaitable[list[Any]]:
        """Settle messages that this endpoint delivered, for clients of another one; return which were held here."""
        settled = [self._outcomes.settle_here(SettleRequest.read(document)) for document in documents]
        # All of them, even if the other endpoint hangs up.
        return self._completed(asyncio.gather(*settled))

    def _completed(self, change: Awaitable[T]) -> asyncio.Future[T]:
        """Return the result of a change. The change continues if the call is cancelled, and a stop waits for it."""
        changing = asyncio.ensure_future(change)
        self._changes.add(changing)
        changing.add_done_callback(self._changed)
        return asyncio.shield(changing)

    def _changed(self, change: asyncio.Future[Any]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            # Keep asyncio from logging the error of a call whose client has disconnected.
            change.exception()

    def _base_url(self, request: BaseRequest) -> str:
        return self._public_url or f"{request.scheme}://{request.host}"


def room_for_connections() -> int:
    """Return how many connections may be open; raise this process's limit of open files for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    raised = soft + MAX_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        raised = min(raised, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    # The Kafka clients and tables need the rest; otherwise SQS clients could stop the whole worker.
    return min(MAX_CONNECTIONS, max(raised - soft, raised // 2))
