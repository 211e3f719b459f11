"""What was asked of a tracker and is to be answered: whether a RESCHEDULE or CANCEL came in time.

A CANCEL that came in time needs no answer: its fact is one. A RESCHEDULE that found the message on its way is answered
when it has turned out whether that left. Whoever asks again is answered again, so an answer that is lost with its owner
costs a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from marq.core.markers import Answer, Cancel, Outcome, Reschedule, Source
from marq.core.open_messages import OpenMessages
from marq.core.rows import Lease


class _Question(NamedTuple):
    """A RESCHEDULE or CANCEL of one message; ``lease`` is what a RESCHEDULE gave it, None when it came too late."""

    holder: int
    queue: str
    source: Source
    offset: int
    lease: Lease | None


class Questions:
    """Those of one markers partition."""

    def __init__(self) -> None:
        self._open: list[_Question] = []

    def ask(self, batch: Reschedule | Cancel, offsets: Sequence[int], lease: Lease | None) -> None:
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
        return [_answer(queue, holder, source, outcomes) for (queue, holder, source), outcomes in groups.items()]


def _answer(queue: str, holder: int, source: Source, outcomes: dict[int, Outcome]) -> Answer:
    offsets = sorted(outcomes)
    return Answer(queue, holder, source, offsets, [outcomes[offset] for offset in offsets])
