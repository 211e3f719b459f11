"""The data directory: tables of Parquet files, and the commits that say which files count.

::

    DATA/about.json                       the cluster, the namespace and the format of the data
    DATA/markers/batch=000000007/…        the files of a batch: complete, or absent
    DATA/_commits/markers/000000007.json  makes all batches up to this one count; has the Kafka offsets of their end
    DATA/_staging/…                       files being written
    DATA/_locks/…                         locks of running jobs

A batch is written outside the tables, renamed into its place, and then committed. If the process dies in between, the
next one begins at the offsets of the last commit, writes a batch with the same number, and first deletes what is in its
place. Readers that only list a table's directory, as pyarrow does (it ignores names that begin with ``_`` or ``.``),
see complete batches, each once. Readers that follow the commits see the batches that count.

Only the last two commits of each stream are kept: a directory with one for each batch would take longer to list each
day. Follow the commits on a file system that can't rename directories atomically (object stores).

``maintain`` exchanges batches for others with the same rows. All of its new batches are staged before the commit, which
is *open* until each of them is in its place. Until then, the tables lack batches that the stage has, so every job that
reads these tables first finishes an open commit (:meth:`Lake.finish`).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipeline.errors import PipelineError, root_cause
from pipeline.tables import FORMAT, LIFECYCLE_TABLE, LIVE_TABLE, STREAMS

_COMMITS, _STAGING, _LOCKS, _ABOUT = "_commits", "_staging", "_locks", "about.json"
_PATTERN = "*?[]{}"
#: Up to this many batches are looked up by name.
_FEW = 100

Commit = dict[str, Any]
#: The streams of the commits that end rounds of ``ingest``, and of those that exchange batches.
ROUNDS, MAINTAIN = "rounds", "maintain"


class Lake:
    """A data directory; ``path`` is on this machine, or a URI that Spark's Hadoop supports."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        jvm: Any = spark._jvm
        self._hadoop = jvm.org.apache.hadoop.fs
        self._configuration = spark._jsc.hadoopConfiguration()
        try:
            root = self._hadoop.Path(path)
            self._files = root.getFileSystem(self._configuration)
        except Exception as error:
            raise PipelineError(f"data directory {path!r}: no such file system ({root_cause(error)[1]})") from None
        self.path: str = self._files.makeQualified(root).toString().removesuffix("/")
        if set(self.path) & set(_PATTERN):
            raise PipelineError(f"data directory {self.path}: expected a path without {_PATTERN}, Spark's patterns")
        if self._files.exists(root) and not self._files.getFileStatus(root).isDirectory():
            raise PipelineError(f"data directory {self.path}: expected a directory, got a file")
        version = self.about().get("format", FORMAT)
        if version != FORMAT:
            raise PipelineError(
                f"{self.path} has format {version}, and this pipeline needs format {FORMAT}: use a pipeline of its"
                " format, or start over with an empty data directory (--data)"
            )

    def about(self) -> Commit:
        """Return the description of the directory; empty if it is new."""
        text = self.read_text(_ABOUT)
        if text is None:
            return {}
        try:
            about: Commit = json.loads(text)
            if not (isinstance(about["format"], int) and about["cluster"] and about["prefix"]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise PipelineError(f"{self.path}/{_ABOUT} was not written by ingest: is this a data directory?") from None
        return about

    @contextmanager
    def alone(self, job: str) -> Iterator[None]:
        """Keep a second process from running the same job here; there is no lock on a cluster's file system."""
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
                raise PipelineError(f"another {job} is running in {self.path}: wait for it, or stop it") from None
            yield  # the lock ends with the file, or with the process

    def belong(self, cluster: str, prefix: str) -> None:
        """Bind the directory to a cluster and namespace; raises PipelineError if it is bound to others."""
        about = self.about()
        if not about:
            self.write_text(_ABOUT, json.dumps({"format": FORMAT, "cluster": cluster, "prefix": prefix}))
        elif (about["cluster"], about["prefix"]) != (cluster, prefix):
            raise PipelineError(
                f"{self.path} has the data of {about['prefix']!r} on cluster {about['cluster']}, not of {prefix!r} on"
                f" {cluster}: use a separate directory for each cluster and prefix (--data)"
            )

    def last_commit(self, stream: str) -> Commit | None:
        """Return the newest commit of a stream; None if there is none."""
        names = self.names(f"{_COMMITS}/{stream}")
        return json.loads(self._text(f"{_COMMITS}/{stream}/{names[-1]}")) if names else None

    def check_commits(self) -> None:
        """Raise PipelineError if commits were deleted: a stream without them would append all of its records again.

        A process that died before a commit has left at most one batch, which the next one replaces.
        """
        # Not those of other tables: a job may be replacing them.
        known = {*STREAMS, ROUNDS, LIFECYCLE_TABLE, LIVE_TABLE}.intersection(self.names(_COMMITS))
        commits = {name: self.last_commit(name) or {} for name in known}
        reached = {name: commit.get("batch", -1) for name, commit in commits.items()}
        expected = [
            (stream, batch, f"the last commit of {name} names it")
            for name, commit in commits.items()
            for stream, batch in {**commit.get("last", {}), ROUNDS: commit.get("round", -1)}.items()
        ]
        for stream in STREAMS:
            batch = reached.get(stream, -1) + 2
            if stream not in reached:
                # After maintain, the first batches have the number of a later one.
                batch = max([1, *(int(name.removeprefix("batch=")) for name in self.names(stream))])
            if self.exists(batch_place(stream, batch)):
                expected.append((stream, batch, f"{batch_place(stream, batch)} exists"))
        for stream, batch, evidence in expected:
            if batch > reached.get(stream, -1):
                raise PipelineError(
                    f"{self.path}/{_COMMITS}/{stream} was deleted or is incomplete: expected the commit of batch"
                    f" {batch}, because {evidence}. Without it, ingest would append records again: restore {_COMMITS}"
                    " from a backup, or start over with an empty data directory (--data)"
                )

    def stage(self, stream: str, number: int) -> str:
        """Return an empty directory to write a batch to."""
        stage = _stage(stream, number)
        self.delete(stage)
        return f"{self.path}/{stage}"

    def staged(self, stream: str, number: int, part: str) -> bool:
        return self.exists(f"{_stage(stream, number)}/{part}")

    def publish(self, stream: str, number: int, staged: Mapping[str, str], commit: Commit) -> None:
        """Make a batch count: ``staged`` maps each table to its part of the stage ("" for all of it)."""
        stage = _stage(stream, number)
        for table, part in staged.items():
            target = batch_place(table, number)
            self.delete(target)
            source = f"{stage}/{part}" if part else stage
            if self.exists(source):
                self.delete(f"{source}/_SUCCESS")
                self.rename(source, target)
        self.write_text(f"{_COMMITS}/{stream}/{number:09}.json", json.dumps({"batch": number, **commit}))
        # A reader may have found the commit before this one, and opens it now.
        self.delete(f"{_COMMITS}/{stream}/{number - 2:09}.json")
        self.delete(stage)

    def exchange(self, number: int, swaps: Sequence[Mapping[str, Any]], commit: Commit) -> None:
        """Replace batches by staged ones: from this commit on, the staged ones count.

        A swap has the ``table``, the numbers of the replaced batches (``sources``), and the number of the new one
        (``target``), which is staged in ``TABLE/batch=TARGET``; None if no row is left.
        """
        self._finish({"batch": number, "open": True, "swaps": [*swaps], **commit})

    def finish(self) -> bool:
        """Put the batches of an open exchange in their places; return whether there was one."""
        commit = self.last_commit(MAINTAIN)
        if commit is None or not commit["open"]:
            return False
        self._finish(commit)
        return True

    def _finish(self, commit: Commit) -> None:
        number = commit["batch"]
        stage, path = _stage(MAINTAIN, number), f"{_COMMITS}/{MAINTAIN}/{number:09}.json"
        self.write_text(path, json.dumps(commit))
        for swap in commit["swaps"]:
            table, target = swap["table"], swap["target"]
            new = None if target is None else batch_place(table, target)
            # A new batch that is no longer staged is in its place, which may be that of a replaced one.
            if new is not None and not self.exists(f"{stage}/{new}"):
                continue
            for source in swap["sources"]:
                # Renamed before they are deleted, so that readers never see a part of one.
                if self.exists(batch_place(table, source)):
                    self.rename(batch_place(table, source), f"{stage}/replaced/{batch_place(table, source)}")
            if new is not None:
                self.delete(f"{stage}/{new}/_SUCCESS")
                self.rename(f"{stage}/{new}", new)
        self.write_text(path, json.dumps({**commit, "open": False}))
        self.delete(f"{_COMMITS}/{MAINTAIN}/{number - 2:09}.json")
        self.delete(stage)

    def clean(self, stream: str) -> None:
        """Delete what unfinished writes of a stream have staged."""
        for name in self.names(_STAGING):
            if name.rpartition("-")[0] == stream:
                self.delete(f"{_STAGING}/{name}")

    def usage(self, name: str) -> tuple[int, int]:
        """Return the number of files in a directory, and their bytes."""
        summary = self._files.getContentSummary(self._file(name))
        return summary.getFileCount(), summary.getLength()

    def table(self, table: str, schema: StructType, to: int, after: int = -1) -> DataFrame:
        """Return the rows of the batches after one up to another, by their numbers."""
        return self.files(schema, [batch_place(table, number) for number in self.batches(table, to, after)])

    def batches(self, table: str, to: int, after: int = -1) -> list[int]:
        """Return the numbers of the batches after one up to another."""
        if to - after <= _FEW:
            # A directory with the batches of weeks takes seconds to list.
            return [number for number in range(after + 1, to + 1) if self.exists(batch_place(table, number))]
        numbers = (int(name.removeprefix("batch=")) for name in self.names(table))
        return [number for number in numbers if after < number <= to]

    def files(self, schema: StructType, places: Sequence[str]) -> DataFrame:
        """Return the rows in some directories; columns that their files lack are null."""
        if not places:
            return self._spark.createDataFrame([], schema)
        # The parts of a table are in directories of several kinds, whose names become columns in all rows.
        root = places[0].partition("/")[0]
        reader = self._spark.read.schema(schema).option("basePath", f"{self.path}/{root}")
        return reader.parquet(*[f"{self.path}/{place}" for place in places])

    def write(self, table: str, frame: DataFrame) -> None:
        """Replace a whole table: readers that follow its commits see either the former or the new rows."""
        with self.alone(table):
            former = self.last_commit(table)
            number = 0 if former is None else former["batch"] + 1
            frame.write.parquet(self.stage(table, number))
            new = batch_place(table, number)
            self.publish(table, number, {table: ""}, {"schema": frame.schema.jsonValue(), "places": [new]})
            for place in (f"{table}/{name}" for name in self.names(table)):
                if place != new:
                    self.delete(place)

    def read(self, table: str) -> DataFrame:
        """Return a table according to its last commit; raises PipelineError if there is none."""
        commit = self.last_commit(table)
        if commit is None:
            raise PipelineError(f"{self.path} has no table {table!r} yet: run `python -m pipeline {table}` first")
        return self.files(StructType.fromJson(commit["schema"]), commit["places"])

    def _file(self, name: str) -> Any:
        return self._hadoop.Path(f"{self.path}/{name}")

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._file(name)))

    def names(self, name: str) -> list[str]:
        """Return the names in a directory, sorted; empty if it does not exist."""
        if not self.exists(name):
            return []
        names = (status.getPath().getName() for status in self._files.listStatus(self._file(name)))
        return sorted(name for name in names if not name.startswith("."))

    def delete(self, name: str) -> None:
        self._files.delete(self._file(name), True)

    def rename(self, source: str, target: str) -> None:
        """Move a directory or file; the target must not exist."""
        to = self._file(target)
        self._files.mkdirs(to.getParent())
        if not self._files.rename(self._file(source), to):
            raise PipelineError(
                f"{self.path}: {source} can't be renamed to {target}: does another program write there?"
            )

    def claim(self, source: str, target: str) -> bool:
        """Move a directory to a name; return False if the name is taken."""
        try:
            # Unlike FileSystem.rename, this never moves into an existing directory.
            self._rename(source, target)
        except Exception:
            if self.exists(target):
                return False
            raise
        return True

    def _rename(self, source: str, target: str, *options: Any) -> None:
        context = self._hadoop.FileContext.getFileContext(self._files.getUri(), self._configuration)
        gateway: Any = self._spark.sparkContext._gateway
        array = gateway.new_array(self._hadoop.Options.Rename, len(options))
        for at, option in enumerate(options):
            array[at] = option
        context.rename(self._file(source), self._file(target), array)

    def read_text(self, name: str) -> str | None:
        """Return the content of a small file; None if it does not exist."""
        return self._text(name) if self.exists(name) else None

    def _text(self, name: str) -> str:
        stream = self._files.open(self._file(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file: readers see all of it, or the former file."""
        folder, _, last = name.rpartition("/")
        new = f"{folder}/.{last}.new"
        stream = self._files.create(self._file(new), True)
        stream.write(bytearray(content))
        stream.close()
        # FileSystem.rename can't replace a file atomically.
        self._rename(new, name, self._hadoop.Options.Rename.OVERWRITE)


def batch_place(table: str, number: int) -> str:
    """Return the directory of a batch."""
    return f"{table}/batch={number:09}"


def _stage(stream: str, number: int) -> str:
    return f"{_STAGING}/{stream}-{number:09}"
