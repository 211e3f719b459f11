"""Raw requests to the server of the endpoint: what other clients and attackers send."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession
from aiohttp.web import BaseRequest, Response
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from marq.client.message_token import Token
from marq.wire.markers import Source
from marq_worker.broker.ports import free_port
from marq_worker.sqs import server as server_module
from marq_worker.sqs.access_keys import Grant, Key
from marq_worker.sqs.authentication import FAILURES
from marq_worker.sqs.aws_json import Call
from marq_worker.sqs.bodies import MAX_BODY_BYTES, Bodies
from marq_worker.sqs.deliveries import SqsDelivery
from marq_worker.sqs.peers import PATH, SETTLE_PATH, Peers
from marq_worker.sqs.receiving import Receivers
from marq_worker.sqs.server import SqsServer, room_for_connections
from marq_worker.web.sqs_metrics import CallMetrics
from tests.unit.client.fakes import spin

LIMIT_S = 30.0
SECRET = "s" * 20
#: The token with which other endpoints authenticate.
PEER = "Bearer token"
HEADERS = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": "AmazonSQS.ListQueues"}


class Operations:
    """Answers each call with its own parameters."""

    async def answer(self, call: Call, key: Key | None, base_url: str) -> dict[str, Any]:
        return {"operation": call.operation, **call.parameters}


class OtherEndpoints:
    def authorizes(self, header: str | None) -> bool:
        return header == PEER


class Endpoint:
    """A server, and connections to it."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        operations: Any = Operations()
        peers: Any = OtherEndpoints()
        unused: Any = None
        self.server = SqsServer(
            operations=operations, receivers=Receivers(unused), outcomes=unused, peers=peers, keys=keys,
            public_url=None, metrics=CallMetrics(),
        )  # fmt: skip
        self.port = free_port("127.0.0.1")

    async def start(self) -> None:
        await self.server.start("127.0.0.1", self.port)

    async def exchange(self, *parts: bytes, until: bytes) -> bytes:
        """Send bytes, and return the answer up to a mark."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(LIMIT_S):
                return await reader.readuntil(until)
        finally:
            writer.close()

    def request(self, body: bytes = b"{}", path: str = "/", **headers: str | None) -> bytes:
        """Return a request; a header of None is left out, and ``_`` in a name stands for ``-``."""
        values: dict[str, str | None] = {"Host": "localhost", "Content-Length": str(len(body)), **HEADERS}
        values.update({name.replace("_", "-"): value for name, value in headers.items()})
        lines = [f"{name}: {value}" for name, value in values.items() if value is not None]
        return "\r\n".join((f"POST {path} HTTP/1.1", *lines, "", "")).encode() + body


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint({})
    await endpoint.start()
    yield endpoint
    await endpoint.server.stop()


@pytest.fixture
async def with_keys() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint({"KEY": Key("KEY", SECRET, [Grant(queues="*", actions=["send"])])})
    await endpoint.start()
    yield endpoint
    await endpoint.server.stop()


async def test_a_client_that_asks_first_is_told_to_send_the_body(endpoint: Endpoint) -> None:
    head, _, body = endpoint.request(b'{"MaxResults": 1}', Expect="100-continue").partition(b"\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    async with asyncio.timeout(LIMIT_S):
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b'{"operation":"ListQueues","MaxResults":1}' in await reader.readuntil(b"}")
    writer.close()


@pytest.mark.parametrize("expect", [None, "100-continue"])
async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(
    endpoint: Endpoint, expect: str | None
) -> None:
    request = endpoint.request(b"", Content_Length=str(MAX_BODY_BYTES + 1), Expect=expect)

    answer = await endpoint.exchange(request, until=b"}")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"InvalidParameterValue" in answer


async def test_a_body_of_unknown_size_is_refused_when_it_becomes_too_large(endpoint: Endpoint) -> None:
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    request = endpoint.request(b"", Content_Length=None, Transfer_Encoding="chunked")

    answer = await endpoint.exchange(request, *[chunk] * 9, until=b"}")

    assert b"InvalidParameterValue" in answer


async def test_a_body_that_does_not_come_ends_the_request(endpoint: Endpoint) -> None:
    endpoint.server._bodies = Bodies(limit_s=0.05)

    answer = await endpoint.exchange(endpoint.request(b"{", Content_Length="2"), until=b"}")

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"RequestTimeout" in answer


async def test_all_bodies_together_have_a_limit(endpoint: Endpoint) -> None:
    endpoint.server._bodies = Bodies(all_bytes=10)

    refused = await endpoint.exchange(endpoint.request(b'{"MaxResults":', Content_Length="17"), until=b"}")
    # What the refused one had sent does not count any more.
    answered = await endpoint.exchange(endpoint.request(b"{}"), until=b"}")

    assert refused.startswith(b"HTTP/1.1 503 ")
    assert answered.startswith(b"HTTP/1.1 200 ")


async def test_compressed_bodies_are_not_expanded(endpoint: Endpoint) -> None:
    body = gzip.compress(b'{"MaxResults": 1}')

    answer = await endpoint.exchange(endpoint.request(body, Content_Encoding="gzip"), until=b"}")

    assert b"SerializationException" in answer
    assert b"the body is compressed (gzip)" in answer


@pytest.mark.parametrize("method", [b"GET", b"POST"])
async def test_a_call_of_the_query_protocol_in_the_url_is_refused_in_xml(endpoint: Endpoint, method: bytes) -> None:
    request = endpoint.request(b"", "/?Action=ListQueues&Version=2012-11-05", Content_Type=None, X_Amz_Target=None)

    answer = await endpoint.exchange(request.replace(b"POST", method, 1), until=b"</ErrorResponse>")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Type: text/xml" in answer
    assert b"<Code>AWS.SimpleQueueService.UnsupportedOperation</Code>" in answer


async def test_a_get_without_a_call_is_refused_in_json(endpoint: Endpoint) -> None:
    answer = await endpoint.exchange(endpoint.request(b"").replace(b"POST", b"GET", 1), until=b"}")

    assert b"com.amazonaws.sqs#UnknownOperationException" in answer


async def test_the_messages_of_a_call_get_the_trace_in_its_header(endpoint: Endpoint) -> None:
    target, trace = "AmazonSQS.SendMessage", "Root=1-5759e988-bd862e3fe1be46a994272793"
    body = b'{"QueueUrl":"emails","MessageBody":"x"}'

    answer = await endpoint.exchange(endpoint.request(body, X_Amz_Target=target, X_Amzn_Trace_Id=trace), until=b"}")

    assert json.loads(answer.partition(b"\r\n\r\n")[2])["X-Amzn-Trace-Id"] == trace


async def test_pipelined_requests_are_answered_in_their_order(endpoint: Endpoint) -> None:
    requests = [endpoint.request(json.dumps({"MaxResults": number}).encode()) for number in range(20)]

    answers = await endpoint.exchange(*requests, until=b'"MaxResults":19}')

    order = [answers.index(b'"MaxResults":%d}' % number) for number in range(20)]
    assert order == sorted(order)


@pytest.mark.parametrize("host", ["[::1", "evil.example", "", "127.0.0.1.evil.example"])
async def test_without_keys_other_hosts_are_refused(endpoint: Endpoint, host: str) -> None:
    answer = await endpoint.exchange(endpoint.request(Host=host), until=b"}")

    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(("path", "body"), [(PATH, b'{"queue": "q", "most": 1, "wait": 0}'), (SETTLE_PATH, b"[]")])
async def test_other_endpoints_are_answered_at_other_hosts_only_with_keys(
    endpoint: Endpoint, with_keys: Endpoint, path: str, body: bytes
) -> None:
    async def ask(asked: Endpoint, host: str, token: str | None = PEER) -> bytes:
        request = asked.request(body, path, Host=host, Authorization=token, Connection="close")
        return (await asked.exchange(request, until=b"\r\n"))[9:12]

    assert [await ask(endpoint, host) for host in ("127.0.0.1", "localhost")] == [b"200", b"200"]
    assert await ask(endpoint, "evil.example") == b"403"
    assert await ask(endpoint, "127.0.0.1", None) == b"403"
    assert [await ask(with_keys, "other-machine", token) for token in (PEER, None)] == [b"200", b"403"]


class TwoMessages:
    """A receiver with two messages."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def known(self, queue: str) -> TwoMessages:
        return self

    async def poll_for_peer(self, most: int, wait_s: float) -> list[SqsDelivery]:
        token = Token("q", 1, Source("marq.messages", 0), 0)
        return [SqsDelivery(token, str(number), 1, 1, b"x", {}) for number in range(2)]

    def release(self, deliveries: Sequence[SqsDelivery]) -> None:
        self.released += [delivery.id for delivery in deliveries]


async def ask(endpoint: Endpoint, receiver: TwoMessages) -> list[str]:
    """Ask for messages as another endpoint does."""
    endpoint.server._receivers = receiver  # type: ignore[assignment]
    url, asked = f"http://127.0.0.1:{endpoint.port}{PATH}", {"queue": "q", "most": 2, "wait": 0}
    headers = {"Authorization": PEER}
    async with ClientSession(headers=headers) as session, session.post(url, json=asked) as response:
        return [document["id"] for document in await response.json()]


async def test_another_endpoint_gets_messages_that_are_not_released(endpoint: Endpoint) -> None:
    receiver = TwoMessages()

    assert await ask(endpoint, receiver) == ["0", "1"]
    assert receiver.released == []


async def test_messages_are_released_if_the_other_endpoint_has_hung_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(response: Response, request: BaseRequest) -> None:
        raise ConnectionResetError

    receiver = TwoMessages()
    monkeypatch.setattr(server_module.Response, "prepare", fail)

    with pytest.raises(ClientError):
        await ask(endpoint, receiver)

    assert receiver.released == ["0", "1"]
    assert caplog.messages == []


async def test_a_token_that_is_not_utf_8_is_refused_like_any_other(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    groups: Any = None
    endpoint.server._peers = Peers("http://here:1", b"secret", str, groups)
    request = endpoint.request(b"[]", SETTLE_PATH, Authorization="TOKEN").replace(b"TOKEN", b"Bearer \xff")

    answer = await endpoint.exchange(request, until=b"}")

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert caplog.messages == []


async def test_wrong_signatures_do_not_stop_clients_of_the_same_address(with_keys: Endpoint) -> None:
    async def send(secret: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{with_keys.port}/"
        request = AWSRequest("POST", url, data=b"{}", headers=HEADERS)
        SigV4Auth(Credentials("KEY", secret), "sqs", "us-east-1").add_auth(request)
        async with session.post(url, data=b"{}", headers=dict(request.headers)) as response:
            return response.status, response.headers.get("x-amzn-query-error", "")

    async with ClientSession() as session:
        wrong = [await send("wrong" * 4) for _ in range(int(FAILURES[0]) + 10)]
        right = await send(SECRET)

    assert wrong[0] == (403, "SignatureDoesNotMatch;Sender")
    assert wrong[-1] == (403, "RequestThrottled;Sender")
    assert right == (200, "")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_signed_headers_may_contain_other_characters_than_ascii(with_keys: Endpoint, encoding: str) -> None:
    """Clients in Go send UTF-8; those in Python and JavaScript send Latin-1."""
    request = AWSRequest("POST", "http://localhost/", data=b"{}", headers={**HEADERS, "x-note": "voilà grüße"})
    SigV4Auth(Credentials("KEY", SECRET), "sqs", "us-east-1").add_auth(request)
    assert ";x-note" in request.headers["Authorization"]
    head, end, body = with_keys.request(b"{}", **dict(request.headers)).partition(b"\r\n\r\n")

    answer = await with_keys.exchange(head.decode().encode(encoding) + end + body, until=b"}")

    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("limits", "raised", "room"),
    [
        ((1_024, 1_048_576), 11_024, 10_000),
        ((1_024, 4_096), 4_096, 3_072),
        ((1_024, 1_024), 1_024, 512),
        ((1_024, resource.RLIM_INFINITY), 11_024, 10_000),
    ],
)
def test_connections_leave_files_for_the_rest_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int, room: int
) -> None:
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(server_module.resource, "setrlimit", lambda _, limits: set_limits.append(limits))

    assert room_for_connections() == room
    assert set_limits == [(raised, limits[1])]


class SlowChange:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.done = False

    async def answer(self, call: Call, key: Key | None, base_url: str) -> dict[str, Any]:
        self.begun.set()
        await self.goes_on.wait()
        self.done = True
        return {}


async def delete_and_hang_up(endpoint: Endpoint, change: SlowChange) -> None:
    endpoint.server._operations = change  # type: ignore[assignment]
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    body = b'{"QueueUrl": "http://localhost/000000000000/q", "ReceiptHandle": "x"}'
    writer.write(endpoint.request(body, X_Amz_Target="AmazonSQS.DeleteMessage"))
    async with asyncio.timeout(LIMIT_S):
        await change.begun.wait()
    writer.close()
    await writer.wait_closed()


async def test_a_stop_waits_for_a_change_whose_client_has_hung_up(endpoint: Endpoint) -> None:
    """The client may have got no answer because it was killed, and expects its message to be deleted."""
    await delete_and_hang_up(endpoint, change := SlowChange())
    stopping = asyncio.create_task(endpoint.server.stop())
    await spin(100)
    assert not stopping.done()

    change.goes_on.set()
    await stopping

    assert change.done


async def test_a_stop_does_not_wait_forever_for_a_change(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.02)
    await delete_and_hang_up(endpoint, change := SlowChange())

    await asyncio.wait_for(endpoint.server.stop(), LIMIT_S)

    assert not change.done
    change.goes_on.set()
