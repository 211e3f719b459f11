"""What is open, as the workers say; where they do not, as the changelog and the markers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.statistics import add_up, census_of
from app.peers import ask_workers
from marq.inspector import OPEN, Inspector, open_counts
from marq.settings import ClientSettings


@dataclass(frozen=True)
class Open:
    """``queues``: figures by queue; ``complete``: those of all markers partitions, up to where each was to be read."""

    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    complete: bool = True
    workers: int = 0
    #: Whether what waits has been counted, too.
    census: bool = False

    def of(self, queue: str) -> dict[str, int]:
        """Return how many messages of a queue are open, by what they wait for."""
        figures = self.queues.get(queue, {})
        return {name: int(figures.get(name, 0)) for name in OPEN}


async def told_by_workers(client: ClientSettings, ends: Mapping[int, int] | None = None) -> Open:
    """Return what the workers say; ``ends``: what each markers partition must have been read to."""
    members, answers = await ask_workers(client, "api/queues")
    told = [answer for answer in answers if answer is not None]
    complete = members.settled and covers(told, ends)
    return Open(add_up(told), complete, len(members.urls), census_of(told, everyone=complete)["complete"])


def covers(answers: Sequence[Mapping[str, Any]], ends: Mapping[int, int] | None) -> bool:
    """Whether the owners among these have read each markers partition to its end."""
    applied = {
        part["partition"]: part["applied_offset"]
        for answer in answers
        for part in answer["partitions"]
        if part["state"] == "owner" and not part["alarm"]
    }
    if ends is None:
        return bool(applied)
    return all(applied.get(partition, -1) >= end - 1 for partition, end in ends.items())


async def opened(client: ClientSettings, inspector: Inspector, ends: Mapping[int, int]) -> Open:
    """Return what is open when the markers have been read to these ends, with workers or without any.

    Not complete: workers run and have not come so far yet.
    """
    found = await told_by_workers(client, ends)
    if found.complete or found.workers:
        return found
    return Open(open_counts((await inspector.owned()).values()))
