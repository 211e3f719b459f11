from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import class_archive, java


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARQ_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("needs_spark")
def test_java_starts_from_the_archive_of_its_own_and_of_these_jars(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (chosen := java.home()) is not None:
        monkeypatch.setenv("JAVA_HOME", str(chosen))
    target = class_archive.path()
    assert (target.parent, class_archive.flags()) == (cache, [])
    # An empty archive stands for a Java that writes none.
    target.touch()
    assert class_archive.flags() == []

    target.write_bytes(b"classes")

    assert class_archive.flags()[0] == f"-XX:SharedArchiveFile={target}"


def test_set_up_leaves_it_out_with_the_tests_on_spark(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK", "skip")

    code = class_archive.main()

    assert code == 0
    assert list(cache.iterdir()) == []
