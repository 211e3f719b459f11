"""``ingest --follow``, with rounds that fail: no Spark, no Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from pipeline import cli
from pipeline.errors import PipelineError
from pipeline.jobs import ingest

ROWS = {"markers": 1, "corrupt": 0, "messages": 0, "dead_letters": 0}
pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results of the rounds, which a test adds; after the last one, the user interrupts the job."""
    results: list[Any] = []

    class Rounds:
        def __init__(self, *_: object, **__: object) -> None:
            self._left: Iterator[Any] = iter([*results, KeyboardInterrupt()])

        def round(self) -> dict[str, int]:
            result = next(self._left)
            if isinstance(result, BaseException):
                raise result
            return result

    for name in ("session", "TopicAdmin", "Lake"):
        monkeypatch.setattr(ingest, name, lambda *_: None)
    monkeypatch.setattr(ingest, "Ingest", Rounds)
    return results


def test_a_round_that_fails_does_not_end_follow(rounds: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    rounds += [ROWS, PipelineError("kafka:9092 does not answer"), ROWS]

    assert cli.main(["ingest", "--follow", "--every", "0"]) == 130

    written = capsys.readouterr()
    assert written.out.count("ingested 1 markers") == 2
    assert written.err == "error: kafka:9092 does not answer; trying again in 0 s\n"


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([PipelineError("wrong prefix")], "--follow"),
        ([PipelineError("wrong prefix")], ""),
        ([ROWS, Py4JNetworkError("gone")], "--follow --every 0"),
    ],
    ids=["the first round", "a single round", "without its Java process"],
)
def test_other_failures_end_the_job(
    rounds: list[Any], results: list[Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds += results

    assert cli.main(["ingest", *words.split()]) == 2

    assert len(capsys.readouterr().err.splitlines()) == 1
