"""Definitions of queues: what is wrong is named, with the queue and the key."""

from pathlib import Path

import pytest

from config.queues import load_queues
from config.settings import load_settings
from marq.core.backoff import Backoff
from marq.core.errors import ConfigError
from marq.core.queue import QueueSettings


def write(folder: Path, text: str) -> Path:
    path = folder / "queues.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_queue_that_nobody_defined_works_with_the_defaults(tmp_path: Path) -> None:
    queues = load_queues(tmp_path / "absent.toml")

    assert queues("anything") == QueueSettings()


def test_a_queue_takes_what_it_does_not_say_from_the_defaults_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[defaults]\nlease = 10\nmax_attempts = 7\n"
        "[queues.emails]\nmax_attempts = 2\nbackoff = { base = 0.5, jitter = false }\n",
    )

    queues = load_queues(path)

    assert queues("emails") == QueueSettings(10_000, 2, Backoff(500, 2.0, 600_000, False))
    assert queues("other").max_attempts == 7


def test_the_file_that_comes_with_the_project_says_the_defaults() -> None:
    assert load_queues(Path("config/queues.toml"))("anything") == QueueSettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[queues.emails]\nlese = 3", r"\[queues.emails\]: lese: unknown key"),
        ('[queues.emails]\nlease = "3"', r"\[queues.emails\]: lease: .*number.*'3'"),
        ("[queues.emails]\nlease = 0", r"\[queues.emails\]: lease: .*greater than 0"),
        ("[queues.emails]\nmax_attempts = 0", r"max_attempts: .*greater than or equal to 1"),
        ("[queues.emails]\nmax_attempts = true", r"max_attempts: .*integer"),
        ("[queues.emails]\nbackoff = { base = -1 }", r"backoff.base"),
        ('[queues.emails]\nhandler = "no_function"', r"handler"),
        ("[queues.emails]\ndead_letter = 1", r"dead_letter: .*boolean"),
        ("[queue.emails]\nlease = 3", r"unknown table 'queue'; expected \[defaults\] and \[queues.NAME\]"),
        ("[queues]\nemails = 3", r"\[queues.emails\] is a table, not 3"),
        ('[defaults]\nhandler = "a:b"', r"\[defaults\] can't name a handler"),
        ("[queues.emails", r"is no TOML"),
        ('[queues."a\\u0000b"]\nlease = 3', r"can't be printed"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=said):
        load_queues(path)


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
