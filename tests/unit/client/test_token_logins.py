"""Token providers: what users may name, what their callers get, and what errors say."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider

from marq.kafka import token_logins as module
from marq.kafka.token_logins import NoToken, TokenSource, tokens_of
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError

LIMIT_S = 30.0
SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "oauthbearer"}


def of_function() -> str:
    return "of-function"


async def of_coroutine(token: str = "of-coroutine") -> str:
    return token


class OfClass(AbstractTokenProvider):
    async def token(self) -> str:
        return "of-class"

    def extensions(self) -> dict[str, str]:
        return {"logicalCluster": "lkc-1"}


class OfCall:
    async def __call__(self) -> str:
        return "of-call"


class NeedsArguments:
    def __init__(self, region: str) -> None:
        self.region = region


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("of the user's __str__")


class FailsUnprintably:
    def __init__(self) -> None:
        raise Unprintable


class Lazy:
    @property
    def provider(self) -> object:
        raise Unprintable


lazy = Lazy()
number = 7


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (of_function, "of-function"),
        (of_coroutine, "of-coroutine"),
        (partial(of_coroutine, "of-partial"), "of-partial"),
        (OfClass(), "of-class"),
        (OfClass, "of-class"),
        (OfCall(), "of-call"),
        (f"{__name__}:of_function", "of-function"),
        (f"{__name__}:OfClass", "of-class"),
    ],
)
async def test_a_provider_is_a_callable_or_an_object_or_the_path_of_one(provider: Any, expected: str) -> None:
    source = tokens_of(ClientSettings.read("a:1", {**SASL, "sasl_token_provider": provider}, environment={}))

    assert isinstance(source, AbstractTokenProvider)
    assert await source.token() == expected


async def test_extensions_are_the_providers() -> None:
    assert TokenSource("x", OfClass()).extensions() == {"logicalCluster": "lkc-1"}
    assert TokenSource("x", of_function).extensions() == {}


async def test_the_environment_names_a_path_and_all_clients_share_it() -> None:
    environment = {f"MARQ_{name.upper()}": value for name, value in SASL.items()}
    environment["MARQ_SASL_TOKEN_PROVIDER"] = f"{__name__}:OfClass"

    one, other = (ClientSettings.read("a:1", environment=environment) for _ in range(2))

    assert tokens_of(one) is tokens_of(other) is not None
    assert one.login == f"{__name__}:OfClass"


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (None, r"^sasl_token_provider is missing \(MARQ_SASL_TOKEN_PROVIDER\): .* sasl_mechanism=OAUTHBEARER needs it"),
        ("auth", "^sasl_token_provider='auth': expected MODULE:ATTRIBUTE, for example"),
        ("no_such_module:provider", "^sasl_token_provider='no_such_module:provider': .*No module named"),
        (f"{__name__}:nothing", "it can't be imported: AttributeError: .*'nothing'"),
        (f"{__name__}:number", "expected MODULE:ATTRIBUTE, a callable .* not int"),
        (7, "^sasl_token_provider: expected MODULE:ATTRIBUTE, a callable .* not int"),
        (NeedsArguments, r"^sasl_token_provider: .*NeedsArguments\(\) failed: TypeError"),
        (FailsUnprintably, r"FailsUnprintably\(\) failed: Unprintable: <unprintable>"),
        (f"{__name__}:lazy.provider", "it can't be imported: Unprintable: <unprintable>"),
    ],
)
def test_anything_else_is_an_error_of_configuration(provider: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ClientSettings.read("a:1", {**SASL, "sasl_token_provider": provider}, environment={})


def test_a_provider_is_not_imported_for_other_logins() -> None:
    options = {"sasl_token_provider": "no_such_module:provider", "sasl_username": "a", "sasl_password": "b"}

    for protocol in ("PLAINTEXT", "SASL_SSL"):
        settings = ClientSettings.read("a:1", {**options, "security_protocol": protocol}, environment={})
        assert settings.sasl_token_provider is None


@pytest.mark.parametrize("token", [b"bytes", "", "two words", "line\n", "grüße", None])
async def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(token: Any) -> None:
    with pytest.raises(NoToken, match="the token provider mine must return text") as caught:
        await TokenSource("mine", lambda: token).token()

    assert str(token) not in str(caught.value) or not token


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, TimeoutError, StopIteration])
async def test_what_a_provider_raises_is_named(kind: type[BaseException]) -> None:
    def provider() -> str:
        raise kind("no network")

    with pytest.raises(NoToken, match=r"the token provider mine failed: .*no network"):
        await TokenSource("mine", provider).token()


async def test_a_provider_that_blocks_holds_up_neither_the_event_loop_nor_more_than_one_thread(monkeypatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.05)
    go_on, calls = threading.Event(), []

    def provider() -> str:
        calls.append(threading.current_thread())
        assert go_on.wait(LIMIT_S)
        return f"token-{len(calls)}"

    source = TokenSource("mine", provider)
    for _ in range(3):
        with pytest.raises(NoToken, match=r"the token provider mine gave no token within 0.05 s"):
            await source.token()
    assert len(calls) == 1

    monkeypatch.setattr(module, "LIMIT_S", LIMIT_S)
    waiting = [asyncio.create_task(source.token()) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*waiting) == ["token-1", "token-1"]
    assert await source.token() == "token-2"


async def test_after_a_call_that_hangs_for_good_others_begin_ever_more_rarely(monkeypatch) -> None:
    now_s, end, calls = 0.0, threading.Event(), []
    monkeypatch.setattr(module, "monotonic", lambda: now_s)

    def provider() -> str:
        calls.append(now_s)
        assert end.wait(LIMIT_S)
        return "token"

    def call(at_s: float) -> Future[Any]:
        nonlocal now_s
        now_s = at_s
        return source._in_thread()

    source = TokenSource("mine", provider)
    futures = [call(at_s) for at_s in (1_000.0, 1_060.0, 1_061.0, 1_181.0, 1_182.0, 1_422.0)]
    assert [futures.index(future) for future in futures] == [0, 0, 2, 2, 4, 4]

    end.set()
    assert [future.result(LIMIT_S) for future in futures] == ["token"] * 6
    assert await source.token() == "token"
    assert len(calls) == 4


def hanging_once(end: threading.Event) -> TokenSource:
    """Return a source whose first call returns only after this event."""
    calls = []

    def provider() -> str:
        calls.append(None)
        assert len(calls) > 1 or end.wait(LIMIT_S)
        return f"token-{len(calls)}"

    return TokenSource("mine", provider)


async def test_a_call_that_hangs_holds_up_none_that_follow_it(monkeypatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.01)
    end = threading.Event()
    source = hanging_once(end)
    with pytest.raises(NoToken, match="gave no token"):
        await source.token()
    monkeypatch.setattr(module, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(module, "monotonic", lambda: 1e9)

    assert [await source.token(), await source.token()] == ["token-2", "token-3"]
    end.set()


async def test_a_forked_process_calls_a_provider_that_was_running_at_the_fork(monkeypatch) -> None:
    end = threading.Event()
    source = hanging_once(end)
    before = source._in_thread()
    # Another thread had it at the fork.
    source._lock.acquire()

    monkeypatch.setattr(module, "getpid", lambda: 7)
    assert await source.token() == "token-2"

    end.set()
    before.result(LIMIT_S)


async def test_a_caller_that_is_cancelled_takes_no_token_from_the_others() -> None:
    go_on = threading.Event()

    def provider() -> str:
        assert go_on.wait(LIMIT_S)
        return "token"

    source = TokenSource("mine", provider)
    waiting = [asyncio.create_task(source.token()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    go_on.set()

    assert await asyncio.gather(*waiting[1:]) == ["token", "token"]
    assert waiting[0].cancelled()
