"""``ingest --follow`` as a service: rounds until it is told to end, its health and its metrics.

A round that fails is tried again after the pause; only the end of Spark's Java process ends the service. The windows
have their own errors, so that they never keep records from being ingested.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from py4j.protocol import Py4JNetworkError

from pipeline.errors import PipelineError, sentence

#: The parts of a round.
INGEST, WINDOWS = "ingest", "windows"
#: Windows are at most this old in a healthy service; a round may also take as long as five pauses.
HEALTHY_S = 60.0


@dataclass
class Service:
    """Runs the parts of rounds and records their results; times in seconds since 1970."""

    every_s: float
    #: True if a part that fails is tried again in the next round; otherwise it ends the job.
    follow: bool
    complain: Callable[[str], None]
    began_s: float = field(default_factory=time.time)
    succeeded: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    #: When the last round with a successful part began, so until when its data is complete.
    complete_s: dict[str, float] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    #: Rows that the windows have not counted yet.
    news: int = 0
    #: Topics that could not be read in the last round, with the reason.
    unread: Mapping[str, str] = field(default_factory=dict)

    def part(self, name: str, round_began_s: float, work: Callable[[], object]) -> bool:
        """Run one part of a round; return whether it succeeded."""
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            if not self.follow or isinstance(error, Py4JNetworkError):
                raise
            self.failed[name] += 1
            self.errors[name] = sentence(error)
            self.complain(f"error: {sentence(error)}; {name} will be tried again")
            return False
        self.succeeded[name] += 1
        self.errors.pop(name, None)
        self.took_s[name] = time.monotonic() - began
        self.complete_s[name] = round_began_s
        return True

    def health(self) -> dict[str, object]:
        limit_s, now_s = max(HEALTHY_S, 5 * self.every_s), time.time()
        ages = {part: now_s - self.complete_s.get(part, self.began_s) for part in (INGEST, WINDOWS)}
        return {
            "healthy": max(ages.values()) <= limit_s,
            "age_seconds": {part: round(age_s, 1) for part, age_s in ages.items()},
            "errors": dict(self.errors),
            "unread_topics": dict(self.unread),
        }

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        parts = (INGEST, WINDOWS)
        rounds = {
            f'part="{part}",result="{result}"': counts[part]
            for part in parts
            for result, counts in (("ok", self.succeeded), ("failed", self.failed))
        }
        lines = [
            *_metric("rounds_total", "counter", "Rounds of ingest --follow, by part.", rounds),
            *_metric("rows_total", "counter", "Rows written since the start.", _by("table", self.rows)),
            *_metric("round_seconds", "gauge", "Duration of the last round.", _by("part", self.took_s)),
            *_metric(
                "complete_timestamp_seconds",
                "gauge",
                "Time up to which the data is complete.",
                _by("part", self.complete_s),
            ),
            *_metric("unread_topics", "gauge", "Topics that could not be read.", {"": len(self.unread)}),
        ]
        return "\n".join(lines) + "\n"


def _by(label: str, values: Mapping[str, float]) -> dict[str, float]:
    # Copied first, because the other thread adds to it.
    return {f'{label}="{name}"': value for name, value in [*values.items()]}


def _metric(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP marq_pipeline_{name} {text}"
    yield f"# TYPE marq_pipeline_{name} {kind}"
    for labels, value in values.items():
        yield f"marq_pipeline_{name}{{{labels}}} {value}" if labels else f"marq_pipeline_{name} {value}"


@contextmanager
def served(service: Service, host: str, port: int | None) -> Iterator[int | None]:
    """Serve ``/metrics`` and ``/healthz``; without a port, nothing. Yields the port, which was chosen for port 0.

    Raises PipelineError if the port can't be used.
    """
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", service.metrics())
            elif path == "/healthz":
                document = service.health()
                self._answer(200 if document["healthy"] else 503, "application/json", json.dumps(document))
            else:
                self._answer(404, "text/plain", "expected /metrics or /healthz\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise PipelineError(f"--metrics-port {port}: {host}:{port} can't be used: {error}") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
