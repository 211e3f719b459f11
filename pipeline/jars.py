"""Spark's Kafka connector, whose jars ``make setup`` downloads and every session verifies against connector.sha256.

Spark comes without them. Cluster users may provide them in Spark's own ways instead (``--packages``, ``--jars``, in the
image); then this module is not used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import file_digest
from importlib import resources
from pathlib import Path

import pyspark

from pipeline.errors import PipelineError

#: A resource, because the code may be in a zip.
SUMS = resources.files("pipeline") / "connector.sha256"
#: A class loader that knows this class has the connector.
CONNECTOR_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
#: Spark and its connector must have the same version.
PACKAGE = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where ``make setup`` puts the jars."""
    return cache_directory(environment) / f"spark-kafka-{pyspark.__version__}"


def read_sums() -> dict[str, str]:
    """Return the SHA-256 of each path in a Maven repository, in the file's order."""
    lines = (line.split() for line in SUMS.read_text(encoding="ascii").splitlines() if not line.startswith("#"))
    return {path: digest for digest, path in lines}


def find(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the verified jars; raises PipelineError if one is missing or damaged."""
    root = directory(environment)
    for path, digest in read_sums().items():
        try:
            with (root / path).open("rb") as file:
                problem = None if file_digest(file, "sha256").hexdigest() == digest else "is damaged"
        except OSError:
            problem = "is missing"
        if problem is not None:
            raise PipelineError(
                f"Spark's Kafka connector: {path.rpartition('/')[2]} {problem} in {root}; run `make setup`, "
                f"or bring it in Spark's own way: spark-submit --packages {PACKAGE}"
            )
    return [root / path for path in read_sums()]


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache: $MARQ_CACHE, $XDG_CACHE_HOME/marq, or ~/.cache/marq, as for the broker's jars."""
    own, shared = environment.get("MARQ_CACHE"), environment.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().resolve()
    # The XDG specification says to ignore a relative path.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "marq"
    return Path.home() / ".cache" / "marq"
