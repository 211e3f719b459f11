"""What a load reads: CSV, JSON lines, Parquet or a table, each with its columns and the text of lines that are none.

Lines that can't be read come with :data:`CORRUPT` filled, so that they can be set aside instead of ending the load.
CSV has text only: "007" stays what it is. A JSON line keeps its own text beside its columns, so that it can go into a
message untouched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from pipeline.errors import PipelineError
from pipeline.sentences import sentence

#: Of a line that can't be read: the line.
CORRUPT = "_corrupt_record"
#: Of a JSON line: the line.
LINE = "_line"
#: As RFC 4180 has it: within quotes two quotes are one. Spark would take a backslash.
_CSV = {"header": "true", "escape": '"'}
FORMATS = ("csv", "json", "parquet", "table")


class Input(NamedTuple):
    """Rows, and the names of their columns as users know them."""

    frame: DataFrame
    columns: list[str]

    def column(self, option: str, name: str) -> Column:
        """Return a column, or a field of one (``address.city``).

        Raises:
            PipelineError: there is none; the text names ``option``.
        """
        quoted = F.col(f"`{name}`") if name in self.columns else F.col(name)
        try:
            if name in (CORRUPT, LINE):
                raise ValueError(name)
            self.frame.select(quoted)
        except (PySparkException, Py4JError, ValueError) as error:
            listed = ", ".join(self.columns) or "none"
            raise PipelineError(f"{option}: there is no column {name!r}; the columns are: {listed}") from error
        return quoted

    def kind(self, column: Column) -> str:
        """Return the type of a column as Spark calls it."""
        return str(self.frame.select(column).schema[0].dataType.simpleString())


def read(spark: SparkSession, path: str, form: str) -> Input:
    """Return the rows of a file, directory or table.

    Raises:
        PipelineError: it is not there, or can't be read as what it is said to be.
    """
    readers: dict[str, Callable[[SparkSession, str], DataFrame]] = {
        "csv": _csv, "json": _json, "parquet": lambda spark, path: spark.read.parquet(path), "table": _table,
    }  # fmt: skip
    try:
        frame = readers[form](spark, path)
        columns = [name for name in frame.columns if name not in (CORRUPT, LINE)]
    except (PySparkException, Py4JError) as error:
        raise unreadable(path, form, error) from error
    if not columns and CORRUPT not in frame.columns:
        raise PipelineError(f"{path}: there are no columns in it; is it {form}?")
    return Input(frame, columns)


def unreadable(path: str, form: str, error: BaseException) -> PipelineError:
    """Return the sentence for an input that can't be read."""
    condition = getattr(error, "getCondition", lambda: None)() or ""
    if condition.startswith("PATH_NOT_FOUND"):
        return PipelineError(f"{path}: there is no such file or directory")
    if condition.startswith("TABLE_OR_VIEW_NOT_FOUND"):
        return PipelineError(f"{path}: there is no such table")
    if condition.startswith("UNABLE_TO_INFER_SCHEMA"):
        return PipelineError(f"{path}: there is nothing in it that could be read as {form}")
    return PipelineError(f"{path}: it can't be read as {form} ({sentence(error)})")


def identity(spark: SparkSession, path: str, form: str) -> str | None:
    """Return what tells this input from another one: names, sizes and times of its files; None where it is gone."""
    if form == "table":
        return path
    java: Any = spark.sparkContext._jvm
    where = java.org.apache.hadoop.fs.Path(path)
    system = where.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    found = []
    for status in system.globStatus(where) or ():
        if status.isFile():
            found.append(_told(status))
            continue
        files = system.listFiles(status.getPath(), True)
        while files.hasNext():
            found.append(_told(files.next()))
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest() if found else None


def _told(status: Any) -> str:
    return f"{status.getPath()} {status.getLen()} {status.getModificationTime()}"


def _csv(spark: SparkSession, path: str) -> DataFrame:
    named = spark.read.options(**_CSV).csv(path).schema
    if not named.names:
        return spark.createDataFrame([], StructType())
    schema = StructType([*named.fields, StructField(CORRUPT, StringType())])
    options = {**_CSV, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    # Columns are found by the header of each file, which has to be the same in all.
    return spark.read.options(**options, enforceSchema="false").schema(schema).csv(path)


def _json(spark: SparkSession, path: str) -> DataFrame:
    found = spark.read.option("columnNameOfCorruptRecord", CORRUPT).json(path).schema
    schema = StructType(
        [*(field for field in found.fields if field.name != CORRUPT), StructField(CORRUPT, StringType())]
    )
    lines = spark.read.text(path).where(F.trim("value") != "")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    parsed = lines.select(F.col("value").alias(LINE), F.from_json("value", schema, options).alias("row"))
    # An array, or a lone number, is JSON, too, but no row.
    corrupt = F.when(F.ltrim(LINE).startswith("{"), F.col(CORRUPT)).otherwise(F.col(LINE))
    return parsed.select(LINE, "row.*").withColumn(CORRUPT, corrupt)


def _table(spark: SparkSession, name: str) -> DataFrame:
    return spark.table(name)
