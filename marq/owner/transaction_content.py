"""The content of an owner's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marq.core.redeliver_or_dead_letter import DueAction
from marq.wire.dead_letter_notes import Note
from marq.wire.markers import Batch, Payload, Tick

#: A due message and its payload.
Due = tuple[DueAction, Payload]
#: A record that could not be decoded: its offset, value and error.
Unreadable = tuple[int, bytes | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTransaction:
    """Everything here becomes visible together, or nothing does.

    Without its fact, the next owner would send a redelivery again. Without its redelivery, a fact would end a message
    for good. A row without the markers that it was folded from would outlive its message.
    """

    #: The log's clock, and the timestamp of the records.
    now_ms: int
    appended_ms: int
    #: Records for the markers partition, in this order; the first ``answers`` of them are answers.
    markers: Sequence[Batch]
    answers: int = 0
    #: Messages to send to their destinations; ``markers`` has their facts.
    due: Sequence[Due] = ()
    #: Whether ``markers`` has messages of schedules.
    planned: bool = False
    #: The TICK among ``markers``: abort its transaction if it takes too long (see marq.core.storage.log_clock).
    tick: Tick | None = None
    #: Rows for the changelog and then the table (None: delete), which hold the fold up to ``applied``.
    rows: Mapping[bytes, bytes | None] | None = None
    applied: int = -1
    #: Records for the dead-letter topic and the quarantine topic; only with rows.
    notes: Sequence[Note] = ()
    quarantine: Sequence[Unreadable] = ()
