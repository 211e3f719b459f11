"""A class data sharing archive of Spark, which Java maps instead of loading and verifying thousands of classes.

It saves two fifths of the processor time of a start and a first query (on two busy cores: 17.6 and 19.1 s without it,
11.7 and 11.8 s with it). ``make setup`` writes it into the cache with ``python -m pipeline.class_archive``. It is
optional: Java ignores an archive that does not fit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import pyspark

from pipeline.errors import PipelineError
from pipeline.jars import cache_directory
from pipeline.java import home

PREFIX = "spark-classes-"
WRITE_LIMIT_SECONDS = 300.0
#: Other checkouts leave archives of 160 MB each, which are deleted after this time.
KEPT_SECONDS = 30 * 24 * 3600
#: Silences Java's reports on classes that it leaves out and on archives that do not fit.
_QUIET = "-Xlog:cds*=off"
#: A typical job: Parquet, grouping, windows, functions in Python.
_TYPICAL = """
import sys
from pipeline.session import session
from pyspark.sql import functions as F
spark = session("archive")
rows = spark.range(1000).select("id", (F.col("id") % 7).alias("seven"), F.timestamp_millis("id").alias("at"))
rows = rows.mapInArrow(lambda batches: batches, rows.schema)
rows.groupBy("seven").agg(F.max(F.struct("id", "at")), F.collect_list("id")).write.parquet(sys.argv[1])
spark.read.parquet(sys.argv[1]).orderBy("seven").collect()
process = spark.sparkContext._gateway.proc
spark.stop()
process.stdin.close()  # Java ends normally, and only then writes the archive
process.wait()
"""


def path() -> Path:
    """Return the path of the archive for this Java and this Spark, which may not exist yet."""
    own = os.environ.get("JAVA_HOME")
    java = Path(own, "bin", "java") if own else Path(shutil.which("java") or "java")
    files = [java.resolve(), *sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))]
    # Java compares times and sizes, too.
    stats = [f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}" for file in files]
    return cache_directory() / f"{PREFIX}{sha256(os.linesep.join(stats).encode()).hexdigest()[:16]}.jsa"


def flags() -> list[str]:
    """Return the options that make Java start from the archive; none without an archive."""
    archive = path()
    # An empty file marks a Java that can't write archives.
    usable = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:SharedArchiveFile={archive}", _QUIET] if usable else []


def write(target: Path) -> bool:
    """Write the archive; return whether this Java supports it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}.new")
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={new} {_QUIET}"}
    with tempfile.TemporaryDirectory(prefix="marq-archive-") as folder:
        subprocess.run(
            [sys.executable, "-c", _TYPICAL, f"{folder}/rows"], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, timeout=WRITE_LIMIT_SECONDS, check=True,
        )  # fmt: skip
    written = new.exists()
    if not written:
        new.touch()
    new.replace(target)
    for other in target.parent.glob(f"{PREFIX}*.jsa"):
        if other.stat().st_mtime < time.time() - KEPT_SECONDS:
            other.unlink(missing_ok=True)
    return written


def main() -> int:
    if os.environ.get("SPARK") == "skip":
        return 0
    began = time.monotonic()
    try:
        chosen = home()
        if chosen is not None:
            os.environ["JAVA_HOME"] = str(chosen)
        target = path()
        if not target.exists():
            result = str(target) if write(target) else "not supported by this Java: Spark starts more slowly"
            print(f"    archive of Spark's classes: {result}\n    {time.monotonic() - began:.1f} s", flush=True)
    # Without a Java for Spark, the tests also fail with its message.
    except (PipelineError, subprocess.SubprocessError, OSError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        print(f"    no archive of Spark's classes: {output.splitlines()[-1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
