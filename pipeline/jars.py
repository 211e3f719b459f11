"""Spark's Kafka connector: connector.sha256 says which jars, set-up brought them, every session checks the sums.

Spark itself comes without them. Who runs on a cluster may bring them in Spark's own ways instead (``--packages``,
``--jars``, in the image); then nothing here is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import file_digest
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import pyspark

from pipeline.errors import PipelineError

#: No file where the code came in a zip.
SUMS = resources.files("pipeline") / "connector.sha256"
#: In the connector's jar; where a class loader knows it, the connector is there.
CONNECTOR_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
#: Spark and its connector have to be of one version.
PACKAGE = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where set-up puts them: in $MARQ_CACHE, $XDG_CACHE_HOME/marq, or ~/.cache/marq, as the broker's jars."""
    return cache_directory(environment) / f"spark-kafka-{pyspark.__version__}"


def read_sums(file: Traversable = SUMS) -> dict[str, str]:
    """Return path in a Maven repository -> SHA-256, in the file's order."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines() if not line.startswith("#"))
    return {path: digest for digest, path in lines}


def find(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the verified jars.

    Raises:
        PipelineError: one is missing or damaged.
    """
    root = directory(environment)
    for path, digest in read_sums().items():
        if (found := _sum(root / path)) != digest:
            raise _unusable(root, "is missing" if found is None else "is damaged", path)
    return [root / path for path in read_sums()]


def _unusable(root: Path, what: str, path: str) -> PipelineError:
    jar = path.rpartition("/")[2]
    return PipelineError(
        f"Spark's Kafka connector is not there: {jar} {what} in {root}; run `make setup`, or bring it in Spark's own "
        f"way: spark-submit --packages {PACKAGE}"
    )


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where downloads and what is made of them live."""
    own, shared = environment.get("MARQ_CACHE"), environment.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().resolve()
    # The XDG specification says that a relative path is to be ignored.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "marq"
    return Path.home() / ".cache" / "marq"


def _sum(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
