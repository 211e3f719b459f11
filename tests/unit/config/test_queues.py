"""Definitions of queues in a file: what is wrong is named, with the queue and the key."""

from pathlib import Path

import pytest

from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.errors import ConfigError
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import load_settings


def write(folder: Path, text: str) -> Path:
    path = folder / "queues.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_that_does_not_exist_defines_nothing(tmp_path: Path) -> None:
    file = load_queues(tmp_path / "absent.toml")

    assert (file.defaults, file.queues) == ({}, {})
    assert file.definitions("anything") == QueueSettings()


def test_a_file_is_read_as_the_documents_that_it_has(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[defaults]\nlease = 10\nmax_attempts = 7\n"
        '[queues.emails]\nmax_attempts = 2\nbackoff = { base = 0.5, jitter = false }\ngroup = "background"\n',
    )

    file = load_queues(path)

    assert file.defaults == {"lease": 10, "max_attempts": 7}
    assert file.queues == {
        "emails": {"max_attempts": 2, "backoff": {"base": 0.5, "jitter": False}, "group": "background"}
    }
    assert file.definitions("emails") == QueueSettings(10_000, 2, Backoff(500, 2.0, 600_000, False), group="background")
    assert file.definitions("other").max_attempts == 7


def test_the_file_that_comes_with_the_project_says_the_defaults() -> None:
    assert load_queues(Path("marq.toml")).definitions("anything") == QueueSettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[queues.emails]\nlese = 3", r"\[queues.emails\]: lese: unknown key"),
        ('[queues.emails]\nlease = "3"', r"\[queues.emails\]: lease: .*number.*'3'"),
        ("[queue.emails]\nlease = 3", r"unknown table 'queue'; expected \[defaults\], \[queues.NAME\] and \[sch"),
        ("queues = 3", r"expected tables \[queues.NAME\], not 3"),
        ("[queues]\nemails = 3", r"\[queues.emails\]: expected a table of settings, not 3"),
        ("defaults = 3", r"\[defaults\]: expected a table of settings, not 3"),
        ("[defaults]\nmax_lease = 60\n[queues.a]\nlease = 90", r"queue 'a': max_lease = 60 .* than lease = 90"),
        ("[defaults]\nmax_lease = 10", r"\[defaults\]: max_lease = 10 is shorter than lease = 30"),
        ('[defaults]\nhandler = "a:b"', r"\[defaults\] can't name 'handler'"),
        ("[queues.emails", r"is not valid TOML"),
        ('[queues."a\\u0000b"]\nlease = 3', r"unprintable characters"),
        ('[queues.a]\ntopic = "t"\nstart = "end"', r"start: expected 'earliest' or 'latest', not 'end'"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=said):
        load_queues(path)


MIXED = '[queues.a]\ngroup = "g"\nhandler = "m:f"\n[queues.b]\ngroup = "g"\n[queues.c]\n'


@pytest.mark.parametrize(
    ("text", "group"), [(MIXED, "g"), ('[queues.a]\nhandler = "m:f"\n[queues.b]\ngroup = "handlers"\n', "handlers")]
)
def test_a_group_that_workers_and_consumers_would_share_is_refused_and_both_sides_are_named(
    tmp_path: Path, text: str, group: str
) -> None:
    with pytest.raises(ConfigError, match=f"group '{group}': queue 'a' has a handler and queue 'b' has none"):
        load_queues(write(tmp_path, text))


def test_a_handler_in_code_counts(tmp_path: Path) -> None:
    path = write(tmp_path, MIXED)

    assert load_queues(path, ["b"]).definitions.queues_of("g") == ["a", "b"]
    # Where the handlers are not known.
    assert load_queues(path, None).definitions.queues_of("g") == ["a", "b"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MARQ_WEB_PORT", "abc"),
        ("MARQ_WEB_PORT", "0"),
        ("MARQ_SESSION_TIMEOUT", "1"),
        ("MARQ_FLUSH_INTERVAL", "-1"),
        ("MARQ_PREFIX", "a/b"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigError, match=variable):
        load_settings()


def test_schedules_are_read_and_mistakes_are_named_with_schedule_and_key(tmp_path: Path) -> None:
    text = '[schedules.daily]\nqueue = "reports"\ncron = "0 9 * * *"\n'
    file = load_queues(write(tmp_path, text))
    assert file.schedules == {"daily": {"queue": "reports", "cron": "0 9 * * *"}}
    assert file.definitions.schedules.current["daily"].queue == "reports"
    assert file.fingerprint != load_queues(write(tmp_path, "")).fingerprint

    for wrong, said in [
        ("often = true", r"\[schedules.daily\]: often: unknown key"),
        ("value = 2026-01-01", r"\[schedules.daily\]: value: expected text, or a value for JSON"),
        ('timezone = "Mars/Base"', r"schedule 'daily': timezone: 'Mars/Base' is unknown"),
    ]:
        with pytest.raises(ConfigError, match=said):
            load_queues(write(tmp_path, text + wrong))
    with pytest.raises(ConfigError, match=r"\[schedules.daily\]: cron is missing"):
        load_queues(write(tmp_path, '[schedules.daily]\nqueue = "reports"'))
    with pytest.raises(ConfigError, match="expected the name of a schedule"):
        load_queues(write(tmp_path, text.replace("daily", '"a b"')))
