from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from marq.version import VERSION
from marq_worker.client_id import Identity
from marq_worker.config.queues import load_queues

ROOT = Path(__file__).parents[3]


def fingerprint(tmp_path: Path, text: str) -> str:
    file = tmp_path / "queues.toml"
    file.write_text(text)
    return load_queues(file).fingerprint


def test_the_version_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_files_that_define_the_same_have_the_same_fingerprint(tmp_path: Path) -> None:
    one = fingerprint(tmp_path, "[queues.a]\nlease = 5\nmax_attempts = 2\n[queues.b]\n")
    same = fingerprint(tmp_path, "# a comment\n[queues.b]\n[queues.a]\nmax_attempts = 2\nlease = 5\n")
    other = fingerprint(tmp_path, "[queues.a]\nlease = 6\nmax_attempts = 2\n[queues.b]\n")

    assert one == same != other
    assert fingerprint(tmp_path, "") == load_queues(tmp_path / "absent.toml").fingerprint


@pytest.mark.parametrize("base", ["marq", "my-worker-7", "a-1.2-q00"])
def test_a_client_id_is_read_as_it_was_written(base: str, tmp_path: Path) -> None:
    absent = Identity.of(load_queues(tmp_path / "absent.toml"))
    (tmp_path / "marq.toml").write_text("")
    named = Identity.of(load_queues(tmp_path / "marq.toml", project="my-shop.2"))

    for identity in (absent, named):
        assert Identity.read(identity.client_id(base)) == identity
    assert (absent.publishes, named.publishes, named.project) == (False, True, "my-shop.2")


@pytest.mark.parametrize("client_id", ["marq", "aiokafka-0.14.0", "", "marq-q12"])
def test_other_client_ids_say_nothing(client_id: str) -> None:
    assert Identity.read(client_id) is None
