"""The answers that a tracker owes: whether a RESCHEDULE or CANCEL came in time.

A CANCEL that came in time needs no answer: its fact is one. A RESCHEDULE of a firing message is answered when it is
known whether the message left. A client that asks again is answered again, so an answer that is lost with its owner
costs a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from marq.core.storage.open_messages import OpenMessages
from marq.core.storage.rows import LeaseRow
from marq.wire.markers import Answer, Cancel, Outcome, Reschedule, Source


class _Question(NamedTuple):
    """A RESCHEDULE or CANCEL of one message; ``lease`` is the one it got from a RESCHEDULE, None if too late."""

    holder: int
    queue: str
    source: Source
    offset: int
    lease: LeaseRow | None


class PendingReplies:
    """The questions to the tracker of one markers partition that are not answered yet."""

    def __init__(self) -> None:
        self._open: list[_Question] = []

    def ask(self, batch: Reschedule | Cancel, offsets: Sequence[int], lease: LeaseRow | None) -> None:
        """Note a question about some messages of a batch."""
        self._open += [_Question(batch.holder, batch.queue, batch.source, offset, lease) for offset in offsets]

    def take(self, find: Callable[[Source], OpenMessages]) -> list[Answer]:
        """Return the answers that can be given now."""
        if not self._open:
            return []
        groups: dict[tuple[str, int, Source], dict[int, Outcome]] = {}
        unanswered: list[_Question] = []
        for question in self._open:
            holder, queue, source, offset, lease = question
            opened = find(source)
            if lease is not None and offset in opened.firing:
                unanswered.append(question)
                continue
            outcome = Outcome.TOO_LATE if lease is None or offset not in opened.leases else Outcome.DONE
            groups.setdefault((queue, holder, source), {})[offset] = outcome
        self._open = unanswered
        return [
            Answer(*asked, sorted(outcomes), [outcomes[offset] for offset in sorted(outcomes)])
            for asked, outcomes in groups.items()
        ]
