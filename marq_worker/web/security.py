"""The checks that every request to a worker's web server passes before it reaches a page.

In this order: the request rate of the address, except for workers and commands of this namespace; the size of the
request; the ``Host`` header (DNS rebinding puts a foreign name there); the login; its role (all methods but GET and
HEAD need the operator); and, for changes, that the request comes from one of our own pages. Headers of every response
let the browser load and run only our own resources.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp.web import HTTPException, Request, RequestKey, Response, StreamResponse, middleware

from marq.wire.errors import ConfigError
from marq_worker.config.settings import AppSettings, Role
from marq_worker.web.connection_limits import RateLimiter
from marq_worker.web.credentials import Access, Credentials, Visitor

log = logging.getLogger("marq.web")

#: Forms and JSON of actions are small; nothing is uploaded.
MAX_BODY_BYTES = 1 << 20
#: Requests per address: burst, and per second.
REQUESTS = 500, 100.0
#: Wrong passwords and tokens per address: burst, and per second.
FAILURES = 10, 0.1
#: Open without a login, because supervisors check health without one.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
SAFE_METHODS = frozenset({"GET", "HEAD"})
CHALLENGE = 'Basic realm="marq", charset="UTF-8"'
#: The key of the visitor in a request.
VISITOR = RequestKey("visitor", Visitor)
#: Every visitor of a server without login.
NOBODY = Visitor("anybody", Access.OPERATOR)

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer", forms would send "Origin: null". Over plain HTTP, browsers send "Sec-Fetch-Site" only to
    # loopback addresses, so "Origin" alone shows that a form is ours.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
    # The library's own would reveal versions.
    "Server": "marq",
}

Handler = Callable[[Request], Awaitable[StreamResponse]]


@lru_cache(maxsize=256)
def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def check_exposure(settings: AppSettings, bind: str) -> None:
    """Refuse to serve pages without login on an address that other machines can reach."""
    required = Credentials.of(settings).required
    if Role.WEB in settings.roles and not is_loopback(bind) and not required:
        raise ConfigError(
            f"MARQ_WEB_BIND={bind}: others can reach this address, but no login is required."
            " Set MARQ_WEB_OPERATORS=NAME:PASSWORD (and MARQ_WEB_VIEWERS, MARQ_WEB_VIEWER_TOKENS …, the same on all"
            " workers), or bind to 127.0.0.1, or leave web out of MARQ_ROLES"
        )


class Guard:
    """Lets requests through, or answers them."""

    def __init__(
        self, credentials: Credentials, requests: RateLimiter | None = None, failures: RateLimiter | None = None
    ) -> None:
        self._credentials = credentials
        self._requests = requests or RateLimiter(*REQUESTS)
        self._failures = failures or RateLimiter(*FAILURES)

    async def handle(self, request: Request, handler: Handler) -> StreamResponse:
        response = await self._refuse(request) or await _answer(request, handler)
        if request.method not in SAFE_METHODS:
            visitor = request.get(VISITOR)
            log.info(
                "%s %s: status=%d visitor=%s address=%s",
                request.method, _path(request), response.status, "unknown" if visitor is None else visitor.name,
                request.remote,
            )  # fmt: skip
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _refuse(self, request: Request) -> Response | None:
        address = request.remote or ""
        # A worker sends one request per message, so an action on many messages takes thousands of requests.
        if not self._credentials.is_of_peer(request.headers.get("Authorization", "")):
            if wait_s := self._requests.wait_s(address):
                return _too_many(wait_s)
            self._requests.spend(address)
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return _refusal(413, f"the request is too large: at most {MAX_BODY_BYTES} bytes")
        if not self._credentials.required and not is_loopback(_host(request.headers.get("Host", ""))):
            return _refusal(
                403, "this server only answers requests to addresses of this machine, such as 127.0.0.1 and localhost"
            )
        if request.path in OPEN_PATHS and request.method in SAFE_METHODS:
            return None
        return await self._identify(request, address) or _refuse_visitor(request)

    async def _identify(self, request: Request, address: str) -> Response | None:
        """Set the request's visitor, or ask for authentication."""
        if not self._credentials.required:
            request[VISITOR] = NOBODY
            return None
        authorization = request.headers.get("Authorization", "")
        visitor = self._credentials.remembered(authorization) or self._credentials.of_command(
            authorization, request.rel_url.raw_path_qs
        )
        if visitor is None and authorization:
            if wait_s := self._failures.wait_s(address):
                return _too_many(wait_s)
            # Before the slow check: otherwise many parallel attempts would pass.
            self._failures.spend(address)
            visitor = await asyncio.to_thread(self._credentials.check, authorization)
            if visitor is None:
                log.warning("wrong password or token: address=%s path=%s", address, _path(request))
            else:
                self._failures.give_back(address)
        if visitor is None:
            return _refusal(
                401, "a user name and password, or a bearer token, are required", {"WWW-Authenticate": CHALLENGE}
            )
        request[VISITOR] = visitor
        return None


def _refuse_visitor(request: Request) -> Response | None:
    if request.method in SAFE_METHODS:
        return None
    if request[VISITOR].access < Access.OPERATOR:
        return _refusal(403, "making changes requires the operator role")
    if not _from_own_page(request):
        return _refusal(403, "pages of other sites can't change anything here")
    return None


def _from_own_page(request: Request) -> bool:
    """Return whether a request comes from one of our pages, or from a program, which sends none of these headers."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in {"same-origin", "none"}
    origin = request.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("Host")
    except ValueError:
        return False


async def _answer(request: Request, handler: Handler) -> StreamResponse:
    try:
        return await handler(request)
    except HTTPException as error:
        # Raised answers, such as 404.
        kept = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
        return _refusal(error.status, error.reason, kept)
    except Exception:
        log.exception("%s %s failed", request.method, _path(request))
        return _refusal(500, "an error that marq did not expect; the worker's log has it")


def _path(request: Request) -> str:
    """Return the path with its escapes as sent, so that it can't forge fields in the log."""
    return request.rel_url.raw_path


def _refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status=status, text=f"{why}\n", headers=headers)


def _too_many(wait_s: float) -> Response:
    return _refusal(429, "too many requests", {"Retry-After": str(int(wait_s) + 1)})


def _host(header: str) -> str:
    """Return the name or address in a Host header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def options(settings: AppSettings) -> dict[str, object]:
    """Return the options of Faust's web application."""
    guard = Guard(Credentials.of(settings))

    @middleware
    async def guarded(request: Request, handler: Handler) -> StreamResponse:
        return await guard.handle(request, handler)

    return {"middlewares": [guarded], "client_max_size": MAX_BODY_BYTES}
