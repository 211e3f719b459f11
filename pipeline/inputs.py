"""Reads the input of a load: CSV, JSON lines, Parquet or a table.

Unreadable lines come with :data:`CORRUPT` set, so that a load can set them aside instead of failing. CSV columns are
text: "007" stays "007". A JSON line keeps its text, so that a message can contain it unchanged.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from pipeline.errors import PipelineError, sentence

#: Columns with the text of an unreadable line, and of a JSON line.
CORRUPT, LINE = "_corrupt_record", "_line"
#: As in RFC 4180, a quote within quotes is doubled; Spark's default is a backslash.
_CSV = {"header": "true", "escape": '"'}
_PERMISSIVE = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
FORMATS = ("csv", "json", "parquet", "table")


class Input(NamedTuple):
    """Rows, and the names of the user's columns."""

    frame: DataFrame
    columns: list[str]

    def column(self, option: str, name: str) -> Column:
        """Return a column, or a field of one (``address.city``); raises PipelineError if it does not exist."""
        column = F.col(f"`{name}`") if name in self.columns else F.col(name)
        try:
            if name in (CORRUPT, LINE):
                raise ValueError(name)
            self.frame.select(column)
        except (PySparkException, Py4JError, ValueError) as error:
            listed = ", ".join(self.columns) or "none"
            raise PipelineError(f"{option}: there is no column {name!r}; the columns are: {listed}") from error
        return column

    def kind(self, column: Column) -> str:
        """Return Spark's name of a column's type."""
        return str(self.frame.select(column).schema[0].dataType.simpleString())


def read(spark: SparkSession, path: str, form: str) -> Input:
    """Return the rows of a file, directory or table; raises PipelineError if it is missing or unreadable."""
    try:
        if form == "csv":
            frame = _csv(spark, path)
        elif form == "json":
            frame = _json(spark, path)
        else:
            frame = spark.read.parquet(path) if form == "parquet" else spark.table(path)
        columns = [name for name in frame.columns if name not in (CORRUPT, LINE)]
    except (PySparkException, Py4JError) as error:
        raise unreadable(path, form, error) from error
    if not columns and CORRUPT not in frame.columns:
        raise PipelineError(f"{path}: it has no columns; is it {form}?")
    return Input(frame, columns)


def unreadable(path: str, form: str, error: BaseException) -> PipelineError:
    condition = getattr(error, "getCondition", lambda: None)() or ""
    for prefix, text in (
        ("PATH_NOT_FOUND", "there is no such file or directory"),
        ("TABLE_OR_VIEW_NOT_FOUND", "there is no such table"),
        ("UNABLE_TO_INFER_SCHEMA", f"it contains nothing that can be read as {form}"),
    ):
        if condition.startswith(prefix):
            return PipelineError(f"{path}: {text}")
    return PipelineError(f"{path}: it can't be read as {form} ({sentence(error)})")


def identity(spark: SparkSession, path: str, form: str) -> str | None:
    """Return a digest of the names, sizes and times of the input's files; None if there are none."""
    if form == "table":
        return path
    jvm: Any = spark.sparkContext._jvm
    pattern = jvm.org.apache.hadoop.fs.Path(path)
    system = pattern.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    files: list[Any] = []
    for status in system.globStatus(pattern) or ():
        # Those in a directory, or the file itself.
        listed = system.listFiles(status.getPath(), True)
        while listed.hasNext():
            files.append(listed.next())
    lines = sorted(f"{file.getPath()} {file.getLen()} {file.getModificationTime()}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


def _csv(spark: SparkSession, path: str) -> DataFrame:
    named = spark.read.options(**_CSV).csv(path).schema
    if not named.names:
        return spark.createDataFrame([], StructType())
    schema = StructType([*named.fields, StructField(CORRUPT, StringType())])
    # Columns follow the header of each file, which must be the same in all.
    return spark.read.options(**_CSV, **_PERMISSIVE, enforceSchema="false").schema(schema).csv(path)


def _json(spark: SparkSession, path: str) -> DataFrame:
    inferred = spark.read.option("columnNameOfCorruptRecord", CORRUPT).json(path).schema
    fields = [field for field in inferred.fields if field.name != CORRUPT]
    schema = StructType([*fields, StructField(CORRUPT, StringType())])
    lines = spark.read.text(path).where(F.trim("value") != "")
    parsed = lines.select(F.col("value").alias(LINE), F.from_json("value", schema, _PERMISSIVE).alias("row"))
    # An array or a number alone is valid JSON, but not a row.
    corrupt = F.when(F.ltrim(LINE).startswith("{"), F.col(CORRUPT)).otherwise(F.col(LINE))
    return parsed.select(LINE, "row.*").withColumn(CORRUPT, corrupt)
