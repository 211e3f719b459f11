"""``bench.starts`` at its smallest size, on a real broker with a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.load import fill
from bench.starts import PROBES, Victims, one_round
from bench.suite import measured
from bench.worker import BenchWorker


def test_what_is_counted_leaves_out_a_line_that_a_kill_has_cut(tmp_path: Path) -> None:
    victims = Victims("", "p", tmp_path, "marked", 1.0, sent=4)
    victims.path.write_text("0 1\n1 1\n1 2\n2 3\n3 1\n3")

    assert victims._count() == {"sent": 4, "lost": 0, "duplicates": 1, "attempts_unseen": 2}


async def test_a_kill_loses_nothing_and_redeliveries_behind_an_open_transaction_come(
    servers: str, prefix: str, tmp_path: Path
) -> None:
    with BenchWorker(servers, prefix, tmp_path) as worker:
        figures = await Victims(servers, prefix, tmp_path, "transactional", 2.0).run(worker, 1, lambda line: None)
        late = await one_round(servers, prefix, "open, member restarted")

    assert figures["kills"] == 1
    assert figures["sent"] > 0
    assert figures["lost"] == 0
    assert len(late) == PROBES


@pytest.mark.parametrize("start", ["marked", "transactional"])
async def test_a_queue_is_drained_either_way(servers: str, prefix: str, start: str) -> None:
    await fill(servers, prefix, 1_000, 200)

    # It checks by itself that each message came, and none twice.
    assert measured("bench.clients.drain_marq", servers, prefix, "1000", "run", start)["rate"] > 0
