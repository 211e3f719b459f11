"""What a scenario is, and how one is judged."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from broker import EmbeddedBroker
from faults.audited import differences
from faults.stage import Stage, recovery_seconds
from proof.check import told
from proof.checker import check


class Place(Protocol):
    """Where a scenario plays: a broker, or several, or one behind something."""

    @property
    def bootstrap_servers(self) -> str: ...


@dataclass(frozen=True)
class AtBroker:
    """A place with one broker, and whatever else a scenario needs beside it."""

    broker: EmbeddedBroker

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers


@dataclass(frozen=True)
class Scenario:
    """One fault, or one sequence of faults, under load."""

    name: str
    #: What the table in docs/guarantees.md says of it: what happens, and what a user sees.
    fault: str
    seen: str
    play: Callable[[Stage, Any], Awaitable[None]]
    #: A broker of its own, for whoever stops or changes it; None: the one that all others share.
    place: Callable[[], AbstractContextManager[Place]] | None = None
    #: Whether it is among those that CI plays.
    quick: bool = False


@dataclass(frozen=True)
class Result:
    """What came of a scenario: the report's figures, and what is wrong."""

    scenario: Scenario
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    recovery_seconds: float | None = None
    #: Findings with their events, or why the scenario could not be played.
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.wrong and self.figures.get("lost") == 0 and not self.figures.get("stranded")

    def line(self) -> str:
        """The result in one line."""
        figures = self.figures
        causes = ", ".join(f"cause {cause}: {count}" for cause, count in sorted(figures.get("causes", {}).items()))
        again = ", ".join(dead_again(figures))
        recovery = "-" if self.recovery_seconds is None else f"{self.recovery_seconds:.1f} s"
        return (
            f"{'passed' if self.passed else 'FAILED':7} {self.scenario.name:36} sent {figures.get('accepted', '?')}, "
            f"lost {figures.get('lost', '?')}, duplicates {figures.get('duplicates', '?')}"
            f"{f' ({causes})' if causes else ''}{f', {again}' if again else ''}, recovery {recovery},"
            f" {self.seconds:.0f} s in all"
        )


def dead_again(figures: Mapping[str, Any]) -> list[str]:
    """Say how many messages have a second dead letter, and how many are dead although a handler finished them."""
    texts = []
    if twice := figures.get("dead_twice"):
        texts.append(f"{twice} second dead letters")
    if done := figures.get("done_and_dead"):
        causes = ", ".join(f"{count} by {cause}" for cause, count in sorted(done.items()))
        texts.append(f"{sum(done.values())} handled and dead ({causes})")
    return texts


async def play(scenario: Scenario, shared: Place, *, audit: bool = False) -> Result:
    """Play a scenario and let the checker judge its history; what it wrote is kept only if something is wrong.

    ``audit``: let the data pipeline draw up its account, too, which must be the same.
    """
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"marq-{scenario.name}-"))
    place = contextlib.nullcontext(shared) if scenario.place is None else scenario.place()
    try:
        with place as here:
            async with Stage(here.bootstrap_servers, folder) as stage:
                await scenario.play(stage, here)
                await stage.finish()
                report = check(stage.events)
                wrong = told(report.findings[:5], stage.events)
                if audit:
                    asked = (here.bootstrap_servers, stage.prefix, folder, stage.events, report.summary())
                    wrong += await asyncio.to_thread(differences, *asked)
    except Exception as error:
        return Result(scenario, time.monotonic() - began_s, wrong=[f"{type(error).__name__}: {error}", f"see {folder}"])
    if wrong:
        stage.write(folder / "history.jsonl")
        wrong.append(f"{len(report.findings)} findings; the whole history: {folder}/history.jsonl")
    else:
        stage.forget()
    recovery = recovery_seconds(stage.events)
    return Result(scenario, time.monotonic() - began_s, report.summary(), recovery, wrong)


def own_broker() -> AbstractContextManager[Place]:
    """Return a broker that a scenario may stop and kill."""
    return EmbeddedBroker()
