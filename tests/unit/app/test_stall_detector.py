"""When the watchdog considers a worker stalled: with a fake clock and a fake witness."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest

from marq_worker.progress import ProgressReport
from marq_worker.watchdog.watchdog import ProbeResult, StallDetector

LIMIT_S = 60.0
PARTITION = "markers partition 0"
WAITS = ProgressReport((7,), 7)


@dataclass
class Watched:
    """A process, looked at once a second."""

    answer: ProbeResult = ProbeResult.WORK_WAITS
    watches_loop: bool = True
    asked: list[bool] = field(default_factory=list)
    loop_still_s: float = 0.0
    seconds: float = 0.0
    found: str = ""

    def __post_init__(self) -> None:
        self.stillness = StallDetector(LIMIT_S, self._ask, self.watches_loop)

    def _ask(self, subject: Hashable, standing: ProgressReport, last: bool) -> ProbeResult:
        self.asked.append(last)
        return self.answer

    def lives(self, seconds: float, *standings: ProgressReport, blocked: bool = False) -> str:
        """Look until the time is over or it counts as stalled; one standing for each look, the last one repeated."""
        said = list(standings) or [None]
        for _ in range(int(seconds)):
            standing = said.pop(0) if len(said) > 1 else said[0]
            self.loop_still_s = self.loop_still_s + 1 if blocked else 0.0
            self.seconds += 1
            self.found = self.stillness.look(self.loop_still_s, {} if standing is None else {PARTITION: standing}, 1.0)
            if self.found:
                break
        return self.found


def test_what_is_there_and_is_not_read_is_ended_for_after_the_limit() -> None:
    worker = Watched()

    assert worker.lives(600, WAITS) == "markers partition 0 stalled: available records are not read"
    assert LIMIT_S <= worker.seconds <= LIMIT_S + 2
    assert worker.asked == [False, True]


def test_what_a_witness_found_work_for_is_suspected_before_it_is_ended_for() -> None:
    worker = Watched()

    worker.lives(LIMIT_S / 2 - 1, WAITS)
    assert worker.stillness.suspects == frozenset()
    worker.lives(2, WAITS)
    assert worker.stillness.suspects == {PARTITION}
    worker.lives(1, ProgressReport((8,), 8))
    assert worker.stillness.suspects == frozenset()


def test_what_is_owed_is_said() -> None:
    owed = ProgressReport((7,), 7, "its own TICK has not arrived")

    assert Watched().lives(600, owed) == "markers partition 0 stalled: its own TICK has not arrived"


@pytest.mark.parametrize("answer", [ProbeResult.AWAY, ProbeResult.NOTHING_TO_DO])
def test_an_idle_worker_and_one_whose_broker_is_away_are_left_alone(answer: ProbeResult) -> None:
    worker = Watched(answer)

    assert worker.lives(3600, WAITS) == ""
    assert set(worker.asked) == {False}


def test_a_worker_has_time_to_come_back_after_its_broker_has() -> None:
    worker = Watched(ProbeResult.AWAY)
    worker.lives(3600, WAITS)
    worker.answer = ProbeResult.WORK_WAITS

    assert worker.lives(LIMIT_S / 2 - 1, WAITS) == ""
    assert worker.lives(LIMIT_S / 2, ProgressReport((8,), 8)) == ""


def test_a_broker_that_goes_away_before_the_last_question_is_no_reason() -> None:
    worker = Watched()
    worker.lives(LIMIT_S - 5, WAITS)
    worker.answer = ProbeResult.AWAY

    assert worker.lives(600, WAITS) == ""


def test_a_recovery_that_gets_on_may_take_as_long_as_it_likes() -> None:
    recovering = [ProgressReport((0, records), None, "it is recovering, and no owner") for records in range(100)]

    assert Watched().lives(3600, *[report for report in recovering for _ in range(int(LIMIT_S) - 1)]) == ""


def test_progress_after_the_last_question_counts_too() -> None:
    worker = Watched()
    worker.lives(LIMIT_S, WAITS)

    assert worker.asked == [False, True]
    assert worker.lives(LIMIT_S / 3, ProgressReport((8,), 8)) == ""


def test_a_partition_that_was_stopped_for_people_to_decide_is_left_alone() -> None:
    assert Watched().lives(3600) == ""


def test_a_partition_that_stops_meanwhile_is_not_ended_for() -> None:
    worker = Watched()
    worker.lives(LIMIT_S, WAITS)

    assert worker.lives(3600) == ""


def test_an_event_loop_without_a_turn_is_ended_for_without_asking_anybody() -> None:
    worker = Watched(ProbeResult.AWAY)
    worker.lives(5, WAITS)

    assert worker.lives(600, WAITS, blocked=True) == "the event loop has had no turn"
    assert worker.seconds == pytest.approx(5 + LIMIT_S, abs=1)
    assert worker.asked == []


def test_handlers_may_block_their_event_loop_forever() -> None:
    worker = Watched(watches_loop=False)
    worker.lives(5, WAITS)

    assert worker.lives(3600, WAITS, blocked=True) == ""


def test_what_was_said_before_the_event_loop_was_blocked_does_not_count_against_the_rest() -> None:
    worker = Watched()
    worker.lives(LIMIT_S - 10, WAITS)
    worker.lives(LIMIT_S - 10, WAITS, blocked=True)

    assert worker.lives(5, WAITS) == ""
