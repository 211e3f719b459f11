"""The data pipeline's audit of a run, which reads only the topics, compared with the checker's result.

``python -m lab.audit JOBS`` runs jobs of the pipeline one after the other, in one Spark session. JOBS is a JSON array
with the words of each job. The output has one JSON object per line. Its fields are ``job`` when a job begins, and
``stage``, ``done`` and ``tasks`` when Spark has finished some tasks. When a job has ended, they are ``job``, ``code``
and ``output``. Other lines are messages of the jobs. The exit code is that of the first job that failed, or 0.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from lab.program import Program, RunError
from lab.proof.history import Event
from marq.settings.client import ClientSettings
from marq.wire.markers import LAST

#: Exit codes of jobs that did their work; 1: the audit found differences.
DONE = (0, 1)
#: Longest time without progress. Spark needs a minute to start on a busy machine.
LIMIT_SECONDS = 240.0
AUDIT_JOBS = (("ingest",), ("lifecycle",), ("audit", "--drained", "--json"))
PLOTS_JOB = ("stats",)
#: Directory of the deliveries that handlers finished, and the log of jobs that failed, next to the pipeline's tables.
HANDLED, LOG = "handled", "audit.log"


class AuditProgress(Protocol):
    """Shows the progress of an audit."""

    def phase(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """The pipeline's ``statistics``, or the reason why there are none.

    ``ingested``: whether the data directory has the whole run, so that the audit can be repeated without the topics.
    """

    statistics: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    ingested: bool = False
    #: Whether the data directory has plots; if plots were requested and are missing, the reason.
    plots: bool = False
    plots_failure: str = ""

    @property
    def needs_topics(self) -> bool:
        """Whether the audit can be repeated only with the topics."""
        return bool(self.failure) and not self.ingested

    def differences(self, own: Mapping[str, Any], shared: Mapping[str, str]) -> list[str]:
        """Return the audit's findings, and its differences from ``own``, the checker's statistics.

        ``shared`` has the names of statistics that both have: the checker's, the audit's.
        """
        if self.failure:
            return [f"the audit failed: {self.failure}"]
        lines = [
            f"{theirs}: {own[ours]:,} by the checker, {self.statistics[theirs]:,} by the audit"
            for ours, theirs in shared.items()
            if own[ours] != self.statistics[theirs]
        ]
        return lines + [
            f"{message['id']}: {message['state']}: {'; '.join(message['why'])}" for message in self.statistics["wrong"]
        ]


def audit(
    settings: ClientSettings,
    data: Path,
    events: Sequence[Event],
    progress: AuditProgress | None = None,
    *,
    plots: bool = False,
    limit_s: float = LIMIT_SECONDS,
) -> Audit:
    """Ingest the topics of a namespace and the finished deliveries of a history into a directory, and audit them.

    With ``plots``, compute statistics and draw plots as well. The audit fails if it makes no progress for ``limit_s``,
    or at Ctrl-C.
    """
    jobs = [*AUDIT_JOBS, PLOTS_JOB] if plots else list(AUDIT_JOBS)
    with tempfile.TemporaryDirectory(prefix="marq-audit-", ignore_cleanup_errors=True) as folder:
        program = jobs_program(settings, data, jobs, Path(folder) / "audit.log")
        jobs_log = JobsLog(progress)
        failure = ""
        try:
            _write_handled(data, finished(events))
            with program:
                failure = _wait(program, jobs_log, limit_s)
            if failure:
                shutil.copyfile(program.log_file, data / LOG)
                failure += f" (log: {data / LOG})"
        except KeyboardInterrupt:
            failure = f"{jobs_log.job} was interrupted"
        except OSError as error:
            failure = f"{data}: {error}"
    return jobs_log.audit(failure, plots=plots)


def jobs_program(settings: ClientSettings, data: Path, jobs: Sequence[Sequence[str]], log_file: Path) -> Program:
    """Return a program that runs jobs on a namespace and a data directory; its log is in a temporary directory."""
    environment = {"MARQ_BOOTSTRAP_SERVERS": settings.bootstrap_servers, "MARQ_PREFIX": settings.names.prefix}
    words = json.dumps([[*job, "--data", str(data.absolute())] for job in jobs])
    command = ["-m", "lab.audit", words]
    return Program(log_file.stem, command, environment, log_file, temporary=[log_file.parent])


def _wait(program: Program, jobs_log: JobsLog, limit_s: float) -> str:
    """Wait until the jobs have ended; return why they failed, or ""."""
    try:
        for line in program.lines(limit_s):
            jobs_log.take(line)
    except RunError:
        return f"{jobs_log.job} made no progress for {limit_s:g} s"
    code = program.exit_code
    # A job that was killed had no time to say why: its last message is about something else.
    why = jobs_log.message if code is not None and code > 0 else ""
    return f"{jobs_log.job}: {why or f'its process ended with exit code {code}'}" if code != 0 else ""


class JobsLog:
    """Takes the output of the jobs, line by line."""

    def __init__(self, progress: AuditProgress | None = None) -> None:
        self._progress = progress
        #: The output of each job that has ended.
        self.outputs: dict[str, str] = {}
        #: The current job, and the last message.
        self.job = "ingest"
        self.message = ""

    def take(self, line: str) -> None:
        told = json.loads(line) if line.startswith('{"') else {}
        if "code" in told:
            if told["code"] in DONE:
                self.outputs[told["job"]] = told["output"]
        elif "job" in told:
            self.job, self.message = told["job"], ""
            if self._progress is not None:
                self._progress.phase(f"{'plots' if self.job in PLOTS_JOB else 'audit'}: {self.job}")
        else:
            self.message = line.strip() if not told else self.message
            if self._progress is not None:
                at = f"stage {told['stage']}, {told['done']} of {told['tasks']} tasks" if told else self.message
                self._progress.detail(f"{self.job}: {at}")

    def audit(self, failure: str, *, plots: bool) -> Audit:
        """Return the result of the jobs that finished; ``failure`` says why others did not."""
        ingested, drawn = "ingest" in self.outputs, PLOTS_JOB[0] in self.outputs
        if "audit" not in self.outputs:
            return Audit(failure=failure or "the audit has no result", ingested=ingested)
        statistics = json.loads(self.outputs["audit"])
        return Audit(statistics, ingested=ingested, plots=drawn, plots_failure=failure if plots else "")


def finished(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """Return deliveries that were neither released, which asks for another one, nor ended by a dead letter."""
    deliveries = [event for event in events if event["op"] == "deliver"]
    markers = [event for event in events if event["op"] == "marker"]
    seen = Counter(event["record"] for event in deliveries)
    held = Counter((event["record"], event.get("holder")) for event in deliveries)
    ordered = {event["queue"] for event in markers if event.get("in_order")}
    for event in markers:
        kind = event["kind"]
        if kind == "RELEASE" and event["queue"] in ordered:
            # The message is delivered again in its place, without a fact; after LAST it becomes a dead letter.
            for offset, delay_ms in zip(event["offsets"], event["delays_ms"], strict=True):
                record, holder = f"{event['source']}/{offset}", event["holder"]
                if delay_ms != LAST and held[record, holder]:
                    held[record, holder] -= 1
                    seen[record] -= 1
        elif kind in ("REDELIVERED", "DEAD_LETTERED"):
            for index, offset in enumerate(event["offsets"]):
                record = f"{event['source']}/{offset}"
                if (kind == "DEAD_LETTERED" or event["causes"][index] == "RELEASED") and seen[record]:
                    seen[record] -= 1
    finished = []
    for record, count in seen.items():
        topic, partition, offset = record.rsplit("/", 2)
        finished += [(topic, int(partition), int(offset))] * count
    return finished


def _write_handled(data: Path, records: Iterable[tuple[str, int, int]]) -> None:
    """Write topic, partition and offset of each finished delivery next to the pipeline's tables."""
    schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    rows = [dict(zip(schema.names, record, strict=True)) for record in records]
    folder = data / HANDLED
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "handled.parquet")


# --- the jobs ---------------------------------------------------------------------------------------------------------


def main(jobs: list[list[str]]) -> int:
    threading.Thread(target=_tell_tasks, daemon=True).start()
    from pipeline import cli

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
        time.sleep(1.0)
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
