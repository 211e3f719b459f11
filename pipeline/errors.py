"""The one error for everything that stops a job, and exceptions of Spark, Java or a Python worker as one sentence.

``--traceback`` prints all of an exception.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import Any

#: Queue names listed in an error.
MAX_NAMES = 10
#: A PipelineError that was raised in a Python worker arrives as text inside Java's exception.
_OURS = re.compile(r"^pipeline\.errors\.PipelineError: (.+)$", re.MULTILINE)
#: The last line of a Python traceback: "ValueError: too long".
_PYTHON = re.compile(r"^(?!\s)(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?$", re.MULTILINE)
#: "org.apache.kafka.common.errors.TimeoutException: …" -> "TimeoutException: …"
_PACKAGE = re.compile(r"^(?:[a-z]\w*\.)+([A-Z]\w*(?=:|$))")
_OUT_OF_MEMORY = ("OutOfMemoryError", "GC overhead limit")
_MEMORY = "Spark ran out of memory: give it more with --driver-memory 4g (now: {now})"
#: Parts of the errors of Spark 4.2 in a query whose context is stopped; SPARK-59242 describes the last one.
_STOPPED_TEXTS = (
    "SparkContext was shut down",
    "stopped SparkContext",
    "LiveListenerBus is stopped",
    "org.apache.spark.SparkContext.dagScheduler()",
)
_STOPPED = "Spark's Java process was ended or ran out of memory: run the job again"
LIMIT = 600


class PipelineError(Exception):
    """One sentence for the user: what failed, why, and what to do."""


def unknown_queue(queue: str, known: Sequence[str], option: str = "--queue") -> str:
    """Return the error text for a queue without messages, with the most similar names."""
    near = difflib.get_close_matches(queue, known, MAX_NAMES) or sorted(known)[:MAX_NAMES]
    more = ", …" if len(known) > len(near) else ""
    return f"{option} {queue}: not in the table lifecycle, which has {', '.join(near)}{more}"


def sentence(error: BaseException) -> str:
    """Return the first line that says what happened."""
    text = _text(error)
    if any(word in text for word in _OUT_OF_MEMORY):
        return _MEMORY.format(now=os.environ.get("SPARK_DRIVER_MEMORY", "Spark's default"))
    is_cut_off = type(error).__name__ == "Py4JNetworkError" or isinstance(error, ConnectionError)
    if is_cut_off or any(words in text for words in _STOPPED_TEXTS):
        return _STOPPED
    if ours := _OURS.search(text):
        return ours[1]
    if "Traceback (most recent call last)" in text and (lines := _PYTHON.findall(text.partition("Traceback")[2])):
        return one_line(lines[0])
    return one_line(next((line for line in text.splitlines() if line.strip()), type(error).__name__))


def root_cause(error: BaseException) -> tuple[str, str]:
    """Return the class name of the deepest cause, without its package, and its message in one line."""
    java = getattr(error, "java_exception", None)
    if java is None:
        return type(error).__name__, one_line(str(error))
    deepest = _deepest(java)
    name = deepest.getClass().getName().rpartition(".")[2]
    return name, one_line((deepest.getMessage() or name).strip().splitlines()[0])


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    try:
        return str(error) if java is None else f"{_deepest(java).toString()}\n{java.toString()}"
    except Exception:  # the Java process has ended
        return str(error)


def _deepest(java: Any) -> Any:
    for _ in range(20):
        cause = java.getCause()
        if cause is None:
            break
        java = cause
    return java


def one_line(line: str) -> str:
    """Return a line without the package of a Java class before it, and not too long."""
    line = _PACKAGE.sub(r"\1", line.strip().rstrip(";"))
    return line if len(line) <= LIMIT else f"{line[:LIMIT]}…"
