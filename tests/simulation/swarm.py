"""Which faults a seed has and how often: each is off altogether in about a half of the seeds.

A fault that always happens hides the bugs that need its absence: a row that a tracker drops by mistake is healed by the
tracker's next crash. So seeds differ in kind, not only in luck (TigerBeetle calls this a swarm).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

#: The share of seeds without any fault, in which nothing may be delivered twice.
CALM_SHARE = 0.06
#: The share of seeds in which a broker's clock jumps by more than the log clock tolerates.
JUMP_SHARE = 0.08


@dataclass
class Faults:
    """Chances: of a step that fails in this way, or (named ``…_every_ms``) the mean time between two such events."""

    send_failed: float = 0.2
    send_unknown: float = 0.2
    acquire_failed: float = 0.15
    acquire_unknown: float = 0.15
    marker_failed: float = 0.1
    marker_unknown: float = 0.1
    marker_slow: float = 0.1
    commit_failed: float = 0.15
    commit_unknown: float = 0.15
    forgotten: float = 0.08
    consumer_crash: float = 0.004
    consumer_pause: float = 0.01
    consumer_stop: float = 0.01
    late_news: float = 0.4
    tracker_crash: float = 0.004
    tracker_pause: float = 0.004
    table_lost: float = 0.5
    flush_aborted: float = 0.1
    flush_unknown: float = 0.1
    tick_lost: float = 0.1
    slow_commit: float = 0.2
    late_read: float = 0.3
    garbage: float = 0.01
    clock_step: float = 0.02
    rebalance_every_ms: float = 1_500.0
    tracker_rebalance_every_ms: float = 1_500.0


_NAMES = [field.name for field in fields(Faults)]


def choose(rng: random.Random) -> Faults:
    """Return the faults of a seed."""
    faults = Faults()
    calm = rng.random() < CALM_SHARE
    for name in _NAMES:
        strength = rng.random() + 0.5
        if calm or rng.random() < 0.5:
            setattr(faults, name, 0.0)
        elif name.endswith("_every_ms"):
            setattr(faults, name, getattr(faults, name) / strength)
        else:
            setattr(faults, name, getattr(faults, name) * strength)
    return faults
