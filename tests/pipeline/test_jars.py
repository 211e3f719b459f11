"""The connector's jars: of the version of Spark, and none that is not the committed one."""

from __future__ import annotations

import re
import shutil
from hashlib import sha256
from pathlib import Path

import pyspark
import pytest

from broker import cache
from broker import jars as brokers_jars
from broker.repository import Artifact
from pipeline import jars
from pipeline.errors import PipelineError


def test_the_list_is_for_the_version_of_spark_that_is_installed() -> None:
    version = pyspark.__version__

    assert Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", version).path in jars.read_sums()
    assert Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", version).path in jars.read_sums()
    assert jars.PACKAGE.endswith(f":{version}")


def test_set_up_puts_them_where_a_session_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for environment in (
        {"MARQ_CACHE": str(tmp_path / "one")},
        {"XDG_CACHE_HOME": str(tmp_path / "two")},
        {"XDG_CACHE_HOME": "relative"},
        {},
    ):
        listed = brokers_jars.read_list(jars.SUMS)

        assert jars.directory(environment) == cache.directory(environment) / listed.name
    assert jars.read_sums() == listed.sums


def test_each_is_there_with_the_right_sum() -> None:
    found = jars.find()

    assert len(found) == len(jars.read_sums())
    assert all(path.is_file() for path in found)


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_one_that_is_not_right_is_named_with_what_to_do(tmp_path: Path, what: str) -> None:
    environment = {"MARQ_CACHE": str(tmp_path)}
    shutil.copytree(jars.directory(), jars.directory(environment))
    [wrong] = [path for path in jars.find(environment) if path.name.startswith("kafka-clients-")]
    wrong.chmod(0o644)
    if what == "missing":
        wrong.unlink()
    else:
        wrong.write_bytes(wrong.read_bytes()[:-1] + b"x")

    named = f"{wrong.name} is {what} in {jars.directory(environment)}"
    with pytest.raises(PipelineError, match=rf"{re.escape(named)}.*run `make setup`.*--packages {jars.PACKAGE}"):
        jars.find(environment)


def test_the_sums_are_those_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    assert jars._sum(tmp_path / "file") == sha256(b"content").hexdigest()
    assert jars._sum(tmp_path / "none") is None
