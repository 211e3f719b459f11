"""Settings of the worker and of its clients, from the environment and from .env."""

import re
from pathlib import Path

import pytest

from marq.wire.errors import ConfigError
from marq_worker.commands.command import _setup
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import (
    AppSettings,
    Role,
    load_client_settings,
    load_settings,
    misspelt_variables,
    read_environment,
    shutdown_limit_s,
    stop_limit_s,
)


def test_a_worker_has_all_roles_but_sqs_unless_told() -> None:
    assert load_settings().roles == set(Role) - {Role.SQS}


def test_roles_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_ROLES", " web,tracker ,")

    assert load_settings().roles == {Role.WEB, Role.TRACKER}


@pytest.mark.parametrize("roles", [" , ", "trackr", "web,trackr"])
def test_an_unknown_role_or_none_at_all_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, roles: str
) -> None:
    monkeypatch.setenv("MARQ_ROLES", roles)

    with pytest.raises(ConfigError, match=r"MARQ_ROLES: expected one or more of tracker, handlers, web.*found"):
        load_settings()


@pytest.mark.parametrize(
    ("timeout", "processes", "handlers"), [(29, 26, 22), (300, 297, 293), (9, 6, 3), (4, 2, 1), (1, 0.5, 0.25)]
)
def test_processes_get_a_part_of_the_time_for_a_stop_and_their_handlers_most_of_that(
    timeout: float, processes: float, handlers: float
) -> None:
    assert (stop_limit_s(timeout), shutdown_limit_s(timeout)) == (processes, handlers)


def test_a_stop_ends_before_kubernetes_kills_the_pod() -> None:
    assert 20 < shutdown_limit_s(AppSettings().stop_timeout) < AppSettings().stop_timeout < 30


def test_handlers_can_not_get_more_time_than_a_stop_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_STOP_TIMEOUT", "67")
    monkeypatch.setenv("MARQ_SHUTDOWN_TIMEOUT", "60")
    assert load_settings().shutdown_timeout == 60

    monkeypatch.setenv("MARQ_SHUTDOWN_TIMEOUT", "61")
    with pytest.raises(ConfigError, match=r"MARQ_SHUTDOWN_TIMEOUT: expected at most 60.* raise MARQ_STOP_TIMEOUT"):
        load_settings()


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("services.emails:send", "; write 'services.emails'"),
        ("./services/emails.py", "; write 'services.emails'"),
        ("a b", ""),
    ],
)
def test_what_is_no_module_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, written: str, hint: str
) -> None:
    monkeypatch.setenv("MARQ_HANDLERS", written)

    with pytest.raises(
        ConfigError,
        match=re.escape(
            f"MARQ_HANDLERS: expected names of modules, separated by commas; {written!r} is not one{hint} (found"
        ),
    ):
        load_settings()


def test_modules_of_handlers_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_HANDLERS", "services.emails, services.reports,services.emails")

    assert load_settings().handlers == ("services.emails", "services.reports")


@pytest.fixture
def env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".env"


def test_the_file_counts_for_the_worker_and_for_its_clients(env_file: Path) -> None:
    env_file.write_text(
        "# a comment\nexport MARQ_BOOTSTRAP_SERVERS=kafka:9092\nMARQ_PREFIX='shop'\nMARQ_WEB_PORT=7000\n"
        "MARQ_PARTITIONS=12\nMARQ_SECURITY_PROTOCOL=SASL_PLAINTEXT\nMARQ_SASL_USERNAME=shop\n"
        'MARQ_SASL_PASSWORD="a b#c"\nMARQ_NOTHING\n'
    )

    settings = load_settings()
    client = load_client_settings(settings)

    assert (settings.bootstrap_servers, settings.prefix, settings.web_port) == ("kafka:9092", "shop", 7_000)
    assert (client.bootstrap_servers, client.names.prefix, client.partitions) == ("kafka:9092", "shop", 12)
    assert (client.security_protocol, client.sasl_password) == ("SASL_PLAINTEXT", "a b#c")


def test_the_environment_goes_over_the_file(env_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env_file.write_text("MARQ_WEB_PORT=7000\nMARQ_PARTITIONS=12\n")
    monkeypatch.setenv("MARQ_PARTITIONS", "3")
    monkeypatch.setenv("MARQ_WEB_PORT", "")

    assert load_client_settings(load_settings()).partitions == 3
    # One that is empty says nothing.
    assert load_settings().web_port == 7000


def test_without_a_file_there_is_the_environment(env_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_PREFIX", "shop")

    assert read_environment()["MARQ_PREFIX"] == "shop"
    assert load_settings().prefix == "shop"


def test_a_file_that_cant_be_read_is_named(env_file: Path) -> None:
    env_file.write_bytes(b"MARQ_PREFIX=\xff\n")

    with pytest.raises(ConfigError, match=f"{env_file} can't be read"):
        load_settings()


@pytest.mark.parametrize("line", ["not a variable", 'MARQ_PREFIX="shop'])
def test_a_line_of_the_file_that_cant_be_understood_is_named(env_file: Path, line: str) -> None:
    env_file.write_text(f"# settings\nexport MARQ_WEB_PORT='7000'\n\n{line}\n")

    with pytest.raises(ConfigError, match=r"^\.env, line 4: expected NAME=VALUE; correct the line$"):
        load_settings()


def test_a_wrong_value_in_the_file_is_named(env_file: Path) -> None:
    env_file.write_text("MARQ_WEB_PORT=abc\n")

    with pytest.raises(ConfigError, match=r"MARQ_WEB_PORT: .*integer.*found 'abc'"):
        load_settings()

    env_file.write_text("MARQ_PARTITIONS=abc\n")
    with pytest.raises(ConfigError, match="MARQ_PARTITIONS='abc': expected a number"):
        load_client_settings(load_settings())


def test_the_project_file_is_below_env_file_and_environment(env_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (env_file.parent / "marq.toml").write_text(
        "[settings]\nprefix = 'shop'\nweb_port = 7000\npartitions = 12\nhandlers = ['a', 'b']\ncount_waiting = false\n"
        "[queues.emails]\nlease = 60\n"
    )
    env_file.write_text("MARQ_WEB_PORT=7001\n")
    monkeypatch.setenv("MARQ_PARTITIONS", "3")

    settings = load_settings()

    assert (settings.prefix, settings.web_port, settings.handlers) == ("shop", 7001, ("a", "b"))
    assert not settings.count_waiting
    assert load_client_settings(settings).partitions == 3
    for path in (settings.queues_file, env_file.parent / "marq.toml"):
        assert load_queues(path).queues == {"emails": {"lease": 60}}


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("settings = 3", r"marq.toml: expected a table \[settings\], not 3"),
        ("[settings]\nweb_prot = 1", r"unknown setting 'web_prot'; did you mean 'web_port'\?"),
        ("[settings]\nweb_port = {}", "web_port = {}: expected text, a number, true, false or a list"),
        ("[settings", "marq.toml is not valid TOML"),
    ],
)
def test_a_mistake_in_the_project_file_is_named(env_file: Path, table: str, text: str) -> None:
    (env_file.parent / "marq.toml").write_text(table)

    with pytest.raises(ConfigError, match=text):
        load_settings()


def test_a_variable_that_resembles_a_setting_is_misspelt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("MARQ_REPLICATON_FACTOR=3\nMARQ_REDACT=card\n", encoding="utf-8")
    monkeypatch.setenv("MARQ_REDACTED", "card")

    assert misspelt_variables() == {
        "MARQ_REDACTED": "MARQ_REDACT",
        "MARQ_REPLICATON_FACTOR": "MARQ_REPLICATION_FACTOR",
    }


@pytest.mark.parametrize(
    "name",
    [
        # Ours, of the embedded broker, and of shell completion.
        *("MARQ_HANDLERS_PROCESS", "MARQ_CACHE", "MARQ_BROKER_HEAP", "MARQ_MAVEN_REPOSITORY"),
        "_MARQ_COMPLETE",
        # Those that Kubernetes sets for services named "marq" and "marq-sqs".
        *("MARQ_PORT", "MARQ_SERVICE_HOST", "MARQ_SERVICE_PORT", "MARQ_PORT_6066_TCP_ADDR", "MARQ_SQS_SERVICE_HOST"),
        *("MARQ_SQS_SERVICE_PORT", "MARQ_SQS_PORT_9324_TCP", "MARQ_SQS_PORT_9324_TCP_PORT"),
    ],
)
def test_variables_of_others_are_not_misspelt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "x")

    assert misspelt_variables() == {}


def test_a_command_warns_about_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARQ_PREFX", "shop")

    _setup()

    assert capsys.readouterr().err == (
        "marq: MARQ_PREFX is not a setting of Marq, so it has no effect; did you mean MARQ_PREFIX?\n"
    )
