"""The connector's jars: of the version of Spark, with the committed checksums."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyspark
import pytest

from marq_worker.broker.downloads import Artifact, JarList, cache_directory
from pipeline import jars
from pipeline.errors import PipelineError


def test_the_list_is_for_the_version_of_spark_that_is_installed() -> None:
    version = pyspark.__version__

    assert Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", version).path in jars.read_sums()
    assert Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", version).path in jars.read_sums()
    assert jars.PACKAGE.endswith(f":{version}")


def test_setup_and_sessions_use_the_same_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for environment in (
        {"MARQ_CACHE": str(tmp_path / "one")},
        {"XDG_CACHE_HOME": str(tmp_path / "two")},
        {"XDG_CACHE_HOME": "relative"},
        {},
    ):
        listed = JarList.read(jars.SUMS)

        assert jars.directory(environment) == cache_directory(environment) / listed.name
    assert jars.read_sums() == listed.sums


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_missing_or_damaged_jar_is_named_with_what_to_do(tmp_path: Path, what: str) -> None:
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
