"""Requests of boto3 that are caught before they are sent, and answered by the test."""

from __future__ import annotations

import io
from collections.abc import Iterator

from botocore.awsrequest import AWSPreparedRequest, AWSResponse

ACCESS_KEY, SECRET = "ORDERS", "wJalrXUtnFEMI-not-a-secret"
ENDPOINT = "http://127.0.0.1:9324"
QUEUE_URL = f"{ENDPOINT}/000000000000/orders"

Answer = tuple[int, dict[str, str], bytes]


class Caught:
    """Requests as they would go onto the wire; ``answer`` is what the client gets."""

    def __init__(self) -> None:
        self.requests: list[AWSPreparedRequest] = []
        self.answer: Answer = (200, {"Content-Type": "application/x-amz-json-1.0"}, b"{}")

    def send(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        self.requests.append(request)
        status, headers, body = self.answer
        return AWSResponse(request.url, status, headers, _Raw(body))

    @property
    def request(self) -> AWSPreparedRequest:
        return self.requests[-1]


class _Raw(io.BytesIO):
    def stream(self, **_: object) -> Iterator[bytes]:
        yield self.getvalue()
