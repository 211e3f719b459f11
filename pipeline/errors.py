"""The one error for everything that stops a job."""

from __future__ import annotations


class PipelineError(Exception):
    """One sentence for the user: what failed, why, and what to do."""
