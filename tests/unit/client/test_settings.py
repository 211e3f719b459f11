from __future__ import annotations

import math
from datetime import timedelta

import pytest

import marq
from marq.settings.client import ClientSettings
from marq.settings.durations import duration_ms
from marq.wire.errors import ConfigError


def test_arguments_go_over_the_environment_and_that_over_defaults() -> None:
    environment = {"MARQ_BOOTSTRAP_SERVERS": "a:1,b:2", "MARQ_PREFIX": "env", "MARQ_PARTITIONS": "8"}

    settings = ClientSettings.read(None, {"prefix": "given"}, environment=environment)

    assert (settings.bootstrap_servers, settings.names.prefix, settings.partitions) == ("a:1,b:2", "given", 8)
    assert settings.connect_timeout_ms == 10_000


def test_the_environment_is_read_when_a_client_is_made(monkeypatch) -> None:
    monkeypatch.setenv("MARQ_PREFIX", "later")

    assert marq.Producer("a:1")._settings.names.prefix == "later"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("connect_timeout", -1, "connect_timeout=-1: expected seconds"),
        ("connect_timeout", "5", "expected seconds .a number. or a timedelta, not str"),
        ("connect_timeout", math.nan, "connect_timeout=nan: expected seconds"),
        ("connect_timeout", True, "not bool"),
        ("partitions", 0, "partitions=0: expected a whole number from 1"),
        ("partitions", 2.0, "partitions=2.0: expected a whole number"),
        ("prefix", "a b", "^prefix='a b': expected 1 to 100 of the characters"),
        ("prefix", 5, "prefix=5: expected text"),
        ("security_protocol", "TLS", "expected one of PLAINTEXT, SSL"),
        ("compression", "brotli", "^compression='brotli': expected one of none, gzip, snappy, lz4, zstd"),
        ("compression", 3, "compression=3: expected text"),
        ("ssl_context", "x", "expected an ssl.SSLContext"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(option, value, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        ClientSettings.read("a:1", {option: value}, environment={})


@pytest.mark.parametrize("servers", ["localhost", "a:b", ":9092", "a:1,,b:2", 5, b"a:1", "a:0"])
def test_servers_without_a_port_are_refused(servers) -> None:
    with pytest.raises(ConfigError, match="bootstrap_servers="):
        ClientSettings.read(servers, {}, environment={})


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MARQ_PREFIX", "a b", "^MARQ_PREFIX='a b': expected 1 to 100 of the characters"),
        ("MARQ_PARTITIONS", "many", "^MARQ_PARTITIONS='many': expected a number"),
        ("MARQ_PARTITIONS", "0", "^MARQ_PARTITIONS=0: expected a whole number from 1"),
        ("MARQ_CONNECT_TIMEOUT", "0", "^MARQ_CONNECT_TIMEOUT=0.0: expected seconds from 0.1"),
        ("MARQ_SECURITY_PROTOCOL", "TLS", "^MARQ_SECURITY_PROTOCOL='TLS': expected one of"),
        ("MARQ_COMPRESSION", "9", "^MARQ_COMPRESSION='9': expected one of none, gzip"),
    ],
)
def test_a_wrong_value_in_the_environment_is_reported_as_its_variable(variable, value, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        ClientSettings.read("a:1", {}, environment={variable: value})


@pytest.mark.parametrize(
    ("options", "expected"), [({}, "none"), ({"compression": "ZSTD"}, "zstd"), ({"compression": "none"}, "none")]
)
def test_messages_are_compressed_only_on_request(options, expected) -> None:
    assert ClientSettings.read("a:1", options, environment={}).compression == expected


def test_passwords_are_not_shown() -> None:
    settings = ClientSettings.read("a:1", {"sasl_password": "secret"}, environment={})

    assert "secret" not in repr(settings)


@pytest.mark.parametrize(("given", "expected"), [(1.5, 1_500), (timedelta(minutes=1), 60_000), (0, 0), (2, 2_000)])
def test_durations_are_seconds_or_timedeltas(given, expected) -> None:
    assert duration_ms("delay", given) == expected


@pytest.mark.parametrize("given", [-0.1, math.inf, 10**400, timedelta(days=-1), timedelta(days=100), None, "1"])
def test_other_durations_are_refused(given) -> None:
    with pytest.raises(ConfigError, match="delay="):
        duration_ms("delay", given)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lease": 0}, "lease=0: expected seconds from 0.1"),
        ({"lease": "30"}, "lease='30'"),
        ({"lease": 1e9}, r"seconds from 0\.1 to 4294967\.295, or"),
        ({"lease": 60, "max_lease": 30}, "^max_lease=30 is shorter than lease=60"),
        ({"max_in_flight": 0}, "max_in_flight=0: expected a whole number from 1"),
        ({"instance_id": ""}, "instance_id=''"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1"),
        ({"transactional": "yes"}, "transactional='yes': expected True or False"),
        ({"transactional": None}, "transactional=None: expected"),
    ],
)
def test_bad_consumer_options_are_refused_at_once(options, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        marq.Consumer("q", "a:1", **options)


def test_constructors_need_no_event_loop_and_no_broker() -> None:
    assert marq.Consumer("q", "nowhere.invalid:1").queue == "q"
    assert isinstance(marq.Producer("nowhere.invalid:1"), marq.Producer)


@pytest.mark.parametrize("missing", ["sasl_username", "sasl_password"])
def test_a_login_needs_a_name_and_a_password(missing: str) -> None:
    login = {"sasl_username": "a", "sasl_password": "b", "security_protocol": "SASL_SSL"}
    del login[missing]

    with pytest.raises(ConfigError, match=f"{missing} is missing .MARQ_{missing.upper()}"):
        ClientSettings.read("a:1", login, environment={})


def test_an_unknown_attribute_is_an_ordinary_attribute_error() -> None:
    assert not hasattr(marq.Producer("a:1"), "no_such_thing")
    assert not hasattr(marq.Consumer("q", "a:1"), "no_such_thing")
