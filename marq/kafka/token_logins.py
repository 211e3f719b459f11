"""Logins with tokens: how a token provider is called.

Each connection asks for a token when it opens. Clients of one process may live in several event loops, and in threads.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from inspect import iscoroutinefunction
from os import getpid
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka.abc import AbstractTokenProvider

from marq.client.threads import begun_in_thread
from marq.settings.client import ClientSettings
from marq.settings.token_provider import NamedProvider
from marq.wire.errors import error_text

#: Time limit of a provider. The clients' pacer spaces attempts, so a failing one is not called in a loop.
LIMIT_S = 30.0
#: A call that takes longer may hang for good, so another one begins. This time doubles with each hanging call, so a
#: provider that hangs for a day blocks eleven threads.
HUNG_S = 60.0
_TOKEN = re.compile("[!-~]+")


class NoToken(ConnectionError):
    """The provider gave no usable token, so the connection cannot be opened; clients retry it like any other."""


class TokenSource(AbstractTokenProvider):  # type: ignore[misc]
    """Calls a token provider; safe for use from several threads and event loops.

    A provider that is not asynchronous runs in a thread, because it may do I/O. Concurrent callers share a
    call and its token, so a provider that hangs blocks few threads.

    Args:
        name: what errors call it.
        provider: an object with ``token()``, or a callable; asynchronous or not.
    """

    def __init__(self, name: str, provider: Any) -> None:
        self.name = name
        self._provider = provider
        self._call = getattr(provider, "token", provider)
        self._is_async = iscoroutinefunction(self._call) or iscoroutinefunction(type(self._call).__call__)
        self._lock = threading.Lock()
        #: Calls that have not ended, the newest last, and the time after which another one may begin nevertheless.
        self._running: list[Future[Any]] = []
        self._again_s = 0.0
        self._process = getpid()

    async def token(self) -> str:
        """Return a token. Raises NoToken."""
        try:
            async with asyncio.timeout(LIMIT_S) as limit:
                token = await (self._call() if self._is_async else asyncio.wrap_future(self._in_thread()))
        except Exception as error:
            if limit.expired():
                raise NoToken(f"the token provider {self.name} gave no token within {LIMIT_S:g} s") from None
            raise self._failed(error) from error
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            kind = "other text" if isinstance(token, str) else type(token).__name__
            raise NoToken(
                f"the token provider {self.name} must return text (str) of printable ASCII characters without spaces or"
                f" line breaks, not {kind}"
            )
        return token

    def extensions(self) -> Mapping[str, str]:
        """Return the provider's SASL extensions, by default none. Raises NoToken."""
        try:
            return dict(getattr(self._provider, "extensions", dict)())
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> NoToken:
        return NoToken(f"the token provider {self.name} failed: {type(error).__name__}: {error_text(error)}")

    def _in_thread(self) -> Future[Any]:
        if self._process != getpid():
            # After a fork, the threads are gone, and one of them may have held the lock.
            self._lock, self._running, self._process = threading.Lock(), [], getpid()
        with self._lock:
            if not self._running or self._running[-1].done() or monotonic() > self._again_s:
                self._running = [future for future in self._running if not future.done()]
                self._again_s = monotonic() + HUNG_S * 2 ** len(self._running)
                self._running.append(begun_in_thread(self._call, "marq-token"))
            return self._running[-1]


_sources: WeakKeyDictionary[NamedProvider, TokenSource] = WeakKeyDictionary()


def tokens_of(settings: ClientSettings) -> TokenSource | None:
    """Return the source of the tokens for these settings; None if they log in without."""
    named = settings.sasl_token_provider
    return None if named is None else _sources.setdefault(named, TokenSource(named.name, named.provider))
