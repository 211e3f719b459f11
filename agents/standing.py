"""How far somebody is who reads a partition, as the watchdog sees it (app/watchdog.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """``progress``: differs from the one before whenever something got further."""

    progress: tuple[int, ...]
    #: The next record that is to be read; None: not known yet.
    position: int | None = None
    #: What is to be done although nothing has to be read for it, for people; empty: nothing.
    owes: str = ""
