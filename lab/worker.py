"""A worker that writes its history: ``python -m lab.worker NAME HISTORY [--die-... N]``, then as Faust.

It records when it takes over a markers partition and what it decides before it writes. It can kill itself with -9 after
the broker has the copies and facts of its n-th firing, and before their transaction is committed. The same before and
after it commits its n-th answer to a RESUME.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faust.cli.faust import cli

from lab import variants
from lab.proof import history
from lab.recorder import Recorder, around
from marq.core.redeliver_or_dead_letter import DueAction
from marq.owner.transaction_content import OwnerTransaction
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode
from marq.wire.markers import Resumed, Source, Tick
from marq_worker.owner.ownership import Ownership


class WatchedOwners:
    """Records the actions of the owners of markers partitions."""

    def __init__(self, recorder: Recorder, options: argparse.Namespace) -> None:
        self._recorder = recorder
        self._dies_at: int | None = options.die_in_transaction
        self._dies_in_answer: int | None = options.die_in_answer
        self._dies_after_answer: int | None = options.die_after_answer
        self._firings, self._answers = itertools.count(1), itertools.count(1)
        #: Offset of the newest own TICK that each tracker has read back, by holder.
        self._own_ticks: dict[int, int] = {}

    def install(self) -> None:
        """Wrap Marq's functions in this process."""
        around(Ownership, "_take_over", self._take_over)
        around(Ownership, "perform", self._perform)
        around(Ownership, "_halt", self._halt)
        around(Ownership, "_read", self._read)

    async def _take_over(self, take_over: Any, owner: Ownership) -> None:
        await take_over(owner)
        # It writes its first TICK after this, behind the current end.
        _, end = await owner.context.log_range(owner.partition)
        self._own_ticks.pop(owner.tracker.holder, None)
        holder, position = history.holder_name(owner.tracker.holder), owner.position
        self._recorder.add("ok", "own", holder=holder, log=_log(owner), fenced_at=end, position=position)

    async def _perform(self, perform: Any, owner: Ownership, write: OwnerTransaction) -> None:
        self._note_fires(owner, [fire for fire, _ in write.due])
        if write.due and next(self._firings) == self._dies_at:
            self._die_before_commit(owner)
        answers = [next(self._answers) for batch in write.markers if isinstance(batch, Resumed)]
        if self._dies_in_answer in answers:
            self._die_before_commit(owner)
        await perform(owner, write)
        if self._dies_after_answer in answers:
            self._recorder.die()

    async def _halt(self, halt: Any, owner: Ownership, alarm: str) -> None:
        self._recorder.add("ok", "halt", log=_log(owner), reason=alarm)
        await halt(owner, alarm)

    async def _read(self, read: Any, owner: Ownership, event: Any, fetched: Any) -> None:
        await read(owner, event, fetched)
        self._note_ticks(owner, fetched.records)

    def _note_ticks(self, owner: Ownership, records: Sequence[Any]) -> None:
        for record in records:
            if record.offset > owner.tracker.book.applied:
                return
            try:
                batch = decode(record.value)
            except CorruptMarker:
                continue
            if isinstance(batch, Tick) and batch.holder == owner.tracker.holder:
                self._own_ticks[owner.tracker.holder] = record.offset

    def _note_fires(self, owner: Ownership, fires: Sequence[DueAction]) -> None:
        tracker = owner.tracker
        holder, tick = history.holder_name(tracker.holder), self._own_ticks.get(tracker.holder)
        for fire in fires:
            self._recorder.add(
                "invoke", "fire", holder=holder, queue=fire.lease.queue, source=history.log_name(fire.source),
                offset=fire.offset, kind=fire.fact_kind.name, attempt=fire.attempt, cause=fire.cause.name,
                log=_log(owner), applied=tracker.book.applied, tick=tick,
            )  # fmt: skip

    def _die_before_commit(self, owner: Ownership) -> None:
        producer = owner._writer.producer
        assert producer is not None

        async def commit_transaction() -> None:
            self._recorder.die()

        producer.commit_transaction = commit_transaction  # type: ignore[method-assign]


def _log(owner: Ownership) -> str:
    return history.log_name(Source(owner.context.names.markers, owner.partition))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.worker", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("history", type=Path)
    parser.add_argument("--die-in-transaction", type=int, metavar="N")
    parser.add_argument("--die-in-answer", type=int, metavar="N")
    parser.add_argument("--die-after-answer", type=int, metavar="N")
    parser.add_argument("--install", metavar="MODULE:FUNCTION", help="a function that changes Marq")
    options = parser.parse_args()
    WatchedOwners(Recorder(options.name, options.history), options).install()
    if options.install:
        variants.install(options.install)
    cli(["-A", "app", "worker", "-l", "info"])


if __name__ == "__main__":
    main()
