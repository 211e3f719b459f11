"""Faust's assignor for the group of trackers, for static members that return with another address.

A static member that restarts within its session keeps its partitions: the broker returns its former assignment without
asking the leader. Faust stores the member's address in the assignment, and asserts that it is the current one. A new
web port, or a new pod's address, would stop the coordinator, and the worker would read nothing.
"""

from __future__ import annotations

from typing import Any

from faust.assignor import PartitionAssignor
from faust.assignor.client_assignment import ClientMetadata


class TrackerAssignor(PartitionAssignor):
    """Accepts an assignment with any address; others learn the current one from the group's members."""

    def on_assignment(self, assignment: Any) -> None:
        told = ClientMetadata.loads(self._decompress(assignment.user_data))
        told.url = str(self._url)
        assignment.user_data = self._compress(told.dumps())
        super().on_assignment(assignment)
