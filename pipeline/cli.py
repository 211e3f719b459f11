"""``python -m pipeline JOB …``: the arguments that all jobs share, and what ends a job.

Exit code 0: done. 1: done, and the job found a difference (audit). 2: it could not be carried through; one sentence
says why. 130: Ctrl-C. 141: nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import logging
import os
import pkgutil
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType

from marq.core.errors import MarqError
from pipeline import jobs
from pipeline.errors import PipelineError
from pipeline.sentences import sentence

PROGRAM = "python -m pipeline"
DEFAULT_DATA = ".marq/pipeline"
_MEMORY = re.compile(r"\d+[kmgt]b?", re.IGNORECASE)
#: The end of what Spark is started with, where nobody said otherwise.
_SHELL = "pyspark-shell"


def main(words: Sequence[str]) -> int:
    """Run one job and return the exit code."""
    # Explicitly: a shell that starts us in the background leaves SIGINT ignored, and SIGTERM takes the same way.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    # What the bridge to Java logs comes to us as an exception, too; without any handler Python would print it.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    finally:
        _stop_spark()


def _run(words: Sequence[str]) -> int:
    names = _jobs()
    if not words or words[0] in ("-h", "--help"):
        print(_help(names))
        return 0
    name, *rest = words
    if name not in names:
        print(f"error: there is no job {name!r}: expected one of {', '.join(names)}", file=sys.stderr)
        return 2
    whole = "--traceback" in rest
    try:
        module = importlib.import_module(f"{jobs.__name__}.{name}")
        arguments = _parser(name, module).parse_args(rest)
        _tell_spark(arguments)
        return int(module.run(arguments))
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except (PipelineError, MarqError) as error:
        return _failed(str(error), whole)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return _failed(f"the Python package {missing} is not installed: run `make setup`", whole)
    except Exception as error:
        hint = "" if whole else f" (the whole: {PROGRAM} {name} … --traceback)"
        return _failed(f"{sentence(error)}{hint}", whole)


def _failed(text: str, whole: bool) -> int:
    if whole:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr)
    return 2


def _jobs() -> list[str]:
    """By file names: importing a job imports Spark, and help is to come at once."""
    return sorted(module.name for module in pkgutil.iter_modules(jobs.__path__))


def _help(names: Sequence[str]) -> str:
    lines = [f"usage: {PROGRAM} JOB …", "", "Jobs on what the queues did; each has --help.", ""]
    lines += [f"  {name:10} {_first_line(name)}" for name in names]
    return "\n".join(lines)


def _first_line(name: str) -> str:
    spec = find_spec(f"{jobs.__name__}.{name}")
    source = spec.loader.get_source(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    text = ast.get_docstring(ast.parse(source or "")) or ""
    # "``ingest``: from Kafka to Parquet." -> "from Kafka to Parquet"
    return text.partition("\n")[0].removeprefix(f"``{name}``:").strip().rstrip(".")


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
    shared.add_argument("--traceback", action="store_true", help="where it fails, print all that is known")
    spark = parser.add_argument_group("Spark, where spark-submit did not say it")
    spark.add_argument("--master", help="where it runs (default: this machine, local[*])")
    spark.add_argument("--driver-memory", metavar="SIZE", help="heap of its Java process (default: 2g)")
    spark.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="any setting of Spark")
    return parser


def _tell_spark(arguments: argparse.Namespace) -> None:
    """Put what was given behind what the environment says already: the last one counts."""
    given: list[str] = []
    if arguments.driver_memory is not None:
        if not _MEMORY.fullmatch(arguments.driver_memory):
            raise PipelineError(f"--driver-memory {arguments.driver_memory}: expected a size such as 2g or 1500m")
        given += ["--driver-memory", arguments.driver_memory]
    if arguments.master is not None:
        given += ["--master", arguments.master]
    for setting in arguments.conf:
        if not re.fullmatch(r"spark\.[\w.-]+=.*", setting, re.DOTALL):
            raise PipelineError(f"--conf {setting}: expected spark.NAME=VALUE")
        given += ["--conf", setting]
    if not given:
        return
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise PipelineError(f"spark-submit has started Spark already: give {given[0]} to it, before the file")
    before = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", _SHELL))
    end = [before.pop()] if before and before[-1] == _SHELL else [_SHELL]
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*before, *given, *end])


def _stop_spark() -> None:
    # Only where a job brought it in.
    pyspark = sys.modules.get("pyspark")
    if pyspark is None or pyspark.SparkContext._active_spark_context is None:
        return
    # Its Java process ends with us in any case.
    with contextlib.suppress(Exception, KeyboardInterrupt):
        pyspark.SparkContext._active_spark_context.setLogLevel("OFF")  # tasks that are stopped complain
        pyspark.SparkContext._active_spark_context.stop()
