"""Which clients may call the endpoint: those with an access key, or, without a keys file, any client of this machine.

Clients always sign their requests. Without a keys file, the signature is not checked, so they may use any key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp.web import BaseRequest

from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings
from marq_worker.sqs.access_keys import Key, load_keys
from marq_worker.sqs.errors import SqsError
from marq_worker.sqs.signatures import Verifier
from marq_worker.web.connection_limits import RateLimiter
from marq_worker.web.security import is_loopback

log = logging.getLogger("marq.sqs")

#: Requests with a wrong signature per address: burst, and per second.
FAILURES = 50, 1.0


def access_keys(settings: AppSettings) -> dict[str, Key]:
    """Return the access keys by id, none if there is no keys file.

    Raises ConfigError if there is none and other machines can reach the endpoint, or if :func:`load_keys` does.
    """
    if settings.sqs_keys is not None:
        return load_keys(settings.sqs_keys)
    if not is_loopback(settings.sqs_bind):
        raise ConfigError(
            f"MARQ_SQS_BIND={settings.sqs_bind}: others can reach this address, but the SQS endpoint has no access"
            " keys. Set MARQ_SQS_KEYS to a keys file, or bind to 127.0.0.1"
        )
    return {}


class Authentication:
    """Identifies the senders of requests; with empty ``keys``, clients need none."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._verifier = Verifier(keys, time.time) if keys else None
        self._failures = RateLimiter(*FAILURES)

    def identify(self, request: BaseRequest, body: bytes) -> Key | None:
        """Return the key that signed a request, None if the endpoint has no keys. Raises SqsError."""
        if self._verifier is None:
            if not self.answers_host(request):
                raise SqsError(
                    "AccessDenied", "without keys, only addresses such as 127.0.0.1 and localhost are answered"
                )
            return None
        headers = [(_text(name), _text(value)) for name, value in request.raw_headers]
        path, _, query = request.raw_path.partition("?")
        try:
            return self._verifier.verify(request.method, path, query, headers, body)
        except SqsError as error:
            address = request.remote or ""
            # Only after the check, because behind a load balancer all clients have one address.
            if self._failures.wait_s(address):
                raise SqsError("RequestThrottled", "too many requests with wrong signatures; try again later") from None
            self.note_failure(request)
            log.warning("a request was refused: address=%s error=%s", address, error.shape)
            raise

    def answers_host(self, request: BaseRequest) -> bool:
        """Return whether a request was sent to an address that the endpoint answers.

        Without keys, a web page could otherwise reach this machine's endpoint through its own domain (DNS rebinding).
        """
        return self._verifier is not None or is_loopback(_name(request.host))

    def note_failure(self, request: BaseRequest) -> None:
        """Count a request that proved no identity."""
        self._failures.spend(request.remote or "")


def _text(header: bytes) -> str:
    """Return a header's name or value as the client signed it: text that clients send as UTF-8, or as Latin-1."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _name(host: str) -> str:
    """Return the name or address of a Host header without its port, or an empty text."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
