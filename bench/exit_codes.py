"""The exit code of a benchmark run."""

from __future__ import annotations

from collections.abc import Sequence

from bench.suite import Outcome


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a row failed, 2 if a bar is not met."""
    if any(outcome.error for outcome in outcomes):
        return 1
    return 0 if all(bar.met for outcome in outcomes for bar in outcome.bars) else 2
