"""Scenarios: how one is declared, played and judged."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lab import variants
from lab.audit import Audit
from lab.audit import audit as run_audit
from lab.proof.checker import check
from lab.proof.findings import told
from lab.stage import Stage, recovery_seconds
from marq_worker.broker import EmbeddedBroker

#: Statistics of both the checker and the audit: the checker's names, the audit's.
AUDITED = {
    **{name: name for name in ("acked", "abandoned", "cancelled", "deduplicated", "duplicates", "expired_unread")},
    **{name: name for name in ("lost", "redelivered", "redriven")},
    "waiting": "delayed",
}


class ConditionError(Exception):
    """This machine cannot create a condition that a scenario needs; the text says what to do."""


class Place(Protocol):
    """Where a scenario plays: one broker or several, perhaps behind proxies."""

    @property
    def bootstrap_servers(self) -> str: ...


@dataclass(frozen=True)
class AtBroker:
    """A place with one broker, and the other resources of a scenario."""

    broker: EmbeddedBroker

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers


Play = Callable[[Stage, Any], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """One fault, or one sequence of faults, under load.

    Args:
        fault, seen: texts for the table in docs/guarantees.md: the fault, and its effect for a user.
        place: for scenarios that stop or change the broker (default: the shared broker).
        quick: whether the tests play it.
    """

    name: str
    fault: str
    seen: str
    play: Play
    place: Callable[[], AbstractContextManager[Place]] | None = None
    quick: bool = False


#: The scenarios of all imported modules.
DECLARED: list[Scenario] = []


def scenario(
    name: str,
    fault: str,
    seen: str,
    place: Callable[[], AbstractContextManager[Place]] | None = None,
    *,
    quick: bool = False,
) -> Callable[[Play], Play]:
    """Declare that a function plays a scenario; for the arguments see :class:`Scenario`."""

    def declare(play: Play) -> Play:
        DECLARED.append(Scenario(name, fault, seen, play, place, quick))
        return play

    return declare


@dataclass(frozen=True)
class Result:
    """The result of a scenario: the checker's counts, and its findings."""

    scenario: Scenario
    seconds: float
    statistics: dict[str, Any] = field(default_factory=dict)
    recovery_seconds: float | None = None
    #: Findings with their events, or why the scenario could not be played.
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.wrong and self.statistics.get("lost") == 0 and not self.statistics.get("stranded")

    def line(self) -> str:
        counts = self.statistics
        causes = ", ".join(f"cause {cause}: {count}" for cause, count in sorted(counts.get("causes", {}).items()))
        again = ", ".join(dead_again(counts))
        recovery = "-" if self.recovery_seconds is None else f"{self.recovery_seconds:.1f} s"
        return (
            f"{'passed' if self.passed else 'FAILED':7} {self.scenario.name:36} sent {counts.get('accepted', '?')}, "
            f"lost {counts.get('lost', '?')}, duplicates {counts.get('duplicates', '?')}"
            f"{f' ({causes})' if causes else ''}{f', {again}' if again else ''}, recovery {recovery},"
            f" {self.seconds:.0f} s in all"
        )


def dead_again(counts: Mapping[str, Any]) -> list[str]:
    """Return how many messages have a second dead letter, and how many have one although a handler finished them."""
    texts = []
    if twice := counts.get("dead_twice"):
        texts.append(f"{twice} with two dead letters")
    if done := counts.get("done_and_dead"):
        causes = ", ".join(f"{count} by {cause}" for cause, count in sorted(done.items()))
        texts.append(f"{sum(done.values())} handled and dead-lettered ({causes})")
    return texts


async def play(scenario: Scenario, shared: Place, *, audit: bool = False) -> Result:
    """Play a scenario and let the checker judge its history; keep its files only if something is wrong.

    With ``audit``, the data pipeline's audit must agree.
    """
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"marq-{scenario.name}-"))
    place = contextlib.nullcontext(shared) if scenario.place is None else scenario.place()
    try:
        with place as here:
            async with Stage(here.bootstrap_servers, folder) as stage:
                await scenario.play(stage, here)
                await stage.finish(variants.readable)
                report = check(stage.events)
                wrong = told(report.findings[:5], stage.events)
                if audit:
                    account = await _audit(stage, folder / "data")
                    wrong += account.differences(report.summary(), AUDITED)
    except Exception as error:
        return Result(scenario, time.monotonic() - began_s, wrong=[f"{type(error).__name__}: {error}", f"see {folder}"])
    if wrong:
        stage.write(folder / "history.jsonl")
        wrong.append(f"{len(report.findings)} findings; the whole history: {folder}/history.jsonl")
    else:
        stage.forget()
    recovery = recovery_seconds(stage.events)
    return Result(scenario, time.monotonic() - began_s, report.summary(), recovery, wrong)


async def _audit(stage: Stage, data: Path) -> Audit:
    stop = threading.Event()
    try:
        return await asyncio.to_thread(run_audit, stage.settings, data, stage.events, stop=stop)
    finally:
        # A thread does not notice Ctrl-C.
        stop.set()


#: A broker that the scenario may stop and kill.
own_broker = EmbeddedBroker
