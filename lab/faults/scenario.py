"""Scenarios: how one is described, played and judged."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.audit import audit as run_audit
from lab.faults.conditions import Servers
from lab.proof.checker import check
from lab.proof.findings import told
from lab.proof.history import write
from lab.stage import SOME, Stage, recovery_seconds

#: Statistics of both the checker and the audit: the checker's names, the audit's.
AUDITED = {
    **{name: name for name in ("acked", "abandoned", "cancelled", "deduplicated", "duplicates", "expired_unread")},
    **{name: name for name in ("lost", "redelivered", "redriven")},
    "waiting": "delayed",
}


Step = Callable[[Stage], Awaitable[object]]
#: Sends messages until `Stage.sending` is False.
Load = Callable[[Stage], Coroutine[Any, Any, None]]
#: Options of a program on its command line.
Options = Sequence[str]


def begin(
    worker: Options = (),
    consumers: Sequence[Options] = ((), ()),
    *,
    workers: int = 1,
    define: Mapping[str, Any] | None = None,
    fill: Step | None = None,
    load: Load = Stage.send,
    some: int = SOME,
    **settings: Any,
) -> Step:
    """Start workers, the load and consumers with these options, and wait for some deliveries.

    ``define`` has arguments of :meth:`lab.stage.Stage.define`, ``settings`` those of :meth:`lab.stage.Stage.worker`.
    ``fill`` sends messages that wait when the load begins.
    """

    async def set_up(stage: Stage) -> None:
        if define is not None:
            stage.define(**define)
        for _ in range(workers):
            await stage.worker(*worker, **settings)
        if fill is not None:
            await fill(stage)
        stage.load(load(stage))
        await asyncio.gather(*[stage.consumer(*options) for options in consumers])
        await stage.delivered_more(some)

    return set_up


#: The set-up of most scenarios: a worker and two consumers.
BEGIN = begin()


@dataclass(frozen=True)
class Scenario:
    """A row of the table: faults under load."""

    name: str
    #: What happens, one after the other; ``some`` deliveries must follow each.
    faults: Sequence[Step]
    #: Starts programs and load.
    setup: Step | None = BEGIN
    #: For scenarios that stop or change the broker; all others share one.
    place: Callable[[], AbstractContextManager[Servers]] | None = None
    #: Raises RunError if something does not hold when the load has ended and each message, too; in all scenarios,
    #: nothing may be lost and the checker must explain each duplicate.
    holds: Step | None = None
    some: int = SOME
    #: Whether the tests play it.
    quick: bool = False

    async def act(self, stage: Stage) -> None:
        """Carry out set-up and faults, until each message has ended if something must hold then."""
        if self.setup is not None:
            await self.setup(stage)
        for fault in self.faults:
            await fault(stage)
            await stage.delivered_more(self.some)
        if self.holds is not None:
            await stage.end_load()
            await stage.drain()
            await self.holds(stage)


@dataclass(frozen=True)
class ScenarioResult:
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

    def numbers(self) -> list[str]:
        """Return how many messages were sent and lost, how many duplicates by cause, and how long the recovery took."""
        counts = self.statistics
        causes, ends = _by_cause(counts.get("causes", {})), [f"{counts.get('duplicates', '?')}"]
        ends[0] += f" ({causes})" if causes else ""
        if twice := counts.get("dead_twice"):
            ends.append(f"{twice} with two dead letters")
        if done := counts.get("done_and_dead"):
            ends.append(f"{sum(done.values())} handled and dead-lettered ({_by_cause(done)})")
        recovery = "-" if self.recovery_seconds is None else f"{self.recovery_seconds:.1f} s"
        return [str(counts.get("accepted", "?")), str(counts.get("lost", "?")), "; ".join(ends), recovery]

    def line(self) -> str:
        sent, lost, duplicates, recovery = self.numbers()
        return (
            f"{'passed' if self.passed else 'FAILED':7} {self.scenario.name:36} sent {sent}, lost {lost}, duplicates"
            f" {duplicates.replace(';', ',')}, recovery {recovery}, {self.seconds:.0f} s in all"
        )


def _by_cause(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} by {cause}" for cause, count in sorted(counts.items()))


def play(scenario: Scenario, shared: Servers | None = None, *, audit: bool = False, seed: int = 1) -> ScenarioResult:
    """Play a scenario and let the checker judge its history; keep its files only if something is wrong.

    With ``audit``, the data pipeline's audit must agree. ``seed`` is that of scenarios that act at random.
    """
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"marq-{scenario.name}-"))
    place = contextlib.nullcontext(shared) if scenario.place is None else scenario.place()
    try:
        with place as here:
            assert here is not None, "a scenario without a place is played on the shared servers"
            stage = Stage(here.bootstrap_servers, folder, place=here, seed=seed)
            asyncio.run(_play(scenario, stage))
            report = check(stage.events)
            wrong = told(report.findings[:5], stage.events)
            if audit:
                account = run_audit(stage.settings, folder / "data", stage.events)
                wrong += account.differences(report.summary(), AUDITED)
    except Exception as error:
        return ScenarioResult(
            scenario, time.monotonic() - began_s, wrong=[f"{type(error).__name__}: {error}", f"see {folder}"]
        )
    if wrong:
        write(stage.events, folder / "history.jsonl")
        wrong.append(f"{len(report.findings)} findings; the whole history: {folder}/history.jsonl")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    recovery = recovery_seconds(stage.events)
    return ScenarioResult(scenario, time.monotonic() - began_s, report.summary(), recovery, wrong)


async def _play(scenario: Scenario, stage: Stage) -> None:
    async with stage:
        await scenario.act(stage)
        await stage.finish()
