"""The answers that a tracker owes: whether a RESCHEDULE or CANCEL came in time, and which messages of a RESUME are
open.

A CANCEL that was in time needs no answer other than its fact. A RESCHEDULE of a firing message is answered once it is
known whether the message was sent. Clients that ask again are answered again, so an answer that is lost with its owner
only costs a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from marq.core.due_messages import DueMessages
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import UNLIMITED_ATTEMPTS
from marq.wire.error_texts import error_of, most_bytes
from marq.wire.markers import (
    BLOCKED_MS,
    BLOCKED_WAIT_MS,
    Answer,
    Cancel,
    RequestOutcome,
    Reschedule,
    Resume,
    Resumed,
    Source,
    offset_runs,
    spans,
)

#: Bytes of a message without its error in an answer to a RESUME, and of a batch of the answer.
_MESSAGE_BYTES, _BATCH_BYTES = 20, 64 * 1024


class _Question(NamedTuple):
    """A RESCHEDULE or CANCEL of one message; ``lease`` is the one it got from a RESCHEDULE, None if too late."""

    holder: int
    queue: str
    source: Source
    offset: int
    lease: LeaseRow | None


class PendingReplies:
    """The unanswered questions to the tracker of one markers partition."""

    def __init__(self) -> None:
        self._open: list[_Question] = []
        #: The RESUMEs and their places in the log; of a repeated one only the last.
        self._resumes: dict[tuple[object, ...], tuple[Resume, int]] = {}

    def ask(self, batch: Reschedule | Cancel, offsets: Sequence[int], lease: LeaseRow | None) -> None:
        """Note a question about some messages of a batch."""
        self._open += [_Question(batch.holder, batch.queue, batch.source, offset, lease) for offset in offsets]

    def ask_open(self, batch: Resume, asked_at: int) -> None:
        """Note a question about open messages; the offset of its record is ``asked_at``."""
        question = batch.holder, batch.queue, batch.source, tuple(batch.offsets), batch.onwards
        self._resumes[question] = batch, asked_at

    def take(self, messages: DueMessages, now_ms: int) -> list[Answer | Resumed]:
        """Return the answers that can be given now; ``now_ms`` is the log's clock."""
        resumes, self._resumes = self._resumes, {}
        resumed = [_resumed(batch, asked_at, messages, now_ms) for batch, asked_at in resumes.values()]
        return [*self._outcomes(messages), *chain.from_iterable(resumed)]

    def _outcomes(self, messages: DueMessages) -> list[Answer]:
        if not self._open:
            return []
        groups: dict[tuple[str, int, Source], dict[int, RequestOutcome]] = {}
        unanswered: list[_Question] = []
        for question in self._open:
            holder, queue, source, offset, lease = question
            if lease is not None and messages.is_firing(lease.queue, source, offset):
                unanswered.append(question)
                continue
            left = lease is None or offset not in messages.open_in(lease.queue, source)
            outcomes = groups.setdefault((queue, holder, source), {})
            # Several queues may have a message at this place; it is enough if one of them was in time.
            outcomes[offset] = min(
                RequestOutcome.TOO_LATE if left else RequestOutcome.DONE, outcomes.get(offset, RequestOutcome.TOO_LATE)
            )
        self._open = unanswered
        return [
            Answer(*asked, offsets[run], [outcomes[offset] for offset in offsets[run]])
            for asked, outcomes in groups.items()
            for offsets in [sorted(outcomes)]
            for run in offset_runs(offsets)
        ]


def _resumed(batch: Resume, asked_at: int, messages: DueMessages, now_ms: int) -> Iterator[Resumed]:
    queue, source, offsets = batch.queue, batch.source, batch.offsets
    leases = messages.open_in(queue, source)
    acquired: list[tuple[int, int]] = []
    if batch.onwards:
        begin = offsets[0]
        offsets = [begin, *sorted([offset for offset in leases if offset > begin])]
        ranges = messages.acquired.get((queue, source))
        acquired = [] if ranges is None else ranges.within(begin, max(ranges.end, begin))
    rows = [leases.get(offset) for offset in offsets]
    # Without tracebacks: the asking consumer only needs the errors.
    texts = ["" if row is None else error_of(row.text) for row in rows]
    sizes = [_MESSAGE_BYTES + most_bytes(text) for text in texts]
    parts = list(_parts(offsets, sizes))
    for number, part in enumerate(parts, 1):
        some = rows[part]
        yield Resumed(
            queue,
            batch.holder,
            source,
            offsets[part],
            asked_at,
            len(parts) - number,
            acquired if number == 1 else (),
            [0 if row is None else row.state for row in some],
            [0 if row is None else _attempt(row) for row in some],
            [0 if row is None else _wait_ms(row.due_ms - now_ms) for row in some],
            texts[part],
        )


def _parts(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[slice]:
    """Cut messages into runs that fit into a batch, by bytes and by the distance of their offsets."""
    for span in spans(sizes, _BATCH_BYTES):
        for run in offset_runs(offsets[span]):
            yield slice(span.start + run.start, span.start + run.stop)


def _wait_ms(left_ms: int) -> int:
    """Return the time until a lease or delay ends, as far as an answer can state it."""
    return BLOCKED_WAIT_MS if left_ms >= BLOCKED_MS // 2 else min(max(left_ms, 0), BLOCKED_WAIT_MS - 1)


def _attempt(lease: LeaseRow) -> int:
    """Return the attempt of a message's next delivery if it was released, else how many it has used up."""
    if lease.state is State.LEASED_IN_ORDER:
        return lease.attempt - (not lease.counted)
    after = lease.attempt + (lease.counted and lease.state in (State.RELEASED, State.WAITING_IN_ORDER))
    # A producer may have written the largest attempt. An answer that can't be encoded would stop every owner.
    return min(after, UNLIMITED_ATTEMPTS)
