"""Which faults a seed has and how often: each is off entirely in about half of the seeds.

A fault that always happens hides the bugs that need its absence: a row that a tracker drops by mistake is healed by the
tracker's next crash. So seeds differ in kind, not only in luck (TigerBeetle calls this a swarm).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, fields

#: The share of seeds without any fault, in which nothing may be delivered twice.
CALM_SHARE = 0.06


@dataclass
class Faults:
    """Probabilities that a step fails in this way, or (named ``…_every_ms``) mean times between two such events."""

    # Senders and consumers.
    send_failed: float = 0.2
    send_unknown: float = 0.2
    large: float = 0.1
    acquire_failed: float = 0.15
    acquire_unknown: float = 0.15
    acquire_slow: float = 0.1
    renew_failed: float = 0.1
    renew_unknown: float = 0.1
    renew_slow: float = 0.1
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
    rebalance_every_ms: float = 1_500.0
    # Trackers.
    tracker_crash: float = 0.004
    tracker_pause: float = 0.004
    starved: float = 0.004
    table_lost: float = 0.5
    delivery_lost: float = 0.05
    flush_aborted: float = 0.1
    flush_unknown: float = 0.1
    tick_lost: float = 0.1
    slow_commit: float = 0.2
    tracker_rebalance_every_ms: float = 1_500.0
    # All.
    late_read: float = 0.3
    late_settings: float = 0.5
    suspended: float = 0.3
    # Clocks.
    clock_step_every_ms: float = 150.0
    wall_step_every_ms: float = 1_000.0


@dataclass
class Rare(Faults):
    """Faults that change a whole world, each in few seeds only."""

    clock_jump_every_ms: float = 1_500.0
    garbage_every_ms: float = 400.0
    newer_marker: float = 0.02
    unread_gone_every_ms: float = 1_500.0
    markers_gone_every_ms: float = 400.0
    #: Share of these removals that include markers which a tracker still needs.
    markers_needed: float = 0.1
    changelog_lost_every_ms: float = 2_500.0
    changelog_compacted_every_ms: float = 400.0
    offsets_lost_every_ms: float = 2_500.0
    settings_every_ms: float = 900.0
    move_every_ms: float = 900.0
    #: Whether the handler of one message ends its process, each time.
    killer: float = 0.0
    #: How often a consumer is paused while one of its RENEWs is on its way, which arrives meanwhile.
    renew_paused: float = 0.0


_RARE_SHARES = {
    "clock_jump_every_ms": 0.08,
    "garbage_every_ms": 0.3,
    "newer_marker": 0.06,
    "unread_gone_every_ms": 0.1,
    "markers_gone_every_ms": 0.25,
    "markers_needed": 0.3,
    "changelog_lost_every_ms": 0.1,
    "changelog_compacted_every_ms": 0.3,
    "offsets_lost_every_ms": 0.06,
    "settings_every_ms": 0.25,
    "move_every_ms": 0.25,
}
NAMES = [field.name for field in fields(Rare)]
#: No seed has them by chance: other faults would use up the attempts of messages next to a killer.
_NEVER = ("killer", "renew_paused")


def choose(rng: random.Random, without: Collection[str] = ()) -> Rare:
    """Return the faults of a seed, except for some."""
    faults = Rare()
    calm = rng.random() < CALM_SHARE
    for name in NAMES:
        if name in _NEVER:
            continue
        strength, lot = rng.random() + 0.5, rng.random()
        if calm or lot >= _RARE_SHARES.get(name, 0.5) or name in without:
            setattr(faults, name, 0.0)
        elif name.endswith("_every_ms"):
            setattr(faults, name, getattr(faults, name) / strength)
        else:
            setattr(faults, name, getattr(faults, name) * strength)
    return faults


def only(**strengths: float) -> Rare:
    """Return the faults of a world in which nothing else goes wrong."""
    return Rare(**{**dict.fromkeys(NAMES, 0.0), **strengths})
