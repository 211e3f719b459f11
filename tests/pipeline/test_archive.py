from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import archive


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARQ_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("needs_spark", "cache")
def test_java_is_told_of_no_archive_where_there_is_none() -> None:
    assert archive.flags() == []


@pytest.mark.usefixtures("needs_spark", "cache")
def test_an_empty_archive_stands_for_a_java_that_writes_none() -> None:
    archive.path().touch()

    assert archive.flags() == []


@pytest.mark.usefixtures("needs_spark", "cache")
def test_java_starts_from_the_archive_of_its_own_and_of_these_jars(tmp_path: Path) -> None:
    target = archive.path()
    target.write_bytes(b"classes")

    found = archive.flags()

    assert target.parent == tmp_path
    assert found[0] == f"-XX:SharedArchiveFile={target}"


def test_set_up_leaves_it_out_with_the_tests_on_spark(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK", "skip")

    code = archive.main()

    assert code == 0
    assert list(cache.iterdir()) == []
