"""``python -m lab.pipeline_jobs JOBS``: run jobs of the data pipeline one after the other, in one Spark session.

JOBS is a JSON array with the words of each job. The output has one JSON object per line. Its fields are ``job`` when a
job begins, and ``stage``, ``done`` and ``tasks`` when Spark has finished some tasks. When a job has ended, they are
``job``, ``code`` and ``output``. Other lines are messages of the jobs. The exit code is that of the first job that
failed, or 0.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import time
from typing import Any

from pipeline import cli

#: Exit codes of jobs that did their work; 1: the audit found differences.
DONE = (0, 1)
_TASKS_INTERVAL_S = 1.0


def main(jobs: list[list[str]]) -> int:
    threading.Thread(target=_tell_tasks, daemon=True).start()
    for job in jobs:
        _tell(job=job[0])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = cli.run(job)
        _tell(job=job[0], code=code, output=output.getvalue())
        if code not in DONE:
            return code
    return 0


def _tell_tasks() -> None:
    """Report the tasks of Spark's newest stage when their number has changed."""
    told: tuple[int, int, int] | None = None
    while True:
        time.sleep(_TASKS_INTERVAL_S)
        # Spark may be starting or stopping.
        with contextlib.suppress(Exception):
            now = _newest_stage()
            if now is not None and now != told:
                told = now
                _tell(stage=now[0], done=now[1], tasks=now[2])


def _newest_stage() -> tuple[int, int, int] | None:
    pyspark: Any = sys.modules["pyspark"]
    tracker = pyspark.SparkContext._active_spark_context.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return max(((stage.stageId, stage.numCompletedTasks, stage.numTasks) for stage in stages), default=None)


def _tell(**fields: Any) -> None:
    # Not sys.stdout, which collects a job's output. One write, so that the lines of threads do not mix.
    sys.__stdout__.write(json.dumps(fields) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
