"""Groups records by message: the record that began it, its redeliveries, and its redriven dead letters."""

from __future__ import annotations

from lab.proof.evidence import Evidence
from lab.proof.evidence_types import Trail
from lab.proof.fold import Key


class Messages:
    """All messages of a history, by the queue and the place of the record that began each."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        #: The queues of dead letters that were redriven, by the queue that they were sent to and the message's id.
        self._origins: dict[Key, str] = {}
        trails = [trail for trail in evidence.trails.values() if trail.id]
        for trail in trails:
            if trail.redriven and trail.place in evidence.letters:
                self._origins[trail.queue, trail.id] = evidence.letters[trail.place]["queue"]
        self.trails: dict[Key, list[Trail]] = {}
        for trail in trails:
            self.trails.setdefault(self.of(trail), []).append(trail)

    def of(self, trail: Trail) -> Key:
        """Return the message of a record: of its own queue, or else of the queue that it comes from."""
        began = [first.queue for first in self._evidence.places.get(trail.id, ()) if first.began]
        origin = self._origins.get((trail.queue, trail.id), "")
        return next((queue for queue in (trail.queue, origin) if queue in began), (began or [trail.queue])[0]), trail.id
