"""Open messages of lines: those of another holder, those to acquire again, and those whose records a cycle reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from marq.kafka.records import Records, Row

if TYPE_CHECKING:
    from marq.consumer.one_per_key import Lines


class Open(NamedTuple):
    """A message that was open when the source was resumed; its lease or delay ends at ``until_s``.

    ``attempt`` is the number of its next delivery, or how many are used up if it was ``leased``. If it ``blocks``, an
    operator has to move or cancel it.
    """

    leased: bool
    attempt: int
    until_s: float
    error: str
    blocks: bool


@dataclass(slots=True, eq=False)
class Place:
    """The place of an open message that is not leased here; its ``row`` serves to acquire it again.

    Nothing happens to it before ``due_s``, or while it is ``busy``: being acquired, or about to end.
    """

    row: Row
    due_s: float = 0.0
    busy: bool = False
    #: Ask before acquiring it: it may be cancelled or moved, or, if ``leased``, another holder may be working on it.
    foreign: bool = False
    leased: bool = False
    #: Its lease here has ended, so this consumer knows whether the attempt counts.
    own: bool = False
    #: The error of its last attempt, if it becomes a dead letter as soon as it is acquired.
    last: str | None = None
    #: The first ``row``, from which each change of the attempt starts: an earlier one may have counted too early.
    original: Row = field(init=False)

    def __post_init__(self) -> None:
        self.original = self.row

    @property
    def offset(self) -> int:
        return self.row.offset


class Reading(NamedTuple):
    """The records of one queue in one source that are already open; ``first``: the offset of the first one, or None.

    Until the cycle has ended, the position of the queue must not pass ``first``.
    """

    lines: Lines
    known: Records
    first: int | None = None

    def before(self, new: Records) -> Reading:
        """Return the reading extended by these messages, which are being acquired."""
        return self._replace(first=min([*self.known.offsets[:1], *new.offsets[:1]], default=None))
