"""Where the tables of a run end, which limits what can be concluded about a record."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame

from marq.wire.names import Names
from pipeline.lake import Commit


@dataclass(frozen=True)
class Cut:
    """``reading``: what each queue reads (:data:`pipeline.subscriptions.READING`).

    ``clocks``: the last activity of each tracker (log_partition, seen_at), and since when it was alive (alive_since);
    None if overdue messages do not matter. ``round_``: the last commit of ``ingest`` (:meth:`pipeline.ingest.Ingest`).
    ``keyed``: whether messages have ordering keys.
    """

    names: Names
    round_: Commit
    reading: DataFrame
    clocks: DataFrame | None
    keyed: bool

    @property
    def truncated(self) -> bool:
        """Whether markers were removed before they were ingested."""
        first = self.round_["first"]["markers"].get(self.names.markers, {})
        return bool(self.round_["gaps"]["markers"]) or any(first.values())
