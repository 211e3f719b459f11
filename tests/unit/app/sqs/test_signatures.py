"""Signatures are made by botocore, and checked by the endpoint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from marq_worker.sqs import signatures
from marq_worker.sqs.access_keys import Key
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.signatures import Verifier
from tests.unit.app.sqs.caught import ACCESS_KEY, SECRET, Caught

KEY = Key(ACCESS_KEY, SECRET, ())
BODY = b'{"QueueUrl":"q","MessageBody":"gr\\u00fc\\u00dfe"}'
HEADERS = {
    "Host": "queues.example:9324",
    "Content-Type": "application/x-amz-json-1.0",
    "X-Amz-Target": "AmazonSQS.SendMessage",
}


class Request(NamedTuple):
    """A request as the endpoint receives it."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes

    def with_headers(self, **changes: str | None) -> Request:
        """Return the request with other headers; ``_`` stands for ``-``, and None removes one."""
        names = {name.replace("_", "-"): value for name, value in changes.items()}
        kept = {name: value for name, value in self.headers.items() if name.lower() not in names}
        return self._replace(headers=kept | {name: value for name, value in names.items() if value is not None})


def signed(
    url: str = "http://queues.example:9324/",
    headers: Mapping[str, str] = HEADERS,
    body: bytes = BODY,
    *,
    access_key: str = ACCESS_KEY,
    secret: str = SECRET,
    token: str | None = None,
    service: str = "sqs",
    region: str = "us-east-1",
    signer: type[SigV4Auth] = SigV4Auth,
    context: Mapping[str, object] | None = None,
) -> Request:
    request = AWSRequest("POST", url, headers=dict(headers), data=body)
    request.context.update(context or {})
    signer(Credentials(access_key, secret, token), service, region).add_auth(request)
    parts = urlsplit(request.url)
    return Request("POST", parts.path, parts.query, dict(request.headers.items()), body)


def verify(request: Request, verifier: Verifier | None = None) -> Key:
    checker = Verifier({ACCESS_KEY: KEY}, time.time) if verifier is None else verifier
    return checker.verify(request.method, request.path, request.query, request.headers.items(), request.body)


def refused(request: Request, verifier: Verifier | None = None) -> tuple[str, str]:
    with pytest.raises(SqsError) as caught:
        verify(request, verifier)
    return caught.value.shape, caught.value.message


# --- signatures that count --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9324", "https://queues.example", "http://[::1]:9324", "http://h/sqs/a%20b/"]
)
def test_a_call_of_boto3_is_verified(client_at: Callable[[str], Any], caught: Caught, url: str) -> None:
    client_at(url).send_message(QueueUrl=f"{url}/000000000000/orders", MessageBody="grüße 🎉")

    sent = caught.request
    headers = {name: value if isinstance(value, str) else value.decode() for name, value in sent.headers.items()}
    parts = urlsplit(sent.url)
    # boto3 leaves these to its HTTP client.
    received = {"Host": parts.netloc, "Content-Length": str(len(sent.body)), "User-Agent": "Boto3", **headers}
    request = Request(sent.method, parts.path, parts.query, received, sent.body)
    assert b"\\u00fc" in request.body
    assert verify(request) == KEY
    assert refused(request._replace(body=request.body + b" "))[0] == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "extra",
    [
        {"x-amzn-query-mode": "true"},
        {"amz-sdk-invocation-id": "1", "amz-sdk-request": "attempt=1; max=3", "content-length": "7"},
        {"x-amz-content-sha256": hashlib.sha256(BODY).hexdigest(), "x-amz-user-agent": "aws-sdk-js/3  md/x"},
        {"x-amz-meta": "  several   spaces\tand a tab "},
        {"x-amz-meta": ""},
    ],
)
def test_the_headers_that_other_clients_sign_may_be_signed(extra: dict[str, str]) -> None:
    request = signed(headers={**HEADERS, **extra})

    names = request.headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert set(extra) <= set(names)
    assert verify(request) == KEY


def test_names_of_headers_have_no_case_and_unsigned_ones_do_not_count() -> None:
    request = signed()
    capitals = {name.upper(): value for name, value in request.headers.items()}

    assert verify(request._replace(headers={**capitals, "X-FORWARDED-FOR": "10.0.0.1", "EXPECT": ""})) == KEY


def test_the_authorization_may_lack_spaces() -> None:
    request = signed()

    assert verify(request.with_headers(authorization=request.headers["Authorization"].replace(", ", ","))) == KEY


def test_a_second_request_uses_the_kept_signing_key_and_a_forged_one_does_not_pass() -> None:
    verifier = Verifier({ACCESS_KEY: KEY}, time.time)

    assert verify(signed(), verifier) == KEY
    assert verify(signed(body=b"{}"), verifier) == KEY
    assert refused(signed()._replace(body=b"{}"), verifier)[0] == "SignatureDoesNotMatch"
    assert len(verifier._signing_keys) == 1


def test_signing_keys_are_kept_up_to_a_limit_and_not_for_forged_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "MAX_SIGNING_KEYS", 3)
    verifier = Verifier({ACCESS_KEY: KEY}, time.time)

    for number in range(8):
        refused(signed(secret="wrong", region=f"forged-{number}"), verifier)
        assert verify(signed(region=f"region-{number}"), verifier) == KEY

    assert 0 < len(verifier._signing_keys) <= 3
    assert not [region for _, _, region in verifier._signing_keys if region.startswith("forged")]


SEGMENT = st.text(st.sampled_from("aZ09-_.~%+=@ü"), max_size=4) | st.sampled_from([".", "..", "", "%2F", "a%20b"])
PAIR = st.text(st.sampled_from("aZ0-_.~%+="), max_size=5)


@given(segments=st.lists(SEGMENT, max_size=5), pairs=st.lists(PAIR, max_size=4))
def test_every_path_and_query_is_canonical_as_botocore_makes_it(segments: list[str], pairs: list[str]) -> None:
    request = signed(f"http://queues.example:9324/{'/'.join(segments)}?{'&'.join(pairs)}")

    assert verify(request) == KEY


@given(st.dictionaries(st.from_regex(r"x-[a-z]{1,5}", fullmatch=True), st.text(st.characters(codec="latin-1"))))
def test_every_value_of_a_header_is_canonical_as_botocore_makes_it(extra: dict[str, str]) -> None:
    request = signed(headers={**HEADERS, **extra})

    assert verify(request) == KEY


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [-890, 0, 890])
def test_a_clock_may_differ_by_a_quarter_of_an_hour(skew_s: int) -> None:
    verifier = Verifier({ACCESS_KEY: KEY}, lambda: time.time() + skew_s)

    assert verify(signed(), verifier) == KEY


@pytest.mark.parametrize(
    ("skew_s", "limit_s", "text"),
    [(910, 900, "expired"), (-910, 900, "not valid yet"), (40, 30, "expired"), (10**9, 900, "expired")],
)
def test_a_clock_that_differs_more_is_refused(skew_s: int, limit_s: int, text: str) -> None:
    shape, message = refused(signed(), Verifier({ACCESS_KEY: KEY}, lambda: time.time() + skew_s, limit_s))

    assert shape == "SignatureDoesNotMatch"
    assert text in message


@pytest.mark.parametrize(
    "date", ["", "20261301T000000Z", "20261124T250000Z", "2026-11-24T00:00:00Z", "٢0261124T000000Z"]
)
def test_a_time_of_another_form_is_refused(date: str) -> None:
    shape, message = refused(signed().with_headers(x_amz_date=date))

    assert (shape, message) == ("IncompleteSignature", "x-amz-date: expected a time such as 20261231T235959Z")


def test_the_scope_has_the_day_of_the_request() -> None:
    request = signed()
    day = request.headers["X-Amz-Date"][:8]
    moved = request.headers["Authorization"].replace(day, "20200101")

    assert refused(request.with_headers(authorization=moved)) == (
        "SignatureDoesNotMatch",
        "the date in the credential is not that of x-amz-date",
    )


# --- requests that someone changed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        lambda request: request._replace(body=BODY + b" "),
        lambda request: request._replace(body=b""),
        lambda request: request._replace(method="PUT"),
        lambda request: request._replace(path="/other"),
        lambda request: request._replace(query="Action=SendMessage"),
        lambda request: request.with_headers(host="other.example"),
        lambda request: request.with_headers(x_amz_target="AmazonSQS.PurgeQueue"),
        lambda request: request.with_headers(content_type="application/x-www-form-urlencoded"),
        lambda request: request.with_headers(x_amz_date="20200101T000000Z"),
        lambda request: request.with_headers(
            authorization=request.headers["Authorization"].replace("us-east-1", "us-east-2")
        ),
        lambda request: request.with_headers(authorization=request.headers["Authorization"][:-1]),
        lambda request: request.with_headers(authorization=request.headers["Authorization"][:-1] + "ü"),
    ],
)
def test_a_changed_request_is_refused(changed: Callable[[Request], Request]) -> None:
    request = signed()
    assert verify(request) == KEY

    assert refused(changed(request))[0] == "SignatureDoesNotMatch"


def test_a_header_that_was_added_to_a_signed_one_changes_it() -> None:
    request = signed()
    headers = [("x-amz-target", "AmazonSQS.PurgeQueue"), *request.headers.items()]
    verifier = Verifier({ACCESS_KEY: KEY}, time.time)

    with pytest.raises(SqsError, match="does not match the request"):
        verifier.verify(request.method, request.path, request.query, headers, request.body)


def test_a_signed_header_that_a_proxy_removed_is_named() -> None:
    request = signed(headers={**HEADERS, "x-amzn-query-mode": "true"}).with_headers(x_amzn_query_mode=None)

    shape, message = refused(request)

    assert shape == "SignatureDoesNotMatch"
    assert "'x-amzn-query-mode'" in message


def signed_without(name: str) -> Request:
    """Return a request whose signature does not cover this header."""

    class Sloppy(SigV4Auth):
        def headers_to_sign(self, request: AWSRequest) -> Any:
            headers = super().headers_to_sign(request)
            del headers[name]
            return headers

    return signed(signer=Sloppy)


def test_the_type_of_the_body_may_be_unsigned_as_in_requests_of_the_sdk_for_php() -> None:
    request = signed_without("content-type")

    assert "SignedHeaders=host;x-amz-date;x-amz-target," in request.headers["Authorization"]
    assert verify(request) == KEY
    assert refused(request._replace(body=BODY + b" "))[0] == "SignatureDoesNotMatch"
    assert refused(request.with_headers(x_amz_target="AmazonSQS.PurgeQueue"))[0] == "SignatureDoesNotMatch"


@pytest.mark.parametrize("name", ["host", "x-amz-target", "x-amz-date"])
def test_the_headers_that_decide_what_a_call_means_must_be_signed(name: str) -> None:
    shape, message = refused(signed_without(name))

    assert (shape, message) == ("IncompleteSignature", f"the signature does not cover the headers {name}")


# --- the digest of the body -------------------------------------------------------------------------------------------


def test_a_captured_request_with_a_signed_digest_cannot_carry_another_body() -> None:
    request = signed(headers={**HEADERS, "x-amz-content-sha256": hashlib.sha256(BODY).hexdigest()})
    assert verify(request) == KEY

    shape, message = refused(request._replace(body=b'{"QueueUrl":"q","MessageBody":"forged"}'))

    assert shape == "SignatureDoesNotMatch"
    assert "is not the SHA-256 of the body" in message


class UnsignedPayload(SigV4Auth):
    def payload(self, request: AWSRequest) -> str:
        return "UNSIGNED-PAYLOAD"


# botocore signs payloads over plain HTTP in any case.
UNSIGNED = {"url": "https://queues.example:9324/", "context": {"payload_signing_enabled": False}}


@pytest.mark.parametrize(
    ("options", "digest", "said"),
    [
        (UNSIGNED, "UNSIGNED-PAYLOAD", "configure the client to sign payloads"),
        ({"signer": UnsignedPayload}, None, "does not match the request"),
    ],
    ids=["said by a header", "not said"],
)
def test_a_payload_that_is_not_signed_is_refused(options: dict[str, Any], digest: str | None, said: str) -> None:
    request = signed(**options)
    assert request.headers.get("X-Amz-Content-SHA256") == digest

    shape, message = refused(request)

    assert shape == "SignatureDoesNotMatch"
    assert said in message


# --- keys, and requests without a signature ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "said"),
    [
        ({"secret": "wrong" * 8}, "SignatureDoesNotMatch", "check the client's secret key"),
        ({"service": "sns"}, "SignatureDoesNotMatch", "scoped to another service"),
        ({"token": "session"}, "InvalidClientTokenId", "session tokens are not supported"),
        ({"access_key": "UNKNOWN"}, "InvalidClientTokenId", "the access key is unknown"),
        # A presigned address.
        (
            {"signer": SigV4QueryAuth, "headers": {"Host": "queues.example:9324"}, "body": b""},
            "MissingAuthenticationToken",
            "",
        ),
    ],
)
def test_a_request_that_no_key_has_signed_is_refused_with_the_reason(
    options: dict[str, Any], shape: str, said: str
) -> None:
    found, message = refused(signed(**options))

    assert found == shape
    assert said in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Basic T1JERVJTOng=",
        "AWS4-HMAC-SHA256",
        "AWS4-HMAC-SHA256 Credential=ORDERS, SignedHeaders=host, Signature=0",
        "AWS4-HMAC-SHA256 Credential=ORDERS/20261124/r/sqs/aws4_request, Signature=0",
        "AWS4-HMAC-SHA256 Credential=ORDERS/20261124/r/sqs/aws4_request, SignedHeaders=host",
        "AWS4-HMAC-SHA256 SignedHeaders=host, Signature=0",
        "AWS4-ECDSA-P256-SHA256 Credential=ORDERS/20261124/sqs/aws4_request, SignedHeaders=host, Signature=0",
    ],
)
def test_an_authorization_of_another_form_is_incomplete(authorization: str) -> None:
    assert refused(signed().with_headers(authorization=authorization))[0] == "IncompleteSignature"


@given(authorization=st.text(), date=st.text())
def test_no_text_in_a_header_can_raise_anything_but_an_error_of_sqs(authorization: str, date: str) -> None:
    # No text that this draws is a signature or a time.
    assert refused(signed().with_headers(authorization=authorization))[0] == "IncompleteSignature"
    assert refused(signed().with_headers(x_amz_date=date))[0] == "IncompleteSignature"


@given(path=st.text(min_size=1), query=st.text(min_size=1))
def test_no_path_or_query_can_raise_anything_but_an_error_of_sqs(path: str, query: str) -> None:
    assert refused(signed()._replace(path=f"/queue/{path}", query=f"q{query}"))[0] == "SignatureDoesNotMatch"
