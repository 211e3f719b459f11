"""A worker with two defects, for the test of the check: it is early, and it delivers what it says is cancelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from marq.core import leases
from marq.core.fires import Destination, Fire
from marq.core.leases import LeaseBook
from marq.core.markers import Cause

#: How much too early.
EARLY_MS = 700


def install() -> None:
    """Put the defects into this whole process."""
    due, decide = LeaseBook.due, leases.what_is_due

    def due_early(book: LeaseBook, now_ms: int) -> list[Fire]:
        return due(book, now_ms + EARLY_MS)

    def decide_disobediently(*given: Any) -> Fire:
        fire = decide(*given)
        return replace(fire, destination=Destination.QUEUE) if fire.cause is Cause.CANCELLED else fire

    LeaseBook.due = due_early  # type: ignore[method-assign]
    leases.what_is_due = decide_disobediently
