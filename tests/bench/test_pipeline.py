"""The measurement of the pipeline, with few messages: the jobs find the truth of a history, to the message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.history import TURN
from bench.pipeline import Size, bars, measure

pytestmark = pytest.mark.verify


@pytest.mark.skipif(os.environ.get("SPARK") == "skip", reason="SPARK=skip: tests on Spark are left out")
@pytest.mark.timeout(1_200)  # three starts of Spark
def test_the_pipeline_finds_the_truth_of_a_history(servers: str, tmp_path: Path) -> None:
    messages = 5 * TURN

    figures = measure(servers, tmp_path, Size(messages), say=print)

    assert figures["markers"] > 2 * messages
    assert len(bars(figures)) == 3
