"""Scenario 30: what can't be configured is refused by name, by clients and by the worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import marq
from config.queues import load_queues
from tests.worker.harness import Worker


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lease": 0}, "lease=0"),
        ({"lease": -1}, "lease=-1"),
        ({"lease": "30"}, "lease='30'"),
        ({"lease": True}, "lease=True"),
        ({"lease": 10_000_000}, "lease=10000000"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"instance_id": 7}, "instance_id=7"),
        ({"session_timeout": 0}, "session_timeout=0"),
        ({"bootstrap_servers": "localhost"}, "bootstrap_servers='localhost'"),
    ],
)
def test_scenario_30_a_setting_of_a_consumer_that_can_not_be_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(marq.ConfigError) as caught:
        marq.Consumer("emails", **options)

    assert str(caught.value).startswith(f"{named}: expected ")


def test_scenario_30_a_max_lease_shorter_than_the_lease_names_both() -> None:
    with pytest.raises(marq.ConfigError, match=r"^max_lease=10 is shorter than lease=30"):
        marq.Consumer("emails", lease=30, max_lease=10)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("visibility_timeout", "marq calls it lease"),
        ("max_retries", "marq calls it max_attempts"),
        ("leese", "unexpected keyword argument 'leese'"),
    ],
)
def test_scenario_30_an_unknown_setting_of_a_consumer_is_named(word: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        marq.Consumer("emails", **{word: 1})

    assert repr(word) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("queues", "named"),
    [
        ("[queues.emails]\nlease = 0", "[queues.emails]: lease: "),
        ("[queues.emails]\nlease = 1e12", "[queues.emails]: lease: "),
        ("[queues.emails]\nmax_attempts = -1", "[queues.emails]: max_attempts: "),
        ("[queues.emails]\nmax_attempts = '5'", "[queues.emails]: max_attempts: "),
        ("[queues.emails]\nvisibility_timeout = 30", "[queues.emails]: visibility_timeout: unknown key"),
        ("[queues.emails]\nhandler = 'no colon'", "[queues.emails]: handler: "),
        ("[defaults.backoff]\nbase = 'soon'", "[defaults]: backoff.base: "),
        ("[queue.emails]", "unknown table 'queue'"),
    ],
)
def test_scenario_30_a_wrong_key_of_a_queue_is_named_with_the_file(tmp_path: Path, queues: str, named: str) -> None:
    path = tmp_path / "queues.toml"
    path.write_text(queues)

    with pytest.raises(marq.ConfigError) as caught:
        load_queues(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert named in str(caught.value)


async def test_scenario_30_a_worker_says_which_key_of_its_queues_is_wrong_and_ends(
    new_worker: Callable[..., Worker],
) -> None:
    worker = new_worker(queues="[queues.emails]\nvisibility_timeout = 30").start()

    code = await worker.ended()

    assert code != 0
    assert f"{worker.directory / 'queues.toml'}: [queues.emails]: visibility_timeout: unknown key" in worker.log()
