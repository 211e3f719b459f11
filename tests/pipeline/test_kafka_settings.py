"""MARQ_… in the environment as settings of the Kafka connector; tests/unit tests the shared ClientSettings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marq.wire.errors import ConfigError
from pipeline.errors import PipelineError
from pipeline.kafka import Connection

LOGIN = {"MARQ_SASL_USERNAME": "user", "MARQ_SASL_PASSWORD": "secret"}
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIC\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("environment", "servers", "markers"),
    [
        ({}, "127.0.0.1:9092", "marq.markers"),
        ({"MARQ_BOOTSTRAP_SERVERS": " one:1,two:2 ", "MARQ_PREFIX": "test "}, "one:1,two:2", "test.markers"),
    ],
    ids=["nothing set", "with spaces"],
)
def test_address_and_prefix_are_taken_from_the_environment(
    environment: dict[str, str], servers: str, markers: str
) -> None:
    connection = Connection.read(environment)

    assert connection.options() == {"kafka.bootstrap.servers": servers}
    assert connection.names.markers == markers


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "plain.PlainLoginModule"),
        ("scram-sha-256", "scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "scram.ScramLoginModule"),
    ],
)
def test_a_login_is_a_line_of_javas_login_configuration(mechanism: str, module: str) -> None:
    options = Connection.read(
        {"MARQ_SECURITY_PROTOCOL": "sasl_plaintext", "MARQ_SASL_MECHANISM": mechanism, **LOGIN}
    ).options()

    assert options["kafka.security.protocol"] == "SASL_PLAINTEXT"
    assert options["kafka.sasl.mechanism"] == mechanism.upper()
    assert options["kafka.sasl.jaas.config"] == (
        f'org.apache.kafka.common.security.{module} required username="user" password="secret";'
    )


def test_a_password_is_escaped_and_not_in_the_repr() -> None:
    password = 'a"b\\c; d\ne'
    connection = Connection.read({**LOGIN, "MARQ_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "MARQ_SASL_PASSWORD": password})

    assert connection.options()["kafka.sasl.jaas.config"].endswith('password="a\\"b\\\\c; d\\ne";')
    assert "c; d" not in repr(connection)


@pytest.mark.parametrize("own_file", [False, True], ids=["one file", "key in its own file"])
def test_certificates_go_to_executors_as_text(tmp_path: Path, own_file: bool) -> None:
    (tmp_path / "ca.pem").write_text(f"Some authority\n{CERTIFICATE}\n")
    (tmp_path / "client.pem").write_text(CERTIFICATE if own_file else f"{KEY}\n{CERTIFICATE}\n")
    (tmp_path / "client.key").write_text(KEY)

    options = Connection.read(
        {
            "MARQ_SECURITY_PROTOCOL": "SSL",
            "MARQ_SSL_CAFILE": str(tmp_path / "ca.pem"),
            "MARQ_SSL_CERTFILE": str(tmp_path / "client.pem"),
            **({"MARQ_SSL_KEYFILE": str(tmp_path / "client.key")} if own_file else {}),
            "MARQ_SSL_PASSWORD": "of the key",
        }
    ).options()

    assert options == {
        "kafka.bootstrap.servers": "127.0.0.1:9092",
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": CERTIFICATE,
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": CERTIFICATE,
        "kafka.ssl.keystore.key": KEY,
        "kafka.ssl.key.password": "of the key",
    }


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MARQ_BOOTSTRAP_SERVERS": "memory://x"}, "MARQ_BOOTSTRAP_SERVERS='memory://x': expected host:port"),
        ({"MARQ_SECURITY_PROTOCOL": "SASL_SSL"}, "sasl_username is missing (MARQ_SASL_USERNAME)"),
        (
            {"MARQ_SECURITY_PROTOCOL": "SASL_SSL", "MARQ_SASL_MECHANISM": "oauthbearer"},
            "MARQ_SASL_MECHANISM=OAUTHBEARER: the pipeline logs in with PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512 only",
        ),
        (
            {"MARQ_SECURITY_PROTOCOL": "SSL", "MARQ_SSL_CAFILE": "/none"},
            "MARQ_SSL_CAFILE='/none' can't be read: No such",
        ),
    ],
)
def test_an_invalid_value_is_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises((PipelineError, ConfigError), match=re.escape(sentence)):
        Connection.read(environment)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no certificate", "expected PEM with -----BEGIN CERTIFICATE-----"),
        (CERTIFICATE, "expected PEM with -----BEGIN PRIVATE KEY-----"),
        (f"{CERTIFICATE}\n{KEY.replace('PRIVATE', 'RSA PRIVATE')}", "openssl pkcs8 -topk8"),
    ],
)
def test_a_file_that_java_can_not_read_is_named_with_what_to_do(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "client.pem"
    path.write_text(content)

    with pytest.raises(PipelineError, match=f"^MARQ_SSL_CERTFILE='{path}'.*{re.escape(sentence)}"):
        Connection.read({"MARQ_SECURITY_PROTOCOL": "SSL", "MARQ_SSL_CERTFILE": str(path)})
