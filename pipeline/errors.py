"""The one error for everything that stops a job."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

#: Queue names listed in an error.
MAX_NAMES = 10


class PipelineError(Exception):
    """One sentence for the user: what failed, why, and what to do."""


def unknown_queue(queue: str, known: Sequence[str], option: str = "--queue") -> str:
    """Return the error text for a queue without messages, with the most similar names."""
    near = difflib.get_close_matches(queue, known, MAX_NAMES) or sorted(known)[:MAX_NAMES]
    more = ", …" if len(known) > len(near) else ""
    return f"{option} {queue}: not in the table lifecycle, which has {', '.join(near)}{more}"
