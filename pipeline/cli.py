"""``python -m pipeline JOB …``: options that all jobs share, errors, and exit codes.

Exit code 0: success. 1: success, and the job found a difference (audit). 2: failure, with one sentence. 130: Ctrl-C.
141: standard output was closed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from marq.wire.errors import MarqError
from pipeline.errors import PipelineError, sentence

PROGRAM = "python -m pipeline"
DEFAULT_DATA = ".marq/pipeline"
#: The jobs, modules of :mod:`pipeline.jobs`. Importing one imports Spark, which would delay the help.
JOBS = {
    "ingest": "read Kafka's topics into Parquet, up to now or continuously",
    "lifecycle": "make one row for each message, with all of its deliveries",
    "audit": "prove that no message was lost, queue by queue",
    "stats": "compute rates, times, attempts and lateness by queue and window",
    "plan": "plan partitions, workers, disk and memory for a target load",
    "redrive": "redrive or delete dead letters chosen by SQL",
    "load": "send rows of files or a table as messages of a queue",
    "maintain": "merge small files of the tables, and remove old history",
}
_MEMORY = re.compile(r"\d+[kmgt]b?", re.IGNORECASE)
#: The last word of PYSPARK_SUBMIT_ARGS.
_SHELL = "pyspark-shell"


def main(words: Sequence[str]) -> int:
    """Run one job, the only one of this process, and return the exit code."""
    # A shell that starts us in the background leaves SIGINT ignored; SIGTERM ends a job like SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    # Without a handler, Python would print what the bridge to Java logs, which is also raised as an exception.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        code = run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    finally:
        _stop_spark()


def run(words: Sequence[str]) -> int:
    """Run one job and return the exit code; do not stop Spark, so that another job can use it."""
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {PROGRAM} JOB …\n\nJobs on Marq's topics; each has --help.\n")
        print("\n".join(f"  {name:10} {text}" for name, text in JOBS.items()))
        return 0
    name, *rest = words
    if name not in JOBS:
        print(f"error: there is no job {name!r}: expected one of {', '.join(JOBS)}", file=sys.stderr)
        return 2
    with_traceback = "--traceback" in rest
    try:
        module = importlib.import_module(f"pipeline.jobs.{name}")
        options = _parser(name, module).parse_args(rest)
        _configure_spark(options)
        return int(module.run(options))
    except BrokenPipeError:
        raise
    except Exception as error:
        if with_traceback:
            traceback.print_exc()
        print(f"error: {_text(error, name, with_traceback)}", file=sys.stderr)
        return 2


def _text(error: Exception, job: str, with_traceback: bool) -> str:
    if isinstance(error, PipelineError | MarqError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {(error.name or '').partition('.')[0]} is not installed: run `make setup`"
    return sentence(error) + ("" if with_traceback else f" (details: {PROGRAM} {job} … --traceback)")


def _parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=(module.__doc__ or "").replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.arguments(parser)
    shared = parser.add_argument_group("all jobs")
    shared.add_argument(
        "--data",
        default=os.environ.get("MARQ_PIPELINE_DATA") or DEFAULT_DATA,
        help="directory or URI of the tables (default: $MARQ_PIPELINE_DATA, else .marq/pipeline)",
    )
    shared.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    spark = parser.add_argument_group("Spark, if not set by spark-submit")
    spark.add_argument("--master", help="where to run (default: this machine, local[*])")
    spark.add_argument("--driver-memory", metavar="SIZE", help="heap of its Java process (default: 2g)")
    spark.add_argument(
        "--conf", action="append", default=[], metavar="NAME=VALUE", help="any Spark setting; repeatable"
    )
    return parser


def _configure_spark(options: argparse.Namespace) -> None:
    """Append the options to the environment's settings of Spark, where the last one counts."""
    words: list[str] = []
    if options.driver_memory is not None:
        if not _MEMORY.fullmatch(options.driver_memory):
            raise PipelineError(f"--driver-memory {options.driver_memory}: expected a size such as 2g or 1500m")
        words += ["--driver-memory", options.driver_memory]
    if options.master is not None:
        words += ["--master", options.master]
    for setting in options.conf:
        if not re.fullmatch(r"spark\.[\w.-]+=.*", setting, re.DOTALL):
            raise PipelineError(f"--conf {setting}: expected spark.NAME=VALUE")
        words += ["--conf", setting]
    if not words:
        return
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise PipelineError(f"spark-submit has started Spark already: give {words[0]} to it, before the file")
    before = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", _SHELL))
    last = before.pop() if before and before[-1] == _SHELL else _SHELL
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*before, *words, last])


def _stop_spark() -> None:
    # Only if a job imported it.
    pyspark = sys.modules.get("pyspark")
    if pyspark is None or pyspark.SparkContext._active_spark_context is None:
        return
    # Its Java process ends with ours in any case.
    with contextlib.suppress(Exception, KeyboardInterrupt):
        pyspark.SparkContext._active_spark_context.setLogLevel("OFF")  # stopped tasks log errors
        pyspark.SparkContext._active_spark_context.stop()
