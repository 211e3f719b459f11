"""Settings of logins and the access that they give."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

import pytest

from marq.wire.errors import ConfigError
from marq_worker.config.settings import load_settings
from marq_worker.web.credentials import COMMAND_VALID_S, Access, Credentials, Visitor, hashed

Settings = Callable[..., Credentials]


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> Settings:
    def read(**variables: str) -> Credentials:
        for name, value in variables.items():
            monkeypatch.setenv(f"MARQ_WEB_{name.upper()}", value)
        return Credentials.of(load_settings())

    return read


def basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def test_without_settings_no_login_is_required(credentials: Settings) -> None:
    found = credentials()

    assert not found.required
    assert found.peer_token == ""
    assert found.remembered("Bearer ") is None


def test_a_password_is_given_as_it_is_or_as_a_hash(credentials: Settings) -> None:
    found = credentials(operators=f"alice:open:sesame, bob:{hashed('correct horse')}", viewers="eve:just looking")

    assert found.check(basic("alice", "open:sesame")) == Visitor("alice", Access.OPERATOR)
    assert found.check(basic("bob", "correct horse")) == Visitor("bob", Access.OPERATOR)
    assert found.check(basic("eve", "just looking")) == Visitor("eve", Access.VIEWER)
    for name, password in [
        ("alice", "open"),
        ("bob", "wrong horse"),
        ("eve", "open:sesame"),
        ("", ""),
        ("mallory", ""),
    ]:
        assert found.check(basic(name, password)) is None


def test_a_hash_is_not_a_password(credentials: Settings) -> None:
    secret = hashed("correct horse")

    assert credentials(operators=f"bob:{secret}").check(basic("bob", secret)) is None


def test_a_verified_password_is_recognised_quickly(credentials: Settings) -> None:
    found = credentials(operators="alice:open sesame")
    right, wrong = basic("alice", "open sesame"), basic("alice", "wrong")
    assert found.remembered(right) is None

    found.check(right)
    found.check(wrong)

    assert found.remembered(right) == Visitor("alice", Access.OPERATOR)
    assert found.remembered(wrong) is None


def test_tokens_have_roles(credentials: Settings) -> None:
    found = credentials(viewer_tokens="prometheus-0123456789", operator_tokens="deployer-0123456789")

    viewer, operator = found.remembered("Bearer prometheus-0123456789"), found.remembered("bearer deployer-0123456789")
    assert viewer is not None
    assert operator is not None
    assert (viewer.access, operator.access) == (Access.VIEWER, Access.OPERATOR)
    assert found.remembered("Bearer deployer-012345678") is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic",
        "Basic !",
        "Basic 44G=",
        "Basic é",
        "Digest x",
        "Bearer é",
        "Basic " + "A" * 9_999,
        # Bytes that are not valid UTF-8, as aiohttp decodes them.
        "Basic \udcff",
        "Bearer \udcff",
        "\udcff",
    ],
)
def test_invalid_credentials_headers_are_rejected(credentials: Settings, header: str) -> None:
    found = credentials(operators="alice:open sesame", viewer_tokens="prometheus-0123456789")

    assert found.remembered(header) is None
    assert found.check(header) is None


def test_workers_of_one_namespace_know_each_other_and_may_only_look(
    credentials: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = credentials(operators="alice:open sesame"), credentials()

    assert one.peer_token == other.peer_token
    assert one.remembered(f"Bearer {one.peer_token}") == Visitor("another worker", Access.VIEWER)
    monkeypatch.setenv("MARQ_PREFIX", "elsewhere")
    assert credentials().peer_token != one.peer_token


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("operators", "secret-password", "MARQ_WEB_OPERATORS: entry 1: expected NAME:PASSWORD"),
        ("operators", "alice:short-1", "MARQ_WEB_OPERATORS: the password of 'alice' is too short"),
        ("viewers", "alice:scrypt$12$34", "MARQ_WEB_VIEWERS: the hash of 'alice' is damaged"),
        ("viewer_tokens", "secret-token", "MARQ_WEB_VIEWER_TOKENS: token 1: expected at least 16 ASCII characters"),
        ("operators", "alice:secret-password,alice:secret-password", "'alice' is named twice"),
    ],
)
def test_a_setting_of_the_wrong_form_is_named_and_no_secret(
    credentials: Settings, setting: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        credentials(**{setting: value})

    assert message in str(error.value)
    assert "secret" not in str(error.value)
    assert "short-1" not in str(error.value)


def test_a_short_password_is_not_hashed() -> None:
    with pytest.raises(ConfigError, match="too short"):
        hashed("1234567")


def test_secrets_are_not_in_the_text_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_WEB_OPERATORS", "alice:open sesame")

    assert "sesame" not in repr(load_settings())
    assert "sesame" not in str(load_settings().model_dump())


def test_a_command_is_signed_for_its_address_and_a_while(
    credentials: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = credentials(operators="alice:open sesame", viewers="eve:just looking")
    theirs = credentials()

    [signed] = ours.sign_command("ann:b", "/api/commands/quiet?worker=http://a").values()

    assert theirs.of_command(signed, "/api/commands/quiet?worker=http://a") == Visitor("ann:b", Access.OPERATOR)
    for header, address in (
        (signed, "/api/commands/quiet?worker=http://b"),
        (signed.replace("ann", "bob"), "/api/commands/quiet?worker=http://a"),
        (signed.replace(signed[-1], "g"), "/api/commands/quiet?worker=http://a"),
        ("Marq ", "/"),
        ("Marq a:b", "/"),
    ):
        assert theirs.of_command(header, address) is None
    then_s = time.time()
    monkeypatch.setattr(time, "time", lambda: then_s + COMMAND_VALID_S + 1)
    assert theirs.of_command(signed, "/api/commands/quiet?worker=http://a") is None


def test_a_viewer_who_knows_his_secret_can_sign_no_command(credentials: Settings) -> None:
    found = credentials(viewer_tokens="prometheus-0123456789")

    [signed] = found.sign_command("eve", "/").values()

    assert found.of_command(signed, "/") is None
