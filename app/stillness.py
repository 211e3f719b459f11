"""What stands still for good, decided from what a worker said of itself and how long it has been running since.

Time here is that in which the watchdog itself was running: a process that was stopped, or a machine that stood still,
adds next to nothing to it. Something is said to stand still when it was the same for the whole limit, had something to
do for at least the half of it, and could have done it. A witness with clients of its own is asked at the half and at
the end: where there is nothing to do, or the broker is away, the time begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from agents.standing import Standing


class Answer(Enum):
    """What a witness found."""

    #: The broker does not do what is asked of it, for the witness either.
    AWAY = auto()
    NOTHING_TO_DO = auto()
    WORK_WAITS = auto()


#: Asks a witness: about what, how far that is, whether it is the last time. It may take a while.
Ask = Callable[[Hashable, Standing, bool], Answer]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the event loop said last; ``turns`` rises while it runs. The ``str`` of what stands is for people."""

    turns: int
    standings: Mapping[Hashable, Standing]


@dataclass(slots=True)
class _Case:
    progress: tuple[int, ...]
    still_s: float = 0.0
    asked: bool = False
    condemned: bool = False


@dataclass
class Stillness:
    """Judges sample after sample; ``watches_loop``: whether the event loop must not stand still either."""

    limit_s: float
    ask: Ask
    watches_loop: bool = True
    _turns: int = -1
    _loop_still_s: float = 0.0
    _cases: dict[Hashable, _Case] = field(default_factory=dict)

    def look(self, sample: Sample, passed_s: float) -> str:
        """Return what stands still for good, for people; empty: nothing.

        ``passed_s``: how long this process has been running since the last look.
        """
        if sample.turns == self._turns:
            # What is said of the rest is old.
            self._loop_still_s += passed_s
            over = self.watches_loop and self._loop_still_s >= self.limit_s
            return "the event loop has had no turn" if over else ""
        self._turns, self._loop_still_s = sample.turns, 0.0
        self._cases = {subject: self._case(subject, standing) for subject, standing in sample.standings.items()}
        for subject, standing in sample.standings.items():
            if self._judge(subject, self._cases[subject], standing, passed_s):
                return f"{subject} stands still: {standing.owes or 'what is there for it is not read'}"
        return ""

    @property
    def suspects(self) -> frozenset[Hashable]:
        """What has stood still for half of the limit although a witness found work for it."""
        return frozenset(subject for subject, case in self._cases.items() if case.asked)

    def _case(self, subject: Hashable, standing: Standing) -> _Case:
        case = self._cases.get(subject)
        return case if case is not None and case.progress == standing.progress else _Case(standing.progress)

    def _judge(self, subject: Hashable, case: _Case, standing: Standing, passed_s: float) -> bool:
        if case.condemned:
            # It had the time since the last look, while the witness was asked, to prove it wrong.
            return True
        case.still_s += passed_s
        last = case.asked and case.still_s >= self.limit_s
        if not last and (case.asked or case.still_s < self.limit_s / 2):
            return False
        answer = self.ask(subject, standing, last)
        if answer is not Answer.WORK_WAITS:
            self._cases[subject] = _Case(standing.progress)
        else:
            case.asked, case.condemned = True, last
        return False
