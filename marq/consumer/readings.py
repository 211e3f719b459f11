"""The records of a queue with ordering that a cycle reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from marq.kafka.records import Records

if TYPE_CHECKING:
    from marq.consumer.one_per_key import Lines


class Reading(NamedTuple):
    """The records of one queue in one source that are open already, and the ``first`` open one, None if there is none.

    Until the cycle has ended, the position of the queue may not pass the first one.
    """

    lines: Lines
    known: Records
    first: int | None = None

    def before(self, new: Records) -> Reading:
        """Return the reading extended by these messages, which are being acquired."""
        return self._replace(first=min([*self.known.offsets[:1], *new.offsets[:1]], default=None))
