"""Snapshots: which dead letters existed when they were counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Self

from marq.wire.errors import ConfigError


class Snapshot(NamedTuple):
    """The dead letters that existed at one moment: those before the offset in ``ends`` for their partition.

    Pass the same snapshot when you count and when you act, so that the action does not affect messages that were
    dead-lettered in between. Ages refer to ``at_ms`` (ms since the epoch).
    """

    at_ms: int
    ends: Mapping[int, int]

    def __str__(self) -> str:
        return f"{self.at_ms}/{','.join(f'{partition}:{end}' for partition, end in sorted(self.ends.items()))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str()`` returned.

        Raises:
            ConfigError: the text is not a snapshot.
        """
        match = re.fullmatch(r"(\d{1,15})/(|\d{1,9}:\d{1,18}(?:,\d{1,9}:\d{1,18})*)", text, re.ASCII)
        if match is None:
            raise ConfigError(f"as_of={text}: not a snapshot of the dead letters; get a new one and pass it unchanged")
        ends = [pair.split(":") for pair in match[2].split(",") if pair]
        return cls(int(match[1]), {int(partition): int(end) for partition, end in ends})

    def includes(self, partition: int, offset: int) -> bool:
        """Return whether the dead letter at this place existed at that moment."""
        return offset < self.ends.get(partition, 0)
