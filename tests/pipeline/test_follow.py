"""``ingest --follow`` as a service, with rounds that fail: no Spark, no Kafka."""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from py4j.protocol import Py4JNetworkError

from pipeline import cli
from pipeline.errors import PipelineError
from pipeline.jobs import ingest
from pipeline.service import INGEST, WINDOWS, Service, served

ROWS = {"markers": 1, "corrupt": 0, "messages": 0, "dead_letters": 0}
pytestmark = pytest.mark.usefixtures("in_process")


class Follow:
    """The results of rounds, and of the windows after them; after the last round, the user interrupts the job."""

    def __init__(self) -> None:
        self.rounds: list[Any] = []
        self.windows: list[Any] = []
        #: What a job without --follow finds.
        self.has_windows = False
        self.computed = 0
        #: Sessions for few rows.
        self.sessions = 0


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    said = Follow()

    def result(results: Iterator[Any]) -> Any:
        found = next(results)
        if isinstance(found, BaseException):
            raise found
        return found

    class Rounds:
        def __init__(self, *_: object, **__: object) -> None:
            self._left: Iterator[Any] = iter([*said.rounds, KeyboardInterrupt()])
            self.unread = {"orders": "orders was deleted"}
            self.rows = Counter[str]()

        def round(self) -> dict[str, int]:
            # Also a round that fails has written rows.
            self.rows = Counter(ROWS)
            found: dict[str, int] = result(self._left)
            return found

    class Windows:
        def __init__(self, *_: object) -> None:
            """Windows are computed by a new run after each round."""

        def update(self, now_ms: int) -> int:
            said.computed += 1
            found: int = result(iter(said.windows[said.computed - 1 :] or [2]))
            return found

    lake = SimpleNamespace(last_commit=lambda _: {} if said.has_windows else None)

    def for_few_rows(_: object) -> None:
        said.sessions += 1

    monkeypatch.setattr(ingest, "for_few_rows", for_few_rows)
    for name in ("session", "TopicAdmin"):
        monkeypatch.setattr(ingest, name, lambda *_: None)
    monkeypatch.setattr(ingest, "Lake", lambda *_: lake)
    monkeypatch.setattr(ingest, "Ingest", Rounds)
    monkeypatch.setattr(ingest, "LiveWindows", Windows)
    return said


@pytest.mark.parametrize("before", [[], [ROWS]], ids=["the first round", "a later round"])
def test_a_round_that_fails_does_not_end_follow(
    follow: Follow, before: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    follow.rounds = [*before, PipelineError("kafka:9092 does not answer"), ROWS]

    assert cli.main(["ingest", "--follow", "--every", "0"]) == 130

    written = capsys.readouterr()
    assert written.out.count("ingested 1 markers") == len(before) + 1
    assert written.err == "error: kafka:9092 does not answer; ingest will be tried again\n"


def test_rows_of_a_round_that_fails_count(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    follow.rounds = [PipelineError("kafka:9092 does not answer"), ROWS]
    services: list[Service] = []

    def kept(service: Service, *_: object) -> AbstractContextManager[None]:
        services.append(service)
        return nullcontext()

    monkeypatch.setattr(ingest, "served", kept)

    cli.main(["ingest", "--follow", "--every", "0"])

    [service] = services
    # The third round is interrupted.
    assert service.rows["markers"] == 3


def test_each_round_tells_how_long_it_took_itself(
    follow: Follow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow.rounds, follow.windows = [ROWS, ROWS], [5, 5]
    clock = SimpleNamespace(monotonic=itertools.count().__next__, time=time.time, sleep=lambda _: None)
    monkeypatch.setattr(ingest, "time", clock)

    cli.main(["ingest", "--follow", "--every", "0"])

    ended = [line.partition(" in ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ended == ["1.0 s"] * 4


def test_windows_that_fail_end_neither_follow_nor_the_next_round(
    follow: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    follow.rounds, follow.windows = [ROWS, ROWS], [PipelineError("another live is running"), 5]

    assert cli.main(["ingest", "--follow", "--every", "0"]) == 130

    written = capsys.readouterr()
    assert (written.out.count("ingested 1 markers"), written.out.count("computed 5 windows")) == (2, 1)
    assert written.err == "error: another live is running; windows will be tried again\n"


@pytest.mark.parametrize(
    ("results", "words"),
    [([PipelineError("wrong prefix")], ""), ([ROWS, Py4JNetworkError("gone")], "--follow --every 0")],
    ids=["a single round", "without its Java process"],
)
def test_other_failures_end_the_job(
    follow: Follow, results: list[Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    follow.rounds = results

    assert cli.main(["ingest", *words.split()]) == 2

    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("has_windows", [True, False])
def test_a_single_round_updates_windows_only_if_there_are_any(follow: Follow, *, has_windows: bool) -> None:
    follow.rounds, follow.has_windows = [ROWS], has_windows

    assert cli.main(["ingest"]) == 0

    assert (follow.computed, follow.sessions) == (has_windows, has_windows)


def get(port: int | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def fails(text: str) -> Callable[[], None]:
    def work() -> None:
        raise PipelineError(text)

    return work


def test_the_service_tells_its_health_and_metrics() -> None:
    service = Service(10, follow=True, complain=lambda _: None, began_s=0)
    with served(service, "127.0.0.1", 0) as port:
        # Nothing was complete since 1970.
        assert get(port, "/healthz")[0] == 503
        assert service.part(INGEST, 2e9, lambda: service.rows.update(ROWS))
        assert not service.part(WINDOWS, 2e9, fails("no space left"))
        status, text = get(port, "/healthz")
        assert (status, json.loads(text)["errors"]) == (503, {"windows": "no space left"})

        assert service.part(WINDOWS, 2e9, lambda: None)

        assert get(port, "/healthz")[0] == 200
        assert get(port, "/")[0] == 404
        status, text = get(port, "/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["marq_pipeline_rounds_total", WINDOWS, "failed"] == 1
    assert samples["marq_pipeline_rounds_total", INGEST, "ok"] == 1
    assert samples["marq_pipeline_rows_total", "markers"] == 1
    assert samples["marq_pipeline_complete_timestamp_seconds", WINDOWS] == 2e9
    assert samples["marq_pipeline_unread_topics",] == 0


def test_a_port_that_was_chosen_is_printed(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["ingest", "--follow", "--metrics-port", "0"])

    assert re.fullmatch(r"metrics on http://127\.0\.0\.1:[1-9]\d*/metrics\n", capsys.readouterr().out)


def test_a_port_that_is_taken_is_an_error_with_its_option(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    with served(Service(10, follow=True, complain=lambda _: None), "127.0.0.1", 0) as port:
        assert cli.main(["ingest", "--follow", "--metrics-port", str(port)]) == 2

    assert f"--metrics-port {port}: 127.0.0.1:{port} can't be used: " in capsys.readouterr().err
