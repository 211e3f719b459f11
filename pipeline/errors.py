"""One error for all that keeps a job from being carried through."""

from __future__ import annotations


class PipelineError(Exception):
    """One sentence for the user: it names the thing, says what was expected and what to do."""
