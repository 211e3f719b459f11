"""The data directory: tables of Parquet files, and the commits that say which files count.

::

    DATA/about.json                     which installation's data it is, and in which format
    DATA/markers/batch=000000007/…      files of a batch: there as a whole, or not at all
    DATA/_commits/markers/000000007.json  … and it counts: its files, and from where to where they go in Kafka
    DATA/_staging/…                     what is being written
    DATA/_checkpoints/…                 Spark's own
    DATA/_locks/…                       held by whoever is at work

A batch is written beside the tables, renamed into its place, and then committed. Whoever dies in between writes the
batch once more: it has the same number and the same records, so what is there of it is taken away first. A reader that
only lists a table's directory, as pyarrow does (names that begin with ``_`` or ``.`` are passed over), sees whole
batches, each once. A reader that goes by the commits sees those that count.

On a file system where directories cannot be renamed at once (object stores), go by the commits.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipeline.errors import PipelineError
from pipeline.tables import FORMAT

_COMMITS, _STAGING, _CHECKPOINTS, _LOCKS, _ABOUT = "_commits", "_staging", "_checkpoints", "_locks", "about.json"
_PATTERN = "*?[]{}"

Commit = dict[str, Any]


class Lake:
    """A data directory; ``path`` is one of this machine, or a URI that Spark's Hadoop knows."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._jvm = spark._jvm
        root = self._hadoop_path(path)
        try:
            self._files = root.getFileSystem(spark._jsc.hadoopConfiguration())
        except Exception as error:
            raise PipelineError(f"data directory {path!r}: no such file system ({_first_line(error)})") from None
        self.path: str = self._files.makeQualified(root).toString().removesuffix("/")
        self._look()

    def _hadoop_path(self, path: str) -> Any:
        try:
            return self._jvm.org.apache.hadoop.fs.Path(path)
        except Exception as error:
            raise PipelineError(f"data directory {path!r}: {_first_line(error)}") from None

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if set(self.path) & set(_PATTERN):
            raise PipelineError(f"data directory {self.path}: without {_PATTERN}, which Spark takes for patterns")
        root = self._hadoop_path(self.path)
        if self._files.exists(root) and not self._files.getFileStatus(root).isDirectory():
            raise PipelineError(f"data directory {self.path}: expected a directory, and it is a file")
        about = self.about()
        if about.get("format", FORMAT) > FORMAT:
            raise PipelineError(
                f"{self.path} has format {about['format']}, and this pipeline knows up to {FORMAT}: use a newer one"
            )

    def about(self) -> Commit:
        """Return what the directory says of itself; nothing if it is new."""
        text = self.read_text(_ABOUT)
        try:
            about = {} if text is None else json.loads(text)
            if about and not (isinstance(about["format"], int) and about["cluster"] and about["prefix"]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise PipelineError(f"{self.path}/{_ABOUT} is not as ingest writes it: is this a data directory?") from None
        found: Commit = about
        return found

    @contextmanager
    def alone(self, job: str) -> Iterator[None]:
        """Keep a second process from doing the same job here; on a cluster's file system nobody looks.

        Raises:
            PipelineError: another one does it.
        """
        if not self.path.startswith("file:"):
            yield
            return
        folder = Path(self.path.removeprefix("file:"), _LOCKS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / job).open("a")
        except OSError as error:
            raise PipelineError(f"data directory {self.path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipelineError(f"another {job} is at work in {self.path}: wait for it, or stop it") from None
            yield  # the lock ends with the file, or with the process

    def belong(self, cluster: str, prefix: str) -> None:
        """Make it the directory of an installation.

        Raises:
            PipelineError: it is another one's.
        """
        about = self.about()
        if not about:
            self.write_text(_ABOUT, json.dumps({"format": FORMAT, "cluster": cluster, "prefix": prefix}))
        elif (about["cluster"], about["prefix"]) != (cluster, prefix):
            raise PipelineError(
                f"{self.path} has the data of {about['prefix']!r} on cluster {about['cluster']}, not of {prefix!r} on"
                f" {cluster}: give each installation a directory of its own (--data)"
            )

    # --- batches ------------------------------------------------------------------------------------------------------

    def commits(self, stream: str) -> list[Commit]:
        """Return the commits of a stream, in order."""
        return [json.loads(self._text(f"{_COMMITS}/{stream}/{name}")) for name in self.names(f"{_COMMITS}/{stream}")]

    def commit(self, stream: str, number: int) -> Commit | None:
        """Return one commit; None if it was not made."""
        text = self.read_text(f"{_COMMITS}/{stream}/{number:09}.json")
        return None if text is None else json.loads(text)

    def last_commit(self, stream: str) -> Commit | None:
        """Return the newest commit of a stream; None if there is none."""
        names = self.names(f"{_COMMITS}/{stream}")
        return json.loads(self._text(f"{_COMMITS}/{stream}/{names[-1]}")) if names else None

    def stage(self, stream: str, number: int) -> str:
        """Return an empty place to write a batch to."""
        place = f"{_STAGING}/{stream}-{number:09}"
        self.delete(place)
        return f"{self.path}/{place}"

    def staged(self, stream: str, number: int, part: str) -> bool:
        """Whether anything was written to a part of a stage."""
        return self.exists(f"{_STAGING}/{stream}-{number:09}/{part}")

    def publish(self, stream: str, number: int, staged: Mapping[str, str], commit: Commit) -> None:
        """Make a batch count: ``staged`` says, for each table, which part of the stage are its files.

        ``commit`` is what to remember of it.
        """
        stage = f"{_STAGING}/{stream}-{number:09}"
        tables = {}
        for table, part in staged.items():
            place = f"{table}/batch={number:09}"
            self.delete(place)
            source = f"{stage}/{part}" if part else stage
            if self.exists(source):
                self.delete(f"{source}/_SUCCESS")
                self.rename(source, place)
                tables[table] = place
        said = {"batch": number, "tables": tables, **commit}
        self.write_text(f"{_COMMITS}/{stream}/{number:09}.json", json.dumps(said))
        self.delete(stage)

    def checkpoint(self, stream: str) -> str:
        """Return the place where Spark remembers how far a stream is."""
        return f"{self.path}/{_CHECKPOINTS}/{stream}"

    def table(self, table: str, schema: StructType, commits: Iterable[Commit]) -> DataFrame:
        """Return the rows of a table that some commits brought."""
        return self.files(schema, [commit["tables"][table] for commit in commits if table in commit["tables"]])

    def files(self, schema: StructType, places: Sequence[str]) -> DataFrame:
        """Return the rows in some directories; what their files lack is null."""
        if not places:
            return self._spark.createDataFrame([], schema)
        # The parts of a table lie in directories of several kinds: what they are called is to be a column for all.
        root = places[0].partition("/")[0]
        reader = self._spark.read.schema(schema).option("basePath", f"{self.path}/{root}")
        return reader.parquet(*[f"{self.path}/{place}" for place in places])

    # --- tables that are replaced as a whole --------------------------------------------------------------------------

    def write(self, table: str, frame: DataFrame, partition_by: Sequence[str] = ()) -> None:
        """Replace a table: whoever reads it by its commit sees the former rows, or the new ones."""
        with self.alone(table):
            before = self.commits(table)
            number = before[-1]["batch"] + 1 if before else 0
            frame.write.partitionBy(*partition_by).parquet(self.stage(table, number))
            self.publish(table, number, {table: ""}, {"schema": frame.schema.jsonValue()})
            for commit in before:
                self.forget(table, commit)

    def read(self, table: str) -> DataFrame:
        """Return a table as its last commit says.

        Raises:
            PipelineError: there is none yet.
        """
        commit = self.last_commit(table)
        if commit is None:
            raise PipelineError(f"{self.path} has no table {table!r} yet: run `python -m pipeline {table}` first")
        places = commit.get("places") or list(commit["tables"].values())
        return self.files(StructType.fromJson(commit["schema"]), places)

    def forget(self, stream: str, commit: Commit) -> None:
        """Take a batch away that another one has replaced."""
        self.delete(f"{_COMMITS}/{stream}/{commit['batch']:09}.json")
        for place in commit["tables"].values():
            self.delete(place)

    # --- files --------------------------------------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._hadoop_path(f"{self.path}/{name}")))

    def names(self, name: str) -> list[str]:
        """Return the names in a directory, sorted; none if it is not there."""
        if not self.exists(name):
            return []
        found = self._files.listStatus(self._hadoop_path(f"{self.path}/{name}"))
        return sorted(each.getPath().getName() for each in found if not each.getPath().getName().startswith("."))

    def delete(self, name: str) -> None:
        self._files.delete(self._hadoop_path(f"{self.path}/{name}"), True)

    def rename(self, source: str, target: str) -> None:
        """Move a directory or file; what is at the target must be away."""
        to = self._hadoop_path(f"{self.path}/{target}")
        self._files.mkdirs(to.getParent())
        if not self._files.rename(self._hadoop_path(f"{self.path}/{source}"), to):
            raise PipelineError(f"{self.path}: {source} cannot be renamed to {target}; who else writes there?")

    def claim(self, source: str, target: str) -> bool:
        """Move a directory to a name that nobody has; False if somebody has it."""
        hadoop = self._jvm.org.apache.hadoop.fs
        context = hadoop.FileContext.getFileContext(self._files.getUri(), self._spark._jsc.hadoopConfiguration())
        # Unlike the other interface's, this rename never moves into a directory that is there.
        nothing = self._spark.sparkContext._gateway.new_array(hadoop.Options.Rename, 0)
        try:
            context.rename(*[self._hadoop_path(f"{self.path}/{name}") for name in (source, target)], nothing)
        except Exception:
            if self.exists(target):
                return False
            raise
        return True

    def read_text(self, name: str) -> str | None:
        """Return what a small file says; None if it is not there."""
        return self._text(name) if self.exists(name) else None

    def _text(self, name: str) -> str:
        stream = self._files.open(self._hadoop_path(f"{self.path}/{name}"))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file: readers see the whole of it, or the one before."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file: readers see the whole of it, or the one before."""
        folder, _, last = name.rpartition("/")
        new = self._hadoop_path(f"{self.path}/{folder}/.{last}.new")
        stream = self._files.create(new, True)
        stream.write(bytearray(content))
        stream.close()
        # Of both of Hadoop's interfaces only this one puts a file in the place of another at once.
        hadoop = self._jvm.org.apache.hadoop.fs
        overwrite = self._spark.sparkContext._gateway.new_array(hadoop.Options.Rename, 1)
        overwrite[0] = hadoop.Options.Rename.OVERWRITE
        context = hadoop.FileContext.getFileContext(self._files.getUri(), self._spark._jsc.hadoopConfiguration())
        context.rename(new, self._hadoop_path(f"{self.path}/{name}"), overwrite)


def _first_line(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else java.getMessage() or java.getClass().getName()
    return text.splitlines()[0] if text else type(error).__name__
