"""A seed that failed, with as few faults and messages as still show it, and what it did, event by event."""

from __future__ import annotations

import json
from dataclasses import replace

from lab.proof.findings import told
from tests.simulation import swarm
from tests.simulation.world import Plan, inspect, simulate

#: Number of events to print of a seed whose failure no event shows.
LAST_EVENTS = 40
_FEW_MESSAGES = (1, 2, 3, 5, 8)


def minimise(seed: int, plan: Plan) -> Plan:
    """Leave out one fault after the other, and messages, as long as the same check fails."""
    check = simulate(seed, plan).check
    for name in swarm.NAMES:
        smaller = replace(plan, without=plan.without | {name})
        if simulate(seed, smaller).check == check:
            plan = smaller
    for count in _FEW_MESSAGES:
        smaller = replace(plan, messages=count)
        if simulate(seed, smaller).check == check:
            return smaller
    return plan


def command(seed: int, plan: Plan) -> str:
    """Return the command that repeats a seed."""
    parts = [f"python -m tests.simulation 1 --start {seed}"]
    if plan.without:
        parts.append(f"--without {','.join(sorted(plan.without))}")
    if plan.messages is not None:
        parts.append(f"--messages {plan.messages}")
    return " ".join(parts)


def trace(seed: int, plan: Plan) -> list[str]:
    """Return the events that show the failure."""
    result, findings, world = inspect(seed, plan)
    faults = [name for name in swarm.NAMES if getattr(world.faults, name)]
    lines = [result.failed, f"    faults: {', '.join(faults) or 'none'}"]
    if findings:
        return [*lines, *told(findings[:1], world.history.events)]
    events = world.history.events[-LAST_EVENTS:]
    return [*lines, *(f"    {json.dumps(event, ensure_ascii=False)}" for event in events)]
