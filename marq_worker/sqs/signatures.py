"""Checks the AWS Signature Version 4 of a request: its sender, its content and its age.

The client signs a canonical form of the request: method, path, query, chosen headers and the SHA-256 of the body. The
endpoint builds the same form from the request that it received, always with the digest of the body that it received. A
client's own ``x-amz-content-sha256`` must match it, otherwise a captured request could carry any body.

Errors have the names that SQS gives them. All are final: clients do not repeat such a call, except those that correct
their clock from the header ``Date`` of the answer.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

from marq_worker.sqs.access_keys import Key
from marq_worker.sqs.errors import SqsError

ALGORITHM = "AWS4-HMAC-SHA256"
_SERVICE, _END = "sqs", "aws4_request"
#: Headers that must be signed; otherwise a call could be redirected to another operation. PHP clients do not sign
#: Content-Type. This is harmless, because the endpoint refuses a call with another content type.
REQUIRED_HEADERS = frozenset({"host", "x-amz-date", "x-amz-target"})
DEFAULT_SKEW_S = 900
#: Signing keys to keep: one for each access key, day and region in use.
MAX_SIGNING_KEYS = 1_000
_CONTENT_DIGEST = "x-amz-content-sha256"
_DATE = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)


class _Authorization(NamedTuple):
    """The parts of an Authorization header; date and region are those of the credential's scope."""

    key_id: str
    date: str
    region: str
    signed_headers: str
    signature: str

    @property
    def scope(self) -> str:
        return f"{self.date}/{self.region}/{_SERVICE}/{_END}"


class Verifier:
    """Verifies requests.

    Args:
        keys: the access keys by id.
        clock: returns the time in seconds since the epoch.
        skew_s: how far a request's time may be from the clock's, in seconds (default 900).
    """

    def __init__(self, keys: Mapping[str, Key], clock: Callable[[], float], skew_s: float = DEFAULT_SKEW_S) -> None:
        self._keys = keys
        self._clock = clock
        self._skew_s = skew_s
        self._signing_keys: dict[tuple[str, str, str], bytes] = {}

    def verify(
        self, method: str, raw_path: str, raw_query: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> Key:
        """Return the key that signed a request.

        Args:
            raw_path: the path as the client sent it, percent-encoded.
            raw_query: the query as the client sent it, without ``?``.
            headers: all headers, in order; a name may occur several times.

        Raises:
            SqsError: the request is not signed, or the signature is not valid.
        """
        values = _by_name(headers)
        authorization = _read_authorization(values.get("authorization"))
        key = self._keys.get(authorization.key_id)
        if key is None:
            raise SqsError("InvalidClientTokenId", "the access key is unknown; check the client's access key id")
        if "x-amz-security-token" in values:
            raise SqsError("InvalidClientTokenId", "session tokens are not supported; use an access key without one")
        _check_signed_headers(authorization, values)
        self._check_time(authorization, values["x-amz-date"])
        digest = sha256(body).hexdigest()
        if (claimed := values.get(_CONTENT_DIGEST, digest)) != digest:
            raise _mismatch(
                "the signature does not cover the body; configure the client to sign payloads"
                if claimed.startswith(("UNSIGNED-", "STREAMING-"))
                else f"{_CONTENT_DIGEST} is not the SHA-256 of the body; a proxy may have changed the body"
            )
        canonical = _canonical_request(method, raw_path, raw_query, authorization.signed_headers, values, digest)
        text = "\n".join((ALGORITHM, values["x-amz-date"], authorization.scope, _hex(canonical)))
        cached = (key.id, authorization.date, authorization.region)
        signing_key = self._signing_keys.get(cached) or _signing_key(key, authorization)
        signature = hmac.digest(signing_key, _encode(text), "sha256").hex()
        if not hmac.compare_digest(signature.encode(), _encode(authorization.signature)):
            raise _mismatch(
                "the signature does not match the request; check the client's secret key, and that no proxy changes"
                " Host, path or signed headers"
            )
        # Only now, because the client chooses the region, and forged ones must not fill the cache.
        if cached not in self._signing_keys:
            if len(self._signing_keys) >= MAX_SIGNING_KEYS:
                self._signing_keys.clear()
            self._signing_keys[cached] = signing_key
        return key

    def _check_time(self, authorization: _Authorization, date: str) -> None:
        signed_s = _seconds(date)
        if authorization.date != date[:8]:
            raise _mismatch("the date in the credential is not that of x-amz-date")
        late_s = self._clock() - signed_s
        if late_s > self._skew_s:
            raise _mismatch(f"the signature expired: the request is {late_s:.0f} s old; set the client's clock")
        if -late_s > self._skew_s:
            raise _mismatch(f"the signature is not valid yet: it begins in {-late_s:.0f} s; set the client's clock")


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by their names in lower case, with the values of a repeated one joined as clients sign them."""
    values: dict[str, str] = {}
    for name, value in headers:
        name, value = name.lower(), " ".join(value.split())
        values[name] = f"{values[name]},{value}" if name in values else value
    return values


def _read_authorization(header: str | None) -> _Authorization:
    if header is None:
        raise SqsError(
            "MissingAuthenticationToken",
            "the request is not signed; configure the client with an access key, and sign in the Authorization header",
        )
    algorithm, _, rest = header.partition(" ")
    fields = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    scope = fields.get("Credential", "").split("/")
    if algorithm != ALGORITHM or len(scope) != 5 or not fields.get("SignedHeaders") or not fields.get("Signature"):
        raise _incomplete(
            f"Authorization: expected {ALGORITHM} Credential=KEY/DATE/REGION/sqs/aws4_request, SignedHeaders=...,"
            " Signature=..."
        )
    key_id, date, region, service, end = scope
    if (service, end) != (_SERVICE, _END):
        raise _mismatch("the credential is scoped to another service; expected KEY/DATE/REGION/sqs/aws4_request")
    return _Authorization(key_id, date, region, fields["SignedHeaders"], fields["Signature"])


def _check_signed_headers(authorization: _Authorization, values: Mapping[str, str]) -> None:
    signed = frozenset(authorization.signed_headers.split(";"))
    if unsigned := REQUIRED_HEADERS - signed:
        raise _incomplete(f"the signature does not cover the headers {', '.join(sorted(unsigned))}")
    if absent := signed - values.keys():
        raise _mismatch(f"a signed header is missing: {min(absent)[:80]!r}; a proxy may have removed it")


def _canonical_request(
    method: str, raw_path: str, raw_query: str, signed_headers: str, values: Mapping[str, str], digest: str
) -> str:
    lines = [f"{name}:{values[name]}" for name in signed_headers.split(";")]
    path, query = _canonical_path(raw_path), _canonical_query(raw_query)
    return "\n".join((method.upper(), path, query, *lines, "", signed_headers, digest))


def _canonical_path(raw_path: str) -> str:
    """Return the path without dot segments, and percent-encoded once more."""
    if raw_path in ("", "/"):
        return "/"
    segments: list[str] = []
    for segment in raw_path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    end = "/" if segments and raw_path.endswith("/") else ""
    return quote(f"/{'/'.join(segments)}{end}", safe="/~", errors="surrogateescape")


def _canonical_query(raw_query: str) -> str:
    if not raw_query:
        return ""
    pairs = sorted(pair.partition("=")[::2] for pair in raw_query.split("&"))
    return "&".join(f"{name}={value}" for name, value in pairs)


def _signing_key(key: Key, authorization: _Authorization) -> bytes:
    signing_key = _encode(f"AWS4{key.secret}")
    for part in (authorization.date, authorization.region, _SERVICE, _END):
        signing_key = hmac.digest(signing_key, _encode(part), "sha256")
    return signing_key


def _seconds(date: str) -> float:
    match = _DATE.fullmatch(date)
    try:
        if match is not None:
            year, month, day, hour, minute, second = map(int, match.groups())
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        pass
    raise _incomplete("x-amz-date: expected a time such as 20261231T235959Z")


def _hex(text: str) -> str:
    return sha256(_encode(text)).hexdigest()


def _encode(text: str) -> bytes:
    # Servers decode paths that are not UTF-8 with surrogates; this restores the client's bytes.
    return text.encode("utf-8", "surrogateescape")


def _incomplete(message: str) -> SqsError:
    return SqsError("IncompleteSignature", message)


def _mismatch(message: str) -> SqsError:
    return SqsError("SignatureDoesNotMatch", message)
